"""Tiles that a program holds in registers, for producers that end with `quantize_register_tile`: size and rule."""

from typing import Any, NamedTuple

from octavo.ops.quantize.triton import Step

TILE = 128


class RegisterTile(NamedTuple):
    """Warps of a program that holds a tile of TILE x TILE, the cap on its registers, elements of a line a thread."""

    num_warps: int
    registers: int
    thread_columns: int

    def rule_of(self, step: Step) -> tuple[Any, ...]:
        """The step's rule for such tiles: ROWS_M, CHUNKS, COLS_K and SPREAD are its last.

        SPREAD threads lie along M, the others along K, thread_columns elements each.
        """
        return (*step.rule[:-4], TILE, 1, TILE, 32 * self.num_warps * self.thread_columns // TILE)

    @property
    def options(self) -> dict[str, int]:
        """As triton names them."""
        return {"num_warps": self.num_warps, "maxnreg": self.registers}


# Every thread divides for each line that it has a part of, so 128 elements a thread take a quarter fewer instructions
# an element than 64. Two programs fit on a multiprocessor, three of the lean one.
TILE_SMALL = RegisterTile(8, 128, 8)
TILE_BUSY = RegisterTile(8, 128, 16)
TILE_LARGE = RegisterTile(4, 255, 16)
TILE_LEAN = RegisterTile(4, 168, 16)
# Of two tiles at once under one scale: two programs of many warps.
TILE_PAIR = RegisterTile(16, 64, 8)
