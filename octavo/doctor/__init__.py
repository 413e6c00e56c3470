"""What `octavo doctor` finds out: whether this machine can run octavo, and where a model departs from bf16 in FP8."""

from octavo.doctor.departure import Departure, DepartureReport, balanced_sqnr, find_departure
from octavo.doctor.machine import Check, check_machine
from octavo.doctor.recipes import RecipeCheck, check_recipes
from octavo.doctor.subject import Subject, open_subject

__all__ = [
    "Check",
    "Departure",
    "DepartureReport",
    "RecipeCheck",
    "Subject",
    "balanced_sqnr",
    "check_machine",
    "check_recipes",
    "find_departure",
    "open_subject",
]
