"""Optimizers whose state takes few bytes."""

from octavo.optim.adamw import AdamW

__all__ = ["AdamW"]
