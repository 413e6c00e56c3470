"""What could not be written for people to look at: logged, counted, never raised, so that no run ends by it."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class WriteFailures:
    """The failed writes of a run.

    Attributes:
        counts: of each file or service, by its name.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Failed writes of all kinds."""
        return self.counts.total()

    @contextmanager
    def caught(self, what: str) -> Iterator[None]:
        """Count an error of the block as a failed write of `what`; the first of each kind is logged."""
        try:
            yield
        except Exception as error:
            self.counts[what] += 1
            if self.counts[what] == 1:
                logger.warning("%s was not written, the run goes on: %s: %s", what, type(error).__name__, error)

    def log_total(self) -> None:
        """Say at the end how much is missing."""
        if self.counts:
            each = ", ".join(f"{what} {count}" for what, count in self.counts.items())
            logger.warning("writes that failed in this run: %s", each)
