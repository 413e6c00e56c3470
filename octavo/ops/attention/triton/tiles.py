"""Shapes of programs by the cache's format and head_dim."""

from typing import NamedTuple

from octavo.ops.attention.cache import PagedKVLayer


class Tile(NamedTuple):
    """A program's shape.

    Attributes:
        block: keys a step; decides bits.
        groups: of rows a tile. A warp owns each of several groups, and all share the keys they load; the rows of a
            single one are shared by its warps.
        rows: of one group. From 64 rows a group on, and with 4 warps or 8, Triton takes wgmma, which has other bits;
            below, neither groups nor rows decides them.
        num_warps: of a program; groups where there are several.
        stages: of its loads.
    """

    block: int
    groups: int
    rows: int
    num_warps: int
    stages: int


class Tiles(NamedTuple):
    """decode and prefill give the same bits; fast, for many new tokens, its own."""

    decode: Tile
    prefill: Tile
    fast: Tile


TILES = {
    ("fp8", 128): Tiles(Tile(64, 1, 16, 2, 3), Tile(64, 1, 32, 2, 3), Tile(64, 1, 64, 4, 3)),
    ("fp8", 256): Tiles(Tile(32, 1, 16, 2, 3), Tile(32, 1, 32, 4, 3), Tile(32, 1, 32, 4, 3)),
    # a block is what shares a scale of probabilities: 64 keys
    ("fp8 attention", 128): Tiles(Tile(64, 1, 16, 4, 3), Tile(64, 1, 32, 4, 3), Tile(64, 1, 64, 4, 3)),
    ("fp8 attention", 256): Tiles(Tile(64, 1, 16, 4, 3), Tile(64, 1, 32, 8, 2), Tile(64, 1, 32, 8, 2)),
    ("16 bits", 128): Tiles(Tile(64, 1, 16, 4, 3), Tile(64, 4, 16, 4, 3), Tile(64, 1, 64, 4, 3)),
    ("16 bits", 256): Tiles(Tile(32, 1, 16, 4, 3), Tile(32, 1, 32, 4, 3), Tile(32, 1, 32, 4, 3)),
}


def tiles_of(layer: PagedKVLayer) -> Tiles:
    """Programs' shapes: by the cache's format and head_dim alone, never by the batch."""
    kind = "fp8 attention" if layer.attention_dtype == "fp8" else "fp8" if layer.is_fp8 else "16 bits"
    return TILES[kind, 128 if layer.k.shape[3] <= 128 else 256]
