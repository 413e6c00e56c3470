"""The audit of outgoing weights: every way in which codes and scales go wrong is caught, under its name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.models import Decoder
from octavo.rl.engines import WeightAuditError
from octavo.weights.audit import audit_weights
from octavo.weights.outgoing import OutgoingWeights
from tests.integrations.rollout.conftest import make_policy
from tests.rl.conftest import Policy, nudge

GATE = "model.layers.0.mlp.gate_proj.weight"  # [256, 128]
SQUARE = "model.layers.0.self_attn.q_proj.weight"  # [256, 256] where the model is wide
SCALE = f"{GATE}_scale_inv"


@pytest.fixture
def blocks(tmp_path: Path) -> Policy:
    return make_policy(tmp_path)


@pytest.fixture
def tensors(blocks: Policy) -> dict[str, torch.Tensor]:
    return OutgoingWeights.of(blocks[0], "fp8-block").tensors


def fault(model: Decoder, tensors: dict[str, torch.Tensor], scale_format: str = "fp32") -> tuple[str, str]:
    with pytest.raises(WeightAuditError) as caught:
        audit_weights(model, tensors, tensors.__getitem__, scale_format=scale_format)
    assert str(caught.value).startswith(f"{caught.value.fault}: {caught.value.tensor}: ")
    return caught.value.fault, caught.value.tensor


@pytest.mark.parametrize("dialect", ["fp8-block", "bf16"])
def test_the_policys_own_tensors_pass(blocks: Policy, dialect: str) -> None:
    outgoing = OutgoingWeights.of(blocks[0], dialect)
    outgoing.audit()
    codes = [name for name, tensor in outgoing.tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(codes) == (7 if dialect == "fp8-block" else 0)
    assert outgoing.num_bytes == sum(t.numel() * t.element_size() for t in outgoing.tensors.values())


def test_codes_are_those_that_the_policy_computes_with(blocks: Policy, tensors: dict[str, torch.Tensor]) -> None:
    (gate_up,) = (m for name, m in blocks[0].named_modules() if name.endswith("gate_up_proj"))
    held = torch.cat([q.qdata.view(torch.uint8) for q in gate_up.quantized_weight()])  # type: ignore[operator]
    up = GATE.replace("gate", "up")
    assert torch.equal(held, torch.cat([tensors[name].view(torch.uint8) for name in (GATE, up)]))


def codes_of_powers_of_two(model: Decoder) -> torch.Tensor:
    weight = model.get_parameter("layers.0.mlp.gate_up_proj.weight").detach()[:256].float()
    return (weight / 2.0**-9).to(torch.float8_e4m3fn)


FAULTS: dict[str, tuple[Callable[[Decoder, dict[str, torch.Tensor]], object], tuple[str, str]]] = {
    "no scale": (lambda m, t: t.pop(SCALE), ("missing scale", SCALE)),
    "no tensor": (lambda m, t: t.pop("model.norm.weight"), ("un-updated tensor", "model.norm.weight")),
    "transposed shape": (lambda m, t: t.update({SCALE: t[SCALE].T}), ("transposed scales", SCALE)),
    "scale 1": (lambda m, t: t[SCALE].fill_(1.0), ("scale 1 by omission", GATE)),
    "e8m0 bytes": (
        lambda m, t: t.update({SCALE: t[SCALE].to(torch.float8_e8m0fnu)}), ("E8M0 against fp32 scales", SCALE),
    ),
    "scales cut to powers of two": (
        lambda m, t: t.update({SCALE: 2.0 ** torch.log2(t[SCALE]).floor()}), ("E8M0 against fp32 scales", GATE),
    ),
    "codes of powers of two": (
        lambda m, t: t.update({GATE: codes_of_powers_of_two(m)}), ("E8M0 against fp32 scales", GATE),
    ),
    **{
        f"a scale of {bad}": (lambda m, t, bad=bad: t[SCALE].fill_(bad), ("wrong tensor", SCALE))
        for bad in (0.0, -1.0, float("inf"), float("nan"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_name(blocks: Policy, tensors: dict[str, torch.Tensor], name: str) -> None:
    change, expected = FAULTS[name]
    tensors[SCALE] = tensors[SCALE].clone()
    change(blocks[0], tensors)
    assert fault(blocks[0], tensors) == expected


def test_transposed_scales_of_a_square_by_their_values(tmp_path: Path) -> None:
    model, _ = make_policy(tmp_path, hidden_size=256, num_attention_heads=2, num_key_value_heads=2)
    with torch.no_grad():
        model.get_parameter("layers.0.self_attn.qkv_proj.weight")[:128, 128:] *= 8
    model.mark_weights_updated()
    tensors = OutgoingWeights.of(model, "fp8-block").tensors
    assert tensors[f"{SQUARE}_scale_inv"].shape == (2, 2)
    tensors[f"{SQUARE}_scale_inv"] = tensors[f"{SQUARE}_scale_inv"].T.contiguous()
    assert fault(model, tensors) == ("transposed scales", SQUARE)


def test_powers_of_two_throughout_against_a_recipe_of_fp32(tmp_path: Path) -> None:
    from octavo.numerics import Numerics, get_recipe

    model, _ = make_policy(tmp_path, hidden_size=256)
    model.set_numerics(Numerics(get_recipe("blockwise", scale_format="e8m0"), "fp8", exact=True))
    outgoing = OutgoingWeights.of(model, "fp8-block")
    outgoing.audit()
    assert fault(model, outgoing.tensors)[0] == "E8M0 against fp32 scales"


def test_an_old_weight(blocks: Policy) -> None:
    old = dict(OutgoingWeights.of(blocks[0], "fp8-block").tensors)
    old = {name: tensor.clone() for name, tensor in old.items()}
    nudge(blocks[0], by=0.02)
    fresh = OutgoingWeights.of(blocks[0], "fp8-block").tensors
    stale_codes = {**fresh, GATE: old[GATE], SCALE: old[SCALE]}
    assert fault(blocks[0], stale_codes) == ("un-updated tensor", GATE)
    stale_norm = {**fresh, "model.norm.weight": old["model.norm.weight"]}
    assert fault(blocks[0], stale_norm) == ("un-updated tensor", "model.norm.weight")


def test_a_quantized_router(tmp_path: Path) -> None:
    from octavo import load_model
    from tests.serve.random_models import make_config

    model = load_model(make_config("qwen3_moe"), seed=0)
    tensors = OutgoingWeights.of(model, "bf16").tensors
    router = "model.layers.1.mlp.gate.weight"
    audit_weights(model, tensors, tensors.__getitem__)
    tensors[router] = tensors[router].to(torch.float8_e4m3fn)
    assert fault(model, tensors) == ("quantized router", router)
