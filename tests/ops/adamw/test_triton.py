"""The Triton AdamW step against the reference: every bit in the interpreter, moments in every bit on a GPU."""

import pytest
import torch

from octavo.ops.adamw import adamw_step_, join_master, reference
from octavo.ops.adamw import triton as kernels
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting
from tests.ops.adamw.cases import BETAS, MODES, make_case, make_hyper, mode_id

DEVICE = "cpu" if is_interpreting() else "cuda"
FP8 = (torch.bfloat16, "fp8", "remainder")
# A ragged block, one of its own, several programs, and a single element.
SMALL = [(1,), (131,), (17, 129), (4, 640)]
LARGE = [(63, 431), (128, 4096), (4096, 7168)]
SHAPES = SMALL if is_interpreting() else SMALL + LARGE


def run_both(
    mode: tuple[torch.dtype, str, str | None], grads: list[torch.Tensor], grad_scale: float = 1.0, offset: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what the kernel leaves, what the reference leaves) after a step for each gradient."""
    shape = tuple(grads[0].shape)
    ours, theirs = make_case(mode, shape, DEVICE), make_case(mode, shape)
    order = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "master")
    for step, grad in enumerate(grads, start=1):
        for case, run, device in ((ours, kernels.adamw_step, DEVICE), (theirs, reference.adamw_step, "cpu")):
            tensors = [case.get(name) for name in order]
            hyper = make_hyper(step, grad_scale, device)
            run(*tensors, grad.to(device), hyper, *BETAS.values(), offset)  # type: ignore[operator]
    return ours, theirs


def check(
    mode: tuple[torch.dtype, str, str | None], grads: list[torch.Tensor], grad_scale: float = 1.0, offset: int = 0
) -> None:
    ours, theirs = run_both(mode, grads, grad_scale, offset)
    for name, expected in theirs.items():
        if is_interpreting() or name.startswith("exp_avg"):
            assert_bitwise(ours[name], expected, name)
    if not is_interpreting():
        check_weights(mode, ours, theirs, len(grads))


def check_weights(
    mode: tuple[torch.dtype, str, str | None],
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    num_steps: int,
) -> None:
    """A GPU's root and quotient differ in their last bits, and a weight by what that makes of its updates."""
    weights = [case["param"].float().cpu() for case in (ours, theirs)]
    if mode[2] == "fp32":
        weights = [case["master"].cpu() for case in (ours, theirs)]
    elif mode[2] == "remainder":
        weights = [join_master(case["param"].cpu(), case["master"].cpu()) for case in (ours, theirs)]
    largest_update = 0.01 * 5.0  # lr; first / sqrt(second) of these betas stays below 5
    bound = num_steps * (largest_update * 2.0**-20 + 2.0**-23 * weights[1].abs())
    if mode[2] is None and mode[0] != torch.float32:
        # the parameter's own rounding may go the other way, at a step where it was up to an update larger as well
        bound = bound + num_steps * 2.0**-7 * (weights[1].abs() + largest_update)
    # a weight that was huge at an earlier step keeps that step's last bits: only format_max has such
    bound = bound + 2.0**-20 * weights[1].abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e6).sub(1e6)
    same = (weights[0] == weights[1]) | (weights[0].isnan() & weights[1].isnan())  # infinities and NaN too
    far = ~same & ~((weights[0] - weights[1]).abs() <= bound)
    assert not far.any(), f"{int(far.sum())} weights, first {weights[0][far][:3]} against {weights[1][far][:3]}"


@pytest.mark.parametrize("mode", MODES, ids=mode_id)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], mode: tuple[torch.dtype, str, str | None]) -> None:
    grads = [generate("heavy_tailed", shape, mode[0], seed) for seed in range(3)]
    check(mode, grads, grad_scale=0.37)


@pytest.mark.parametrize("mode", [FP8, (torch.bfloat16, "bf16", "fp32"), (torch.float32, "fp8", None)], ids=mode_id)
@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "with_inf_nan"])
def test_gradients(name: str, mode: tuple[torch.dtype, str, str | None]) -> None:
    check(mode, [generate(name, (9, 160), torch.float32, seed) for seed in range(4)])


@pytest.mark.parametrize("offset", [1, 128, 2**31 - 128, 5 * 2**32 + 2**31 + 7])
def test_places_of_a_shard(offset: int) -> None:
    """One place 2**31 lies in the shard."""
    check(
        (torch.bfloat16, "bf16", None), [generate("normal", (17, 129), seed=seed) for seed in range(2)], offset=offset
    )


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_dtypes(grad_dtype: torch.dtype) -> None:
    check(FP8, [generate("normal", (5, 160), grad_dtype, seed) for seed in range(2)])


def test_fp16_parameters() -> None:
    for master in ("fp32", None):
        check((torch.float16, "fp8", master), [generate("normal", (5, 160), torch.float16)])


def test_bad_gradients_ruin_their_block_alone() -> None:
    grad = generate("normal", (3, 128))
    grad[1, 5], grad[1, 9] = torch.nan, torch.inf
    ours, theirs = run_both(FP8, [grad, generate("normal", (3, 128), seed=1)])
    for case in (ours, theirs):
        assert case["param"].isfinite().sum() == 3 * 128 - 2
        assert case["exp_avg"].float().isfinite().all()
    for name in ("exp_avg", "exp_avg_sq"):
        assert_bitwise(ours[name][[0, 2]], theirs[name][[0, 2]], name)


@pytest.mark.skipif(is_interpreting(), reason="the public function dispatches by device")
def test_public_function() -> None:
    for device in ("cuda", "cpu"):
        case = make_case(FP8, (300, 500), device)
        param = case.pop("param")
        version = param._version
        grad = generate("normal", (500, 300), device=device).t()
        adamw_step_(param, grad, hyper=make_hyper(1, device=device), **BETAS, **case)
        assert param._version > version
        results = case["exp_avg"] if device == "cuda" else results.cpu()  # type: ignore[has-type] # noqa: F821
    assert_bitwise(results, case["exp_avg"])
