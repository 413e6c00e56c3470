"""What `octavo doctor` finds out: can this machine run octavo, where does FP8 depart from bf16, why do sides differ."""

from octavo.deprecation import former_names
from octavo.doctor.departure import Departure, DepartureReport, balanced_sqnr, find_departure
from octavo.doctor.machine import Check, check_machine
from octavo.doctor.mismatch import MismatchReport, find_mismatch
from octavo.doctor.model_under_test import ModelUnderTest, open_model_under_test
from octavo.doctor.recipes import RecipeCheck, check_recipes
from octavo.doctor.sides import Side

__all__ = [
    "Check",
    "Departure",
    "DepartureReport",
    "MismatchReport",
    "ModelUnderTest",
    "RecipeCheck",
    "Side",
    "balanced_sqnr",
    "check_machine",
    "check_recipes",
    "find_departure",
    "find_mismatch",
    "open_model_under_test",
]

__getattr__ = former_names(__name__, Subject="ModelUnderTest", open_subject="open_model_under_test")
