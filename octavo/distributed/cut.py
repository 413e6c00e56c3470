"""Where a tensor-parallel rank's slice of a parameter, or of what is kept of it, lies in the whole one."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Cut:
    """Ranges of a tensor's rows, which lie one after the other on this rank, and a range of its columns.

    Attributes:
        shape: of the whole tensor.
        rows: along dim 0.
        columns: along dim 1; None for all of them.
    """

    shape: tuple[int, ...]
    rows: tuple[slice, ...]
    columns: slice | None = None

    @property
    def vector(self) -> "Cut":
        """Of a tensor with one element a row."""
        return Cut(self.shape[:1], self.rows)

    def pieces(self, first: int, num: int) -> Iterator[tuple[int, slice]]:
        """Where some of this rank's rows lie.

        Args:
            first: the first one's number, among this rank's.
            num: how many.
        Yields:
            (first row in the whole tensor, which of the num rows).
        """
        begin = 0
        for rows in self.rows:
            end = begin + rows.stop - rows.start
            low, high = max(first, begin), min(first + num, end)
            if low < high:
                yield rows.start + low - begin, slice(low - first, high - first)
            begin = end
