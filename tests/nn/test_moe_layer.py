"""A decoder layer with experts: what it runs fused has the bits of its modules, whatever watches or is cut."""

from collections.abc import Callable

import pytest
import torch

from octavo.distributed import tensor_group
from octavo.models import Decoder
from octavo.nn import MLP, DecoderLayer, PackedContext, SparseMoE, convert, moe, plan_fusion, set_fusion
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.ops import moe as moe_ops
from octavo.testing import assert_bitwise
from tests.recipes import FP8_RECIPES
from tests.serve.random_models import make_model

STATIC = get_recipe("tensorwise", static_input=True)
RECIPES = [*(get_recipe(name) for name in (*FP8_RECIPES, "bf16")), STATIC]
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "static" if r.static_input else r.name)


def make(recipe: Recipe, device: torch.device, exact: bool = False, **sizes: int) -> Decoder:
    sizes = {"moe_intermediate_size": 128, "vocab_size": 128, "head_dim": 64, **sizes}  # that exact kernels take
    model = make_model("qwen3_moe", device=device, exact=False, **sizes)
    model.set_numerics(Numerics(recipe, "bf16", exact))
    if recipe.static_input:
        for i, linear in enumerate(m for m in model.layers.modules() if hasattr(m, "set_input_scale")):
            linear.set_input_scale(torch.tensor(0.01 * (i + 1)))
    return model


def hidden(model: Decoder, tokens: int = 37) -> torch.Tensor:
    ids = torch.arange(tokens, device=model.device) % 96
    with torch.no_grad():
        return model(ids, PackedContext.from_lengths([tokens], model.numerics, model.device))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each norm that experts read returned itself beside its codes."""
    found: list[bool] = []

    def counted(*args, norm_input=moe.norm_input, **options):  # type: ignore[no-untyped-def]
        found.append(options["keeps_norm"])
        return norm_input(*args, **options)

    monkeypatch.setattr(moe, "norm_input", counted)
    return found


@ALL_RECIPES
def test_fused_equals_unfused(recipe: Recipe, device: torch.device, kept: list[bool]) -> None:
    model = make(recipe, device, moe_intermediate_size=72)
    for tokens in (37, 1, 0):
        fused = hidden(model, tokens)
        assert kept == ([True, True] if recipe.is_fp8 else [])
        kept.clear()
        set_fusion(model, False)
        assert_bitwise(fused, hidden(model, tokens))
        assert not kept
        set_fusion(model, None)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_exact_on_a_cpu_keeps_the_order_free_norm(recipe: str, kept: list[bool]) -> None:
    model = make(get_recipe(recipe), torch.device("cpu"), exact=True)
    whole = hidden(model)
    assert not kept
    assert_bitwise(hidden(model, 5), whole[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_exact_on_a_gpu_takes_the_fused_path(recipe: str, kept: list[bool]) -> None:
    """With the trainer's bits, gradients on."""
    model = make(get_recipe(recipe), torch.device("cuda"), exact=True)
    fused = hidden(model)
    assert kept == [True, True]
    ids = torch.arange(37, device=model.device) % 96
    trained = model(ids, PackedContext.from_lengths([37], model.numerics, model.device))
    assert trained.requires_grad
    assert_bitwise(trained.detach(), fused)
    set_fusion(model, False)
    assert_bitwise(fused, hidden(model))


def blocks(model: Decoder) -> list[SparseMoE]:
    return [module for module in model.modules() if isinstance(module, SparseMoE)]


WATCHED: dict[str, Callable[[DecoderLayer], torch.nn.Module]] = {
    "norm": lambda layer: layer.post_attention_layernorm,
    "block": lambda layer: layer.mlp,
    "experts": lambda layer: layer.mlp.experts,  # type: ignore[union-attr, return-value]
    "linear": lambda layer: layer.mlp.experts.down_proj,  # type: ignore[union-attr, return-value]
    "router": lambda layer: layer.mlp.gate,  # type: ignore[union-attr, return-value]
}


@pytest.mark.parametrize("which", WATCHED)
def test_what_is_hooked_is_called(which: str, device: torch.device, kept: list[bool]) -> None:
    """The router is called where all is fused, too."""
    model = make(get_recipe("blockwise"), device)
    wanted, seen = hidden(model), list[int]()
    kept.clear()
    for layer in model.layers:
        WATCHED[which](layer).register_forward_hook(lambda *_: seen.append(1))  # type: ignore[arg-type]
    plan_fusion(model)
    assert_bitwise(hidden(model), wanted)
    assert len(seen) == 2
    assert len(kept) == (2 if which == "router" else 0)


def test_an_observer_sees_the_experts_input(device: torch.device, kept: list[bool]) -> None:
    model, seen = make(get_recipe("blockwise"), device), list[str]()
    wanted = hidden(model)
    kept.clear()
    for block in blocks(model):
        block.experts.gate_up_proj.observer = lambda role, *_: seen.append(role)
    assert_bitwise(hidden(model), wanted)
    assert seen.count("input") == 2 and not kept


def test_experts_are_recorded_and_replayed(device: torch.device, kept: list[bool]) -> None:
    model, recorded = make(get_recipe("blockwise"), device), list[torch.Tensor]()
    for block in blocks(model):
        block.recorder = recorded.append
    wanted = hidden(model)
    others = [torch.flip(experts, (0,)) for experts in recorded]  # other tokens' choice
    recorded.clear()
    for block, given in zip(blocks(model), others, strict=True):
        block.replay = lambda own, given=given: given
    fused = hidden(model)
    assert all(torch.equal(a, b) for a, b in zip(recorded, others, strict=True))
    assert not torch.equal(fused, wanted)
    assert kept == [True] * 4
    set_fusion(model, False)
    assert_bitwise(hidden(model), fused)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_parts_of_ranks_are_put_together_first(recipe: str, device: torch.device) -> None:
    """Attention of a model that is cut leaves this rank's part of its output, or its share of the stream's rows."""

    class Part(tensor_group.PartialRows):
        def whole(self) -> torch.Tensor:
            return self.own

    class Share(tensor_group.RowShare):
        def whole(self) -> torch.Tensor:
            return self.own

    model = make(get_recipe(recipe), device)
    norm, block = model.layers[0].post_attention_layernorm, blocks(model)[0]
    x, out = (torch.randn(9, 128, device=device).bfloat16() for _ in range(2))
    with torch.no_grad():
        plain = block.forward_norm(x, out, norm)
        cut = block.forward_norm(Share(x, 9, None), Part(out, None, True), norm)  # type: ignore[arg-type]
        assert_bitwise(tensor_group.whole(plain[0]), block(norm(x + out)))
    assert_bitwise(plain[1], x + out)
    for ours, theirs in zip(cut, plain, strict=True):
        assert_bitwise(tensor_group.whole(ours), tensor_group.whole(theirs))


@pytest.mark.parametrize("following", ["experts", "dense", "hooked", "bf16", "none"])
def test_the_next_norm_adds_up_the_rows_of_experts(
    following: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is fused with what reads it; anything else is given their sum."""
    sizes = {"num_layers": 1 if following == "none" else 2, "decoder_sparse_step": 1}
    model, made = make(get_recipe("blockwise"), device, **sizes), list[int]()
    if following == "dense":
        model.layers[1].mlp = MLP(128, 256, device=device)
        convert(model.layers[1], "blockwise")
    if following == "bf16":
        model.layers[1].self_attn.qkv_proj.set_recipe(get_recipe("bf16"))
    if following == "hooked":
        model.layers[1].input_layernorm.register_forward_hook(lambda *_: None)
        plan_fusion(model)
    combine = moe_ops.combine_rows
    monkeypatch.setattr(moe_ops, "combine_rows", lambda *a: made.append(1) or combine(*a))
    fused = hidden(model)
    # for the final norm too; a layer that is not fused at all leaves no rows
    assert len(made) == {"experts": 1, "dense": 0, "none": 1, "hooked": 1, "bf16": 2}[following]
    monkeypatch.undo()
    set_fusion(model, False)
    assert_bitwise(hidden(model), fused)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_padded_rows_are_copied_and_others_read_where_they_are(
    recipe: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch's grouped GEMM asks of a GPU's rows; the bits are the same."""
    model, copied = make(get_recipe(recipe), device), list[int]()
    dispatch = moe.dispatch_codes
    monkeypatch.setattr(moe, "dispatch_codes", lambda *a: copied.append(1) or dispatch(*a))
    alone = hidden(model)
    assert device.type == "cuda" or not copied
    copied.clear()
    monkeypatch.setattr(moe.Experts, "alignment", lambda *_, **__: 16)
    assert_bitwise(hidden(model), alone)
    assert len(copied) == 2
