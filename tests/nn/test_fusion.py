"""Fusion by plan: who wraps, hooks or subclasses a module of a fused layer is heard, and told what it costs."""

import warnings

import pytest
import torch

import octavo
from octavo import nn
from octavo.errors import RecipeError
from octavo.models import Decoder, ModelConfig
from octavo.nn import fusion, rms_norm
from octavo.nn.functional import norm_linear, norm_mlp
from octavo.numerics import Numerics, get_recipe
from octavo.testing import assert_bitwise
from tests.assertions import assert_all_bitwise


@pytest.fixture(autouse=True)
def _said_nothing_yet():
    fusion._has_warned.clear()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fused quantizers that were called."""
    calls: list[str] = []
    for module, name in ((norm_linear, "norm_quantize"), (norm_mlp, "activation_quantize")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, run=run, name=name, **k: (calls.append(name), run(*a, **k))[1])
    return calls


def make(recipe: str = "rowwise") -> torch.nn.Module:
    torch.manual_seed(0)
    module = nn.LayerNormMLP(128, 256)
    nn.convert(module, recipe, ignore=())
    return module


def run(module: torch.nn.Module) -> torch.Tensor:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    out: torch.Tensor = module(x)
    return out


def test_a_new_layer_is_fused_and_the_report_says_so(fused):
    module = make()
    run(module)
    assert fused == ["norm_quantize", "activation_quantize"]
    assert "1 of 1 layers planned to run fused" in str(nn.convert(module, "rowwise", ignore=()))


def test_a_later_hook_is_called_and_named_once(fused):
    module, calls = make(), []
    wanted = run(module)
    fused.clear()
    module.fc2.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match=r"LayerNormMLP\.fc2 has a hook of tests\.nn\.test_fusion"):
        assert_bitwise(run(module), wanted)
    run(module)  # said once: another warning would be an error
    assert calls == [1, 1] and not fused


def test_a_plan_made_after_the_hook_has_modules_and_says_why(fused):
    module, calls = make(), []
    module.fc2.register_forward_hook(lambda *_: calls.append(1))
    report = nn.convert(module, "rowwise", ignore=())
    run(module)
    assert calls == [1] and not fused
    assert "0 of 1 layers planned to run fused; the others by modules: Linear has a hook of" in str(report)


def test_what_set_fusion_says_holds_whatever_hooks_there_are(fused):
    module, calls = make(), []
    module.fc2.register_forward_hook(lambda *_: calls.append(1))
    nn.set_fusion(module, True)
    run(module)
    assert fused and not calls
    nn.convert(module, "rowwise", ignore=())
    assert module.fusion.is_explicit
    fused.clear()
    nn.set_fusion(module, False)
    run(module)
    assert not fused and calls == [1]
    nn.set_fusion(module, None)
    assert module.fusion == fusion.FusionPlan(False, module.fusion.reason) and "hook" in module.fusion.reason


class Wrapper(torch.nn.Module):
    """As PEFT wraps a linear: the base layer within, a low-rank product beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = torch.nn.Linear(base.in_features, 2, bias=False, dtype=torch.bfloat16)
        self.lora_b = torch.nn.Linear(2, base.out_features, bias=False, dtype=torch.bfloat16)

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x))
        return out


@pytest.mark.parametrize("is_explicit", [False, True])
def test_a_wrapped_linear_is_called(is_explicit, fused):
    """Also where fusion was demanded: the wrapper's own product would be lost."""
    module = make()
    plain = run(module)
    fused.clear()
    module.fc2 = Wrapper(module.fc2)
    if is_explicit:
        nn.set_fusion(module, True)
    with pytest.warns(UserWarning, match=r"LayerNormMLP\.fc2 has a forward of its own"):
        assert not torch.equal(run(module), plain)
    assert not fused
    if not is_explicit:
        nn.plan_fusion(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(module)


def test_octavos_own_hooks_do_not_warn(fused):
    module = make()
    module.fc2.register_forward_pre_hook(octavo_hook)
    run(module)
    assert not fused


def octavo_hook(*_: object) -> None: ...


octavo_hook.__module__ = "octavo.somewhere"


def make_decoder(family: str, recipe: str = "rowwise") -> Decoder:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 2, "head_dim": 64}
    extra = {"rotary_dim": 16} if family == "gptj" else {"qk_norm": True}
    if family == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model = Decoder(ModelConfig(family, vocab_size=96, num_kv_heads=2, **sizes, **extra), seed=0)
    model.set_numerics(Numerics(get_recipe(recipe)))
    return model


@torch.no_grad()
def score(model: Decoder) -> torch.Tensor:
    return octavo.sequence_logprobs(model, [list(range(40))])[0]


@pytest.mark.parametrize("family", ["qwen3", "gptj"])
def test_a_later_hook_on_a_decoders_layer_is_called_and_named_once(family):
    """Without gradients the Decoder runs the sum between two layers in the second one's norm."""
    model, calls = make_decoder(family), []
    wanted = score(model)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match=r"Decoder\.layers\.0 has a hook of tests\.nn\.test_fusion") as said:
        assert_bitwise(score(model), wanted)
    assert calls == [1, 1] and len(said) == 1
    score(model)  # said once: another warning would be an error
    calls.clear()
    assert "DecoderLayer has a hook of tests.nn.test_fusion" in str(model.set_numerics(model.numerics))
    assert not model.fusion.is_fused
    score(model)
    assert calls == [1, 1]
    nn.set_fusion(model, True)
    assert_bitwise(score(model), wanted)
    assert calls == [1, 1]


@pytest.mark.parametrize("family", ["qwen3", "gptj", "qwen3_moe"])
def test_fused_and_not_have_the_same_bits_forward(family):
    for recipe in ("bf16", "tensorwise", "rowwise", "blockwise"):
        model = make_decoder(family, recipe)
        wanted = score(model)
        nn.set_fusion(model, False)
        assert_bitwise(score(model), wanted)


@pytest.mark.parametrize("saved_activations", ["fp8", "bf16"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("family", ["qwen3", "gptj"])
def test_exact_training_fused_and_not_have_the_same_bits(family, recipe, saved_activations, fused, monkeypatch, device):
    """Gradients too. On a CPU, whose exact norm is the order-free op, both take the kernels' norm here."""
    for module in (rms_norm, norm_linear):
        monkeypatch.setattr(module, "has_exact_kernel", lambda x: True)
    model = make_decoder(family).to(device)
    model.set_numerics(Numerics(get_recipe(recipe, saved_activations=saved_activations), exact=True))
    found = []
    for is_fused in (True, False):
        nn.set_fusion(model, is_fused)
        fused.clear()
        model.zero_grad()
        logprobs = torch.cat(octavo.sequence_logprobs(model, [list(range(40)), list(range(90, 7, -1))]))
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(param.grad for param in model.parameters())])
        assert bool(fused) == is_fused
    assert_all_bitwise(*found)


@pytest.mark.parametrize("is_training", [True, False])
def test_an_exact_layer_refuses_another_recipe_fused_too(is_training, monkeypatch):
    for module in (rms_norm, norm_linear):
        monkeypatch.setattr(module, "has_exact_kernel", lambda x: True)
    module = nn.LayerNormMLP(128, 256)
    nn.set_exact(module, True)
    with (
        torch.set_grad_enabled(is_training),
        nn.autocast(recipe="rowwise"),
        pytest.raises(RecipeError, match="this layer is exact under bf16, and autocast asks for 'rowwise'"),
    ):
        run(module)
