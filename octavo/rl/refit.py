"""Refit under its old name; octavo.weights.refit holds it."""

from octavo.weights.refit import RefitReport, refit, share_weights

__all__ = ["RefitReport", "refit", "share_weights"]
