"""Between packed tokens and padded batches: what the torch implementations of attention work on."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class PaddedLayout:
    """Where each packed token sits in a padded [B, L] batch.

    Attributes:
        sequence, offset: [T] int64, the token's row and column.
        batch, length: B and L.
    """

    sequence: torch.Tensor
    offset: torch.Tensor
    batch: int
    length: int

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, num_tokens: int) -> "PaddedLayout":
        """Layout of sequences that lie one after the other.

        Args:
            cu_seqlens: [B+1] int, starting with 0, ending with num_tokens.
        """
        cu = cu_seqlens.long()
        lengths = cu[1:] - cu[:-1]
        sequence = torch.repeat_interleave(
            torch.arange(len(lengths), device=cu.device), lengths, output_size=num_tokens
        )
        offset = torch.arange(num_tokens, device=cu.device) - cu[sequence]
        return cls(sequence, offset, len(lengths), int(lengths.max()) if len(lengths) else 0)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [B, L, ...], zeros where there is no token."""
        out = x.new_zeros((self.batch, self.length, *x.shape[1:]))
        out[self.sequence, self.offset] = x
        return out

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, ...] -> [T, ...]."""
        return x[self.sequence, self.offset]
