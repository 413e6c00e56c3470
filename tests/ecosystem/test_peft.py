"""PEFT's LoRA and DoRA over octavo's linears: the bits of adapters written by hand, plain files, no stale codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import octavo
import octavo.models
from octavo.errors import ConfigError, RecipeError
from octavo.testing import assert_bitwise
from octavo.train import train as octavo_train
from tests.integrations.toy_trainer import BATCH, LEARNING_RATE, TOKENS, make_model, make_rows, make_trainer
from tests.train.conftest import build_config, write_corpus

peft = pytest.importorskip("peft")  # the ordinary suite collects this file too

from octavo.integrations.peft import LoraLinear, from_pretrained, get_peft_model, register  # noqa: E402

pytestmark = pytest.mark.ecosystem
EXAMPLE = Path(__file__).parents[2] / "examples" / "peft" / "lora.py"
STEPS, SAVED, RANK = 10, 5, 4
MERGED = 0.1  # relative norm of logits: one rounding of W + BA to E4M3 for that of W


def make_config(**options: Any) -> Any:
    return peft.LoraConfig(**({"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | options))


def make_converted(recipe: str = "blockwise", dtype: torch.dtype = torch.float32) -> Any:
    model = make_model().to(dtype)
    octavo.convert(model, recipe)
    return model


def make_adapted(recipe: str = "blockwise", *, codes_only: bool = False, **options: Any) -> Any:
    torch.manual_seed(3)
    model = get_peft_model(make_converted(recipe), make_config(**options))
    if codes_only:
        assert octavo.nn.keep_codes_only(model) > 0
    return model


def train(model: Any, steps: int = STEPS) -> list[torch.Tensor]:
    """Losses of what the Trainer does, in plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    num_tokens = torch.tensor(BATCH * (TOKENS - 1))
    losses = []
    for ids in make_rows(2 * STEPS * BATCH).split(BATCH)[:steps]:
        loss = model.train()(input_ids=ids, labels=ids, num_items_in_batch=num_tokens).loss
        loss.backward()
        losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=make_rows(4)).logits
    return found


class HandMade(nn.Module):
    """LoRA or DoRA over a linear, from its paper."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.magnitude = None if magnitude is None else nn.Parameter(magnitude.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base(x)
        delta = x @ self.a.t() @ self.b.t()
        if self.magnitude is None:
            return base + delta * 2.0
        with torch.no_grad():
            norm = torch.linalg.norm(
                self.base.weight + 2.0 * (torch.eye(x.shape[-1]) @ self.a.t() @ self.b.t()).t(), dim=1
            )
        scale = self.magnitude / norm
        return base + ((scale - 1) * base + scale * delta * 2.0)


def make_by_hand(recipe: str, initial: dict[str, torch.Tensor]) -> Any:
    model = make_converted(recipe).requires_grad_(False)
    for name in sorted(key.removesuffix(".lora_A.weight") for key in initial if key.endswith(".lora_A.weight")):
        parent, _, last = name.removeprefix("base_model.model.").rpartition(".")
        owner = model.get_submodule(parent)
        parts = [initial[f"{name}.{key}.weight"] for key in ("lora_A", "lora_B")]
        magnitude = initial.get(f"{name}.lora_magnitude_vector")
        setattr(owner, last, HandMade(owner.get_submodule(last), *parts, magnitude))
    return model


@pytest.mark.parametrize(
    ("recipe", "use_dora", "codes_only", "is_resumed"),
    [
        ("blockwise", False, False, False),
        ("blockwise", False, True, True),
        ("blockwise", True, False, True),
        ("delayed", False, False, True),
        ("delayed", False, True, False),
    ],
)
def test_losses_are_those_of_adapters_by_hand(
    recipe: str, use_dora: bool, codes_only: bool, is_resumed: bool, tmp_path: Path
) -> None:
    """The Trainer with PEFT, cut and resumed or not, from a base with or without its high-precision weights."""
    options = {"use_dora": use_dora, "codes_only": codes_only}
    initial = peft.get_peft_model_state_dict(make_adapted(recipe, use_dora=use_dora))
    losses = []
    for steps in (SAVED, STEPS) if is_resumed else (STEPS,):
        model = make_adapted(recipe, **options)
        trainer = make_trainer(model, tmp_path, steps, save_strategy="steps", save_steps=SAVED)
        trainer.train(resume_from_checkpoint=is_resumed and steps > SAVED)
        losses += trainer.losses
    expected = make_by_hand(recipe, initial)
    assert_bitwise(torch.stack(losses), torch.stack(train(expected)))
    assert losses[-1] < losses[0] - 0.05
    by_hand = [module for module in expected.modules() if isinstance(module, HandMade)]
    ours = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(ours) == len(by_hand) == 4
    for one, other in zip(ours, by_hand, strict=True):
        assert_bitwise(one.lora_A["default"].weight, other.a)
        assert_bitwise(one.lora_B["default"].weight, other.b)


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_is_saved_as_plain_files(use_dora: bool, tmp_path: Path) -> None:
    model = make_adapted(use_dora=use_dora)
    train(model, 3)
    model.save_pretrained(tmp_path / "ours")
    plain = peft.get_peft_model(make_model(), make_config(use_dora=use_dora))
    plain.save_pretrained(tmp_path / "plain")
    saved, keys = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "plain"))
    assert {key: (t.shape, t.dtype) for key, t in saved.items()} == {key: (t.shape, t.dtype) for key, t in keys.items()}
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "plain")]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    loaded = from_pretrained(make_converted(), tmp_path / "ours")
    assert_bitwise(logits(loaded), logits(model))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    without = peft.PeftModel.from_pretrained(make_model(), tmp_path / "ours")
    for key, tensor in peft.get_peft_model_state_dict(without).items():
        assert_bitwise(tensor, saved[key])


@pytest.mark.parametrize(("use_dora", "safe_merge"), [(False, False), (False, True), (True, False), (True, True)])
def test_no_codes_are_stale_after_merging(use_dora: bool, safe_merge: bool) -> None:
    model = make_adapted(use_dora=use_dora, target_modules="All-Linear")
    train(model)
    assert [type(module) for module in model.modules() if hasattr(module, "base_layer")] == [LoraLinear] * 14
    before = logits(model)
    model.merge_adapter(safe_merge=safe_merge)
    merged = logits(model)
    octavo.nn.check_weights(model)
    assert 0 < (merged - before).norm() < MERGED * before.norm()
    model.unmerge_adapter()
    octavo.nn.check_weights(model)
    assert (logits(model) - before).norm() < 0.01 * before.norm()  # W + BA - BA has another rounding than W
    whole = model.merge_and_unload(safe_merge=safe_merge)
    assert not any(isinstance(module, LoraLinear) for module in whole.modules())
    fresh = make_model()
    fresh.load_state_dict(whole.state_dict())
    octavo.convert(fresh, "blockwise")
    assert_bitwise(logits(whole), logits(fresh))


def test_codes_are_those_of_a_weight_that_an_adapter_changed_at_its_start() -> None:
    model = make_converted()
    logits(model)  # makes codes
    adapted = peft.get_peft_model(model, register(make_config(init_lora_weights="olora"), model))
    logits(adapted)
    octavo.nn.check_weights(adapted)


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_are_trained_in_high_precision_and_nothing_else_is(autocast: bool) -> None:
    model = get_peft_model(
        make_converted(dtype=torch.bfloat16),
        make_config(target_modules="all-linear", use_dora=True),
        autocast_adapter_dtype=autocast,
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, 2)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if autocast and "lora_" in name else torch.bfloat16)
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    for module in model.modules():
        if isinstance(module, LoraLinear):
            assert module.base_layer.recipe.is_fp8
            assert {type(child) for child in (*module.lora_A.values(), *module.lora_B.values())} == {nn.Linear}


def test_codes_only_refuse_what_needs_the_weight() -> None:
    model = make_adapted(codes_only=True)
    wanted = r"q_proj holds FP8 codes only, and {} needs its high-precision weight; call keep_codes_only after"
    with pytest.raises(RecipeError, match=wanted.format("merge")):
        model.merge_and_unload()
    with pytest.raises(RecipeError, match=wanted.format("a new adapter")):
        model.add_adapter("second", register(make_config(), model))
    with pytest.raises(RecipeError, match=wanted.format("DoRA's norm")):
        logits(make_adapted(codes_only=True, use_dora=True))
    frozen = make_converted().requires_grad_(False)
    octavo.nn.keep_codes_only(frozen)
    with pytest.raises(RecipeError, match=wanted.format("a new adapter")):
        get_peft_model(frozen, make_config())


def test_other_orders_and_methods_are_refused_in_one_line() -> None:
    plain = peft.get_peft_model(make_model(), make_config())
    for adapted in (plain, make_adapted()):
        with pytest.raises(ConfigError, match=r"q_proj has PEFT's adapters already; convert the base first: octavo\."):
            octavo.convert(adapted, "blockwise")
    with pytest.raises(ConfigError, match=r"no linear of this model is octavo's; call octavo\.convert"):
        get_peft_model(make_model(), make_config())
    model = make_converted()
    with pytest.raises(ConfigError, match=r"a peft\.LoraConfig; got IA3Config"):
        get_peft_model(model, peft.IA3Config())
    with pytest.raises(ConfigError, match=r"got fan_in_fan_out=True; leave it out"):
        get_peft_model(model, make_config(fan_in_fan_out=True))
    with pytest.raises(ConfigError, match=r"adapters already; name the target_modules"):
        register(make_config(target_modules="All-Linear"), make_adapted())
    own = octavo.models.Decoder(octavo.models.ModelConfig("llama", 64, 64, 96, 1, 4, 4, 16))
    octavo.convert(own, "blockwise")
    with pytest.raises(ConfigError, match=r"got octavo's \w+; load the checkpoint by transformers with"):
        get_peft_model(own, make_config(target_modules="All-Linear"))
    gpt2 = make_model("GPT2", n_embd=64, n_layer=1, n_head=4)
    octavo.convert(gpt2, "blockwise")
    with pytest.raises(ConfigError, match=r"c_attn is TransposedLinear, and adapters go on octavo\.nn\.Linear alone"):
        get_peft_model(gpt2, make_config(target_modules=["c_attn"]))


def test_a_peft_without_the_hook_is_named() -> None:
    code = "import peft; del peft.LoraConfig._register_custom_module\nimport octavo.integrations.peft"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "has no LoraConfig._register_custom_module" in done.stderr.splitlines()[-1]


def test_the_example_learns_and_saves_an_adapter(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "toy")
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "toy", tmp_path / "out"],
        capture_output=True, text=True, timeout=250, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "bytes of frozen weights given up" in done.stdout and "14 of 15 linears in FP8" in done.stdout
    (state,) = (tmp_path / "out").glob("checkpoint-*/trainer_state.json")
    losses = [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1
    assert all("lora_" in key for key in load_file(tmp_path / "out" / "adapter_model.safetensors"))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "layers.1.mlp.down_proj"]])
def test_adapters_of_octavo_train_load_in_peft(targets: Any, tmp_path: Path) -> None:
    """PeftModel.from_pretrained over transformers' model of the base: the logits of octavo's own, and of its merge."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    options = {"precision": {"recipe": "bf16", "dtype": "fp32"}, "run": {"steps": 8}, "optimizer": {"lr": 1e-2}}
    base = octavo_train(build_config(corpus, tmp_path, "base", **options), progress=False).checkpoint / "model"
    options |= {"model": {"path": str(base)}, "lora": {"rank": RANK, "target_modules": targets}}
    result = octavo_train(build_config(corpus, tmp_path, "lora", **options), progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.arange(100, 132)
    before = theirs(tokens[None]).logits[0].detach()
    adapted = peft.PeftModel.from_pretrained(theirs, str(result.checkpoint / "adapter"))
    assert len(adapted.targeted_module_names) == (14 if targets == "all-linear" else 3)
    with torch.no_grad():
        found = adapted(tokens[None]).logits[0]
        context = octavo.nn.PackedContext.from_lengths([32], result.model.numerics)
        for model in (result.model, octavo.load_model(result.merged, dtype=torch.float32)):
            own = model.logits(model(tokens, context))
            torch.testing.assert_close(own, found, rtol=0, atol=1e-4)
    assert (found - before).abs().max() > 0.01
