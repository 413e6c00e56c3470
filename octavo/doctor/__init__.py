"""What `octavo doctor` finds out: can this machine run octavo, where does FP8 depart from bf16, why do sides differ."""

from octavo.doctor.departure import Departure, DepartureReport, balanced_sqnr, find_departure
from octavo.doctor.machine import Check, check_machine
from octavo.doctor.mismatch import MismatchReport, find_mismatch
from octavo.doctor.recipes import RecipeCheck, check_recipes
from octavo.doctor.sides import Side
from octavo.doctor.subject import Subject, open_subject

__all__ = [
    "Check",
    "Departure",
    "DepartureReport",
    "MismatchReport",
    "RecipeCheck",
    "Side",
    "Subject",
    "balanced_sqnr",
    "check_machine",
    "check_recipes",
    "find_departure",
    "find_mismatch",
    "open_subject",
]
