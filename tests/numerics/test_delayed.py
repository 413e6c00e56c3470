"""Delayed scaling against a plain-Python state machine written from TransformerEngine's rules alone."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from octavo.numerics.delayed import next_quant_scale, reduce_history, stage_amax, update_delayed
from octavo.numerics.recipe import DelayedScaling, Recipe

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
FP32_MAX = float(np.finfo(np.float32).max)
INF, NAN = math.inf, math.nan


class Machine:
    """One operand's state in Python numbers: a list of amaxes, newest last, and the one being staged."""

    def __init__(self, fp8_max: float, margin: int, history_len: int, is_max: bool) -> None:
        self.fp8_max, self.margin, self.is_max = fp8_max, margin, is_max
        self.past = [0.0] * (history_len - 1)
        self.staged = 0.0
        self.quant_scale = 1.0

    def observe(self, amax: float) -> None:
        if not math.isnan(amax):
            self.staged = max(self.staged, amax)

    def update(self, everything_skipped: bool) -> None:
        if everything_skipped:
            return
        amax = max([self.staged, *self.past]) if self.is_max else self.staged
        if 0 < amax < INF:
            with np.errstate(over="ignore"):
                fresh = np.float32(self.fp8_max / 2**self.margin) / np.float32(amax)
            self.quant_scale = min(float(fresh), FP32_MAX)
        self.past = [*self.past, self.staged][1:]  # the oldest leaves
        self.staged = 0.0


class Octavo:
    """The same interface over octavo's tensors, two operands wide."""

    def __init__(self, recipe: Recipe, fp8_max: tuple[float, ...] = (E4M3_MAX, E5M2_MAX)) -> None:
        assert recipe.delayed is not None
        self.recipe, self.fp8_max = recipe, torch.tensor(fp8_max)
        self.history = torch.zeros(recipe.delayed.amax_history_len, len(fp8_max))
        self.quant_scale = torch.ones(len(fp8_max))

    def step(self, *amaxes: float) -> list[float]:
        for slot, amax in enumerate(amaxes):
            stage_amax(self.history, slot, torch.tensor(amax))
        self.history, self.quant_scale = update_delayed(self.history, self.quant_scale, self.fp8_max, self.recipe)
        return self.quant_scale.tolist()


def te_max(history: torch.Tensor) -> torch.Tensor:
    return history.nan_to_num(nan=0.0, posinf=INF).amax(dim=0)


def te_most_recent(history: torch.Tensor) -> torch.Tensor:
    return history[0]


ALGORITHMS: dict[str, tuple[str | Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "max": ("max", True),
    "most_recent": ("most_recent", False),
    "callable_max": (te_max, True),
    "callable_most_recent": (te_most_recent, False),
}


@pytest.mark.parametrize("algo", list(ALGORITHMS))
@pytest.mark.parametrize("history_len", [1, 31, 1024])
def test_scenarios(history_len: int, algo: str) -> None:
    for amax, margin in itertools.product((0.0, 1e-40, 2.5, INF, NAN), (0, 2)):
        check_scenario(amax, margin, history_len, *ALGORITHMS[algo])


def check_scenario(
    amax: float, margin: int, history_len: int, chosen: str | Callable[[torch.Tensor], torch.Tensor], is_max: bool
) -> None:
    state = Octavo(DelayedScaling(margin=margin, amax_history_len=history_len, amax_compute_algo=chosen))
    machines = [Machine(fp8_max, margin, history_len, is_max) for fp8_max in (E4M3_MAX, E5M2_MAX)]
    steps = [(3.0, 0.01), (amax, amax), (amax, 7.0), (1.0, amax), (0.0, 0.0), (0.5, 0.25), (0.0, 2.0), (0.1, 0.1)]
    steps += [(0.3 / (i + 1), 0.0) for i in range(min(history_len, 31))]
    for step in steps:
        got = state.step(*step)
        for machine, value in zip(machines, step, strict=True):
            machine.observe(value)
        skipped = all(machine.staged == 0 for machine in machines)
        for machine in machines:
            machine.update(skipped)
        assert got == [machine.quant_scale for machine in machines], (amax, margin)
        for slot, machine in enumerate(machines):
            assert state.history[:, slot].tolist() == np.float32([0.0, *machine.past]).tolist()


@pytest.mark.parametrize("history_len", [1, 31, 1024])
def test_infinity_freezes_until_it_leaves_the_window(history_len: int) -> None:
    state = Octavo(DelayedScaling(amax_history_len=history_len), fp8_max=(E4M3_MAX,))
    assert state.step(2.0) == [224.0]
    assert state.step(INF) == [224.0]
    frozen = [state.step(4.0) for _ in range(history_len - 1)]
    assert frozen == [[224.0]] * (history_len - 1)
    assert state.step(4.0) == [112.0]


def test_old_amax_leaves_the_window() -> None:
    state = Octavo(DelayedScaling(amax_history_len=3), fp8_max=(E4M3_MAX,))
    assert [state.step(a)[0] for a in (8.0, 1.0, 1.0, 1.0)] == [56.0, 56.0, 56.0, 448.0]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_skipped_step_changes_nothing(algo: str) -> None:
    state = Octavo(DelayedScaling(amax_history_len=4, amax_compute_algo=algo))
    state.step(2.0, 3.0)
    history, quant_scale = state.history.clone(), state.quant_scale.clone()
    for _ in range(10):
        state.step(0.0, 0.0)
        state.step(NAN, 0.0)  # NaN is dropped, so nothing was staged
    assert torch.equal(state.history, history)
    assert torch.equal(state.quant_scale, quant_scale)
    state.step(0.0, 1.0)  # one operand is enough to roll both
    assert state.history[-1].tolist() == [0.0, 1.0]


def test_nan_is_dropped_when_staged_and_when_reduced() -> None:
    history = torch.zeros(3, 1)
    for amax in (NAN, 2.0, NAN, 1.0):
        stage_amax(history, 0, torch.tensor([[amax]]))
    assert history[0, 0] == 2.0
    dirty = torch.tensor([[1.0, NAN, NAN], [NAN, 5.0, NAN], [0.5, INF, NAN]])
    assert reduce_history(dirty, DelayedScaling()).tolist() == [1.0, INF, 0.0]
    assert reduce_history(dirty, DelayedScaling(amax_compute_algo="most_recent")).tolist() == [1.0, 0.0, 0.0]


def test_nan_of_a_callable_keeps_the_old_scale() -> None:
    recipe = DelayedScaling(amax_compute_algo=lambda history: torch.full((1,), NAN))
    assert Octavo(recipe, fp8_max=(E4M3_MAX,)).step(2.0) == [1.0]


def test_callable_sees_the_staged_row_before_the_roll() -> None:
    seen: list[list[float]] = []

    def algo(history: torch.Tensor) -> torch.Tensor:
        seen.append(history[:, 0].tolist())
        return history.amax(dim=0)

    state = Octavo(DelayedScaling(amax_history_len=3, amax_compute_algo=algo), fp8_max=(E4M3_MAX,))
    for amax in (1.0, 2.0, 3.0, 4.0):
        state.step(amax)
    assert seen == [[1.0, 0.0, 0.0], [2.0, 0.0, 1.0], [3.0, 1.0, 2.0], [4.0, 2.0, 3.0]]


def test_scaling_factor_callable() -> None:
    def scaling_factor(amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        assert recipe.delayed is not None
        return scale * 2 + fp8_max / amax / 2**recipe.delayed.margin

    recipe = DelayedScaling(margin=1, scaling_factor_compute_algo=scaling_factor)
    assert Octavo(recipe, fp8_max=(E4M3_MAX,)).step(4.0) == [2.0 + 448 / 4 / 2]


def test_division_is_rounded_once() -> None:
    amax = torch.linspace(0.01, 9, 20_001)
    fp8_max = torch.full_like(amax, E4M3_MAX)
    for margin in (0, 2):
        got = next_quant_scale(amax, torch.ones_like(amax), fp8_max, DelayedScaling(margin=margin))
        np.testing.assert_array_equal(got.numpy(), np.float32(448 / 2**margin) / amax.numpy())


def test_inputs_are_not_written() -> None:
    history, quant_scale = torch.rand(4, 2), torch.ones(2)
    before = history.clone()
    update_delayed(history, quant_scale, torch.full((2,), E4M3_MAX), DelayedScaling(amax_history_len=4))
    assert torch.equal(history, before)
    assert quant_scale.tolist() == [1.0, 1.0]


def test_slots_are_independent() -> None:
    amaxes = list(itertools.product([0.5, 3.0, INF], repeat=2))
    recipe = DelayedScaling(amax_history_len=2)
    both = Octavo(recipe)
    alone = [Octavo(recipe, (fp8_max,)) for fp8_max in (E4M3_MAX, E5M2_MAX)]
    for step in amaxes:
        expected = [single.step(amax)[0] for single, amax in zip(alone, step, strict=True)]
        assert both.step(*step) == expected
