"""Tiles that a program holds, for producers that end with `emit_held`: their size, and a step's rule for them."""

from typing import Any, NamedTuple

from octavo.ops.quantize.triton import Step

TILE = 128


class Held(NamedTuple):
    """Warps of a program that holds a tile of TILE x TILE, and the cap on its registers."""

    num_warps: int
    registers: int

    def rule_of(self, step: Step) -> tuple[Any, ...]:
        """The step's rule for such tiles: ROWS_M, CHUNKS, COLS_K and SPREAD are its last."""
        # Lanes lie along K first, 16 elements each, which are 16 bytes of codes; the other threads lie along M.
        return (*step.rule[:-4], TILE, 1, TILE, 32 * self.num_warps // (TILE // 16))

    @property
    def options(self) -> dict[str, int]:
        """As triton names them."""
        return {"num_warps": self.num_warps, "maxnreg": self.registers}


# Every thread divides for each line that it has a part of, so 128 elements a thread take a quarter fewer instructions
# an element than 64. Two programs of the first two fit on a multiprocessor, three of the last.
HELD_SMALL = Held(8, 128)
HELD_LARGE = Held(4, 255)
HELD_LEAN = Held(4, 168)
IS_LARGE_ENABLED = True  # off: 64 elements a thread everywhere, for comparison


def choose_held(*, is_busy: bool, is_lean: bool) -> Held:
    """By what a program does besides: much (then 64 elements a thread), some, or little that waits in registers."""
    if is_busy or not IS_LARGE_ENABLED:
        return HELD_SMALL
    return HELD_LEAN if is_lean else HELD_LARGE
