"""Refit as the loop makes it: all linears quantized, in both layouts, and handed to the engine in this process."""

import time

import torch

from bench.record import Record, summarize
from bench.report import BOTH_LAYOUTS, FORWARD_LAYOUT
from bench.rl.pace import paced_steps
from bench.rl.synthetic import build_policy, build_worker, loop_config, model_config
from bench.rl.workloads import LoopSizes, LoopVariant
from bench.serve.measure import OutOfTimeError
from bench.speed.ceilings import Ceilings
from bench.timing import synchronize
from octavo.errors import BackendError
from octavo.models import Decoder
from octavo.nn import Linear
from octavo.rl.rollout_worker import RolloutWorker
from octavo.weights.refit import RefitReport

_MAX_ERROR = 0.05  # of codes in E4M3 against what they stand for, as a share of its norm; rounding alone leaves 0.03
_WARM_UP = 3


def measure_refit(
    record: Record,
    case: str,
    sizes: LoopSizes,
    variant: LoopVariant,
    recipe: str,
    device: str,
    ceilings: Ceilings,
    deadline: float,
) -> str:
    """Time the hand-over of new weights, check the codes, add the rows.

    Returns:
        What to print.
    Raises:
        OutOfTimeError: not one timed refit before the deadline.
        AssertionError: codes that are none of the weights.
        BackendError: a refit that quantized less than all.
    """
    config, shape = loop_config(variant, sizes, recipe, device), model_config(sizes)
    model = build_policy(shape, config.trainer_numerics, device)
    worker = build_worker(config, model, sizes)
    linears = coded_linears(model)
    # In this order: once backwards read codes, the refits after them make both layouts.
    forward_us = _times_us(worker, model, [], sizes.passes, deadline)
    both_us = _times_us(worker, model, linears, sizes.passes, deadline)
    error = code_error(linears[0])
    assert error < _MAX_ERROR, f"codes are {error:.3f} away from their weight, allowed: {_MAX_ERROR}"
    num_weights = sum(layer.in_features * layer.out_features for layer in linears)
    num_codes = (
        num_weights if variant.exact else 2 * num_weights
    )  # the inexact trainer makes its own beside the sampler's
    floor = ceilings.moving_s((2 + 1) * num_weights + num_codes)
    peer = "bytes at the bandwidth of a copy in the same run"
    record.add_times(case, FORWARD_LAYOUT, "ms", summarize(forward_us), 1e-3)
    both = summarize(both_us)
    record.add_times(case, BOTH_LAYOUTS, "ms", both, 1e-3, peer, floor * 1e3)
    record.add(case, "weights", "1", num_weights)
    record.add(case, "timed refits", "refits", len(both_us))
    return (
        f"{both.median_us / 1e3:.2f} ms for both layouts, floor {floor * 1e3:.2f} ms, {num_weights / 1e9:.2f}e9 weights"
    )


def coded_linears(model: Decoder) -> list[Linear]:
    """Those that multiply in FP8."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    return [layer for layer in linears if layer.recipe is not None and layer.recipe.is_fp8]


def code_error(layer: Linear) -> float:
    """How far the codes of both layouts are from the weight, the larger of the two, as a share of its norm."""
    assert layer.weight is not None and layer.recipe is not None, "a trainer's layer"
    weight, errors = layer.weight.detach().float(), []
    for rows, codes in layer.forward_operands(layer.recipe):
        errors.append((codes.dequantize(torch.float32) - weight[rows]).norm() / weight[rows].norm())
    for rows, codes in layer.backward_operands(layer.recipe):
        errors.append((codes.dequantize(torch.float32).t() - weight[rows]).norm() / weight[rows].norm())
    return max(error.item() for error in errors)


def _times_us(
    worker: RolloutWorker, model: Decoder, trained: list[Linear], num_timed: int, deadline: float
) -> list[float]:
    """Times of refits until the engine has new weights, and the linears that are trained both layouts of theirs."""
    num_linears, times = len(coded_linears(model)), []
    for _, is_timed in paced_steps(_WARM_UP, num_timed, deadline):
        seconds, report = _refit_once(worker, model, trained)
        if report.num_quantized < num_linears or report.weight_version != model.weight_version:
            raise BackendError(f"the refit brought {report.num_quantized} of {num_linears} weights: {report}")
        if is_timed:
            times.append(seconds * 1e6)
    if not times:
        raise OutOfTimeError
    return times


@torch.no_grad()
def _refit_once(worker: RolloutWorker, model: Decoder, trained: list[Linear]) -> tuple[float, RefitReport]:
    model.mark_weights_updated()  # as the optimizer does at the end of its step
    synchronize(model.device)
    began = time.perf_counter()
    report = worker.publish()
    for layer in trained:
        assert layer.recipe is not None and layer.weight is not None, "coded"
        for _ in range(2):  # micro-batches of a step
            layer.source.whole_of_training(layer.weight, layer.plan_for(layer.recipe))
            layer.backward_operands(layer.recipe)
    synchronize(model.device)
    return time.perf_counter() - began, report
