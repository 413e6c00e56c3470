"""Numbers as JSON has them."""

import math

# what OpenAI's API writes for a token of no probability
LOWEST_LOGPROB = -9999.0


def json_number(logprob: float) -> float | None:
    """A logprob: minus infinity as -9999, NaN (a broken model) as null; any other keeps all its bits."""
    if math.isnan(logprob):
        return None
    return max(logprob, LOWEST_LOGPROB)
