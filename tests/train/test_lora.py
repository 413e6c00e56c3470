"""`[lora]`: gradients of plain torch, a base that stays, checkpoints of adapters alone, PEFT's files, merged models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import load_model
from octavo.config import load_config
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError, RecipeError
from octavo.models import Decoder, ModelConfig, load_tokenizer, save_model
from octavo.models.checkpoint.record import read_recipe_state
from octavo.nn import PackedContext
from octavo.nn.weights import cached
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.train import TrainConfig, TrainResult
from octavo.train.build import build_model
from octavo.train.config import LoraSection
from octavo.train.lora import AdapterExport, Adapters, adapted_linears, add_adapters
from octavo.train.memory_plan import plan_memory
from tests.assertions import assert_raises

from .conftest import MakeConfig, build_config
from .test_loop import crash_after, numbers, quiet

RANK, SCALE = 4, 8.0  # alpha 32
MODULES = {
    "q_proj": 32,
    "k_proj": 16,
    "v_proj": 16,
    "o_proj": 32,
    "gate_proj": 48,
    "up_proj": 48,
    "down_proj": 32,
}  # rows
# Relative to the largest of a tensor: another order of fp32 sums.
FP32_TOLERANCE = 1e-4
# Gradients of a model in bf16 or FP8 against fp32 ones: 24 and 12 dB are seen.
SQNR = {"bf16": 22.0, "blockwise": 10.0}
# Logits of the merged model in bf16 against those of base and adapters: both round to bf16, at other places.
# In FP8, W + BA is rounded in place of W.
MERGED_SQNR = {"bf16": 30.0, "blockwise": 15.0, "delayed": 15.0}


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was trained a little."""
    config = build_config(corpus, tmp_path_factory.mktemp("base"), run={"steps": 12}, optimizer={"lr": 1e-2})
    return quiet(config).checkpoint / "model"


@pytest.mark.parametrize(("given", "read"), [('["q_proj", "v_proj"]', ("q_proj", "v_proj")), ('"q_proj"', ("q_proj",))])
def test_a_file_names_targets(given: str, read: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "lora.toml"
    file.write_text(f'[model]\npath = "base"\n[lora]\nrank = 4\nalpha = 32\ntarget_modules = {given}\n')
    section = load_config(TrainConfig, file).lora
    assert section is not None and (section.target_modules, section.alpha) == (read, 32.0)
    same = load_config(TrainConfig, file, [f"lora.target_modules={given}"]).lora
    assert same == section == load_config(TrainConfig, file, ["lora.rank=4"]).lora
    with pytest.raises(ConfigError, match=r"lora\.target_modules must be a valid .*, got 3"):
        load_config(TrainConfig, file, ["lora.target_modules=3"])


def test_the_base_may_be_a_runs_folder(make_config: MakeConfig, base: Path) -> None:
    config = make_config(
        "on", model={"path": str(base.parents[2])}, run={"steps": 1}, schedule={"warmup_steps": 0}, lora={"rank": RANK}
    )
    assert json.loads((quiet(config).checkpoint / "trainer.json").read_text())["lora"]["base"] == str(base)


def test_the_config_that_users_start_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the run that it names as its base; PEFT's file names that base as the config does, as PEFT itself would."""
    configs = Path(__file__).parents[2] / "configs"
    monkeypatch.chdir(tmp_path)
    sets = ["data.num_tasks=200", "metrics.eval_tokens=512", "schedule.warmup_steps=0", "run.device=cpu"]
    base = quiet(load_config(TrainConfig, configs / "sft_tasks.toml", [*sets, "run.steps=1"]))
    result = quiet(load_config(TrainConfig, configs / "lora_tiny.toml", [*sets, "run.steps=2"]))
    assert result.merged == Path("runs/lora_tiny/model") and load_model(result.merged).config == base.model.config
    fields = json.loads((result.checkpoint / "adapter" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == "runs/sft_tasks/checkpoints/step-00000001/model"


@pytest.fixture
def make_lora(make_config: MakeConfig, base: Path) -> MakeConfig:
    def make(name: str = "lora", **sections: Any) -> TrainConfig:
        lora = {"rank": RANK, **sections.pop("lora", {})}
        return make_config(name, **{"model": {"path": str(base)}, "optimizer": {"lr": 1e-2}, **sections}, lora=lora)

    return make


def adapter_of(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(result.checkpoint / "adapter" / "adapter_model.safetensors")


def logits(model: Decoder) -> torch.Tensor:
    tokens = torch.arange(32) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model.logits(model(tokens, PackedContext.from_lengths([20, 12], model.numerics)))


@pytest.mark.parametrize("recipe", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "blockwise"])
def test_gradients_are_those_of_plain_torch(recipe: str, make_lora: MakeConfig, base: Path, tmp_path: Path) -> None:
    """transformers' model in fp32, with pairs from the exported files added to its linears' outputs."""
    transformers = pytest.importorskip("transformers")
    is_fp32 = recipe == "fp32"
    config = make_lora(precision={"recipe": "bf16", "dtype": "fp32"} if is_fp32 else {"recipe": recipe})
    tokenizer = load_tokenizer(base)
    model = build_model(config, tokenizer.vocab_size, None, torch.device("cpu"))
    adapters = Adapters.of_run(model, config)
    assert adapters is not None
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(256, (24,), generator=generator)
    for step in range(2):  # at the first B is zero, and so is A's gradient
        model.zero_grad()
        context = PackedContext.from_lengths([24], model.numerics)
        loss = torch.nn.functional.cross_entropy(model.logits(model(tokens, context))[:-1], tokens[1:])
        loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == {
            f"{name}.{key}" for name, _ in adapted_linears(model) for key in ("lora_a", "lora_b")
        }
        export = AdapterExport(model, tokenizer, adapters)
        grads = {name: model.get_parameter(name).grad for name in export.tensors}
        export.write(tmp_path / f"values-{step}")
        export.write(tmp_path / f"grads-{step}", grads)  # type: ignore[arg-type]
        found = load_file(tmp_path / f"grads-{step}" / "adapter_model.safetensors")
        pairs = load_file(tmp_path / f"values-{step}" / "adapter_model.safetensors")
        expected_loss, expected = plain_gradients(transformers, base, tokens, pairs)
        assert loss.item() == pytest.approx(expected_loss, rel=1e-5 if is_fp32 else 0.02)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            if step == 0 and "lora_A" in name:
                assert not found[name].any() and not grad.any()
            elif is_fp32:
                torch.testing.assert_close(found[name], grad, rtol=0, atol=FP32_TOLERANCE * grad.abs().max().item())
            else:
                assert_sqnr(found[name].float(), grad, SQNR[recipe], name)
        for _, linear in adapted_linears(model):
            with torch.no_grad():
                linear.lora_b.normal_(0, 0.02, generator=generator)


def plain_gradients(
    transformers: Any, base: Path, tokens: torch.Tensor, pairs: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the pairs, by PEFT's names, in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False)
    leaves = {name: tensor.float().requires_grad_() for name, tensor in pairs.items()}
    for name in sorted({name.rsplit(".", 2)[0] for name in pairs}):
        a, b = (leaves[f"{name}.lora_{key}.weight"] for key in "AB")
        module = model.get_submodule(name.removeprefix("base_model.model."))
        module.register_forward_hook(lambda _, inputs, out, a=a, b=b: out + SCALE * (inputs[0] @ a.t()) @ b.t())
    found = model(tokens[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(found[:-1], tokens[1:])
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("codes_only", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_run_learns_beside_a_base_that_stays(
    codes_only: bool, make_lora: MakeConfig, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a text of other words than the base's."""
    text = tmp_path / "dogs.jsonl"
    text.write_text("".join(json.dumps({"text": "dogs bark at dogs. " * (8 + i)}) + "\n" for i in range(50)))
    quantized = []
    for name in ("quantize_forward", "quantize_backward", "quantize_both_ways"):
        own = getattr(cached, name)
        monkeypatch.setattr(
            cached, name, lambda *args, own=own, **kw: quantized.append(args[0].shape) or own(*args, **kw)
        )
    data, lora = {"path": str(text)}, {"keep_codes_only": codes_only}
    result = quiet(make_lora(run={"steps": 30}, data=data, lora=lora, optimizer={"lr": 3e-3}))
    assert result.rows[-1].loss < result.rows[0].loss - 1.0
    assert result.val_loss is not None
    before, after = (dict(model.named_parameters()) for model in (load_model(base), result.model))
    linears = {f"{name}.weight" for name, _ in adapted_linears(result.model)}
    assert before.keys() - after.keys() == (linears if codes_only else set())
    for name in before.keys() & after.keys():
        assert_bitwise(after[name], before[name], name)
    # forward's and backward's codes of 4 linears in 2 layers, once each in 30 steps
    assert len(quantized) <= 16
    for _, linear in adapted_linears(result.model):
        assert linear.lora_a.dtype == linear.lora_b.dtype == torch.bfloat16
        assert linear.lora_b.any()


def test_checkpoints_hold_adapters_alone_and_peft_s_files(make_lora: MakeConfig, base: Path) -> None:
    result = quiet(make_lora())
    state = load_file(result.checkpoint / "trainer.safetensors")
    of_model = [name for name in state if "." in name and not name.startswith("rng.")]
    assert len(of_model) == 3 * 2 * 8 and all(name.endswith(("lora_a", "lora_b")) for name in of_model)
    assert not (result.checkpoint / "model").exists()
    tensors = adapter_of(result)
    expected = {}
    for layer in range(2):
        for name, rows in MODULES.items():
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            columns = 48 if name == "down_proj" else 32
            expected |= {f"{module}.lora_A.weight": (RANK, columns), f"{module}.lora_B.weight": (rows, RANK)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    fields = json.loads((result.checkpoint / "adapter" / "adapter_config.json").read_text())
    assert fields["target_modules"] == sorted(MODULES)
    assert (fields["peft_type"], fields["r"], fields["lora_alpha"]) == ("LORA", RANK, 32)
    assert fields["base_model_name_or_path"] == str(base)
    known = json.loads((result.checkpoint / "trainer.json").read_text())["lora"]
    assert known["base"] == str(base) and len(known["base_sha256"]) == 64


def test_targets_are_peft_s(make_lora: MakeConfig) -> None:
    """One part of a fused linear alone; names of one layer are written in full."""
    result = quiet(make_lora(lora={"target_modules": ["layers.1.self_attn.q_proj", "v_proj", "down_proj"]}))
    names = {name.removeprefix("base_model.model.model.").rsplit(".", 2)[0] for name in adapter_of(result)}
    chosen = {
        "layers.1.self_attn.q_proj",
        *(f"layers.{i}.{x}" for i in (0, 1) for x in ("self_attn.v_proj", "mlp.down_proj")),
    }
    assert names == chosen
    fields = json.loads((result.checkpoint / "adapter" / "adapter_config.json").read_text())
    assert fields["target_modules"] == sorted(f"model.{name}" for name in chosen)
    assert result.merged is not None
    merged = load_model(result.merged)
    for name, parameter in load_model(str(fields["base_model_name_or_path"])).named_parameters():
        own = merged.get_parameter(name)
        if not name.endswith(("qkv_proj.weight", "down_proj.weight")):
            assert_bitwise(own, parameter, name)
        elif "qkv_proj" in name:
            q, k, v = (a != b for a, b in zip(own.split([32, 16, 16]), parameter.split([32, 16, 16]), strict=True))
            assert (bool(q.any()), bool(k.any()), bool(v.any())) == ("layers.1" in name, False, True)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"precision": {"recipe": "bf16"}, "optimizer": {"state_dtype": "fp8", "master_weights": "remainder"}},
            marks=pytest.mark.slow,
        ),
        {"checkpoint": {"every": 2, "async_mode": "async"}},
        {"precision": {"recipe": "delayed", "amax_history_len": 4}},
        {"lora": {"keep_codes_only": True}, "run": {"steps": 6, "recompute": "full"}},
    ],
    ids=["bf16-fp8-state", "blockwise-async", "delayed", "codes-recompute"],
)
def test_resume_is_bit_equal(sections: dict[str, Any], make_lora: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quiet(make_lora("whole", **sections))
    config = make_lora("broken", **sections)
    with monkeypatch.context() as patch:
        crash_after(5, patch)
        assert_raises(KeyboardInterrupt, None, quiet, config)
    assert not (config.run.dir / "model").exists()
    resumed = quiet(config)
    assert resumed.first_step == 4
    assert numbers(whole.rows) == numbers(resumed.rows)
    assert whole.merged is not None and resumed.merged is not None
    for name in ("trainer.safetensors", "adapter/adapter_model.safetensors"):
        a, b = load_file(whole.checkpoint / name), load_file(resumed.checkpoint / name)
        assert a.keys() == b.keys()
        for key in a:
            if "amax_history" not in key:  # of a frozen weight it is staged when codes are made
                assert_bitwise(a[key], b[key], key)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (whole.merged / name).read_bytes() == (resumed.merged / name).read_bytes()


@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "delayed"])
def test_merged_model_is_base_and_adapters(recipe: str, make_lora: MakeConfig, base: Path) -> None:
    """Its weights are W + scale * B A by hand, and a plain checkpoint that the run's folder leads to."""
    config = make_lora(precision={"recipe": recipe}, lora={"keep_codes_only": recipe == "blockwise"})
    result = quiet(config)
    assert result.merged == config.run.dir / "model"
    merged, tensors, original = load_model(config.run.dir), adapter_of(result), load_file(base / "model.safetensors")
    assert not any(True for _ in adapted_linears(merged))
    for name, value in load_file(result.merged / "model.safetensors").items():
        own = original[name]
        if name.endswith("_proj.weight"):
            a, b = (
                tensors[f"base_model.model.{name.removesuffix('weight')}lora_{key}.weight"].double() for key in "AB"
            )
            own = (original[name].double() + SCALE * b @ a).bfloat16()
            assert (value != original[name]).any()
            # fp32 sums, which may lie on the other side of a tie
            assert (value.float() - own.float()).abs().max() <= 2**-8 * own.float().abs().max()
            assert (value != own).float().mean() < 0.01
        else:
            assert_bitwise(value, own, name)
    if recipe == "delayed":
        for name, scales in read_recipe_state(result.merged).items():
            if name.endswith("o_proj.fp8_quant_scale"):  # slots: input, grad_output, weight
                amax = merged.get_parameter(name.replace("fp8_quant_scale", "weight")).abs().max().float()
                assert scales[2] == torch.tensor(448.0) / amax
    with_adapters = result.model
    if recipe != "bf16":
        merged = load_model(config.run.dir, recipe=with_adapters.numerics.recipe)
    assert_sqnr(logits(merged), logits(with_adapters), MERGED_SQNR[recipe], "logits")


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen2", "gptj"])
def test_every_layer_of_a_family_calls_its_adapters(family: str, tmp_path: Path) -> None:
    """In fp32, where the merged model has the same logits: with biases, and with biases that an activation adds."""
    heads = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
    kind = {"rotary_dim": 8} if family == "gptj" else {"attention_bias": family == "qwen2"}
    tied = {"tie_word_embeddings": family != "gptj"}
    model = Decoder(ModelConfig(family, 64, 32, 48, **heads, **kind, **tied), dtype=torch.float32)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.1)
    section = LoraSection(rank=2)
    add_adapters(model, section, 3)
    model.set_numerics(model.numerics)
    before = logits(model)
    for _, linear in adapted_linears(model):
        torch.nn.init.normal_(linear.lora_b, 0, 0.05)
        found, own = logits(model), logits(Adapters(section, tmp_path, "").merged(model))
        torch.testing.assert_close(own, found, rtol=0, atol=1e-4)
        assert (found - before).abs().max() > 1e-2
        before = found


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_finished_run_has_nothing_to_do_and_goes_on_when_asked(
    make_lora: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quiet(make_lora())
    assert first.merged is not None
    times = {path: path.stat().st_mtime_ns for path in first.merged.rglob("*")}
    again = quiet(make_lora())
    assert again.merged == first.merged and times == {p: p.stat().st_mtime_ns for p in first.merged.rglob("*")}
    weights = (first.merged / "model.safetensors").read_bytes()
    assert quiet(make_lora(run={"steps": 8})).first_step == 6
    assert (first.merged / "model.safetensors").read_bytes() != weights
    with monkeypatch.context() as killed:  # after the last checkpoint
        killed.setattr("octavo.train.loop.save_model", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            quiet(make_lora(run={"steps": 10}))
    weights = (first.merged / "model.safetensors").read_bytes()
    again = quiet(make_lora(run={"steps": 10}))
    assert (again.first_step, again.step) == (10, 10)
    assert (first.merged / "model.safetensors").read_bytes() != weights
    quiet(make_lora(run={"steps": 8}), resume=False)
    assert (first.merged.parent / "previous-1" / "model" / "config.json").is_file()


def test_other_adapters_or_another_base_are_refused(make_lora: MakeConfig, base: Path, tmp_path: Path) -> None:
    moved, other = tmp_path / "moved", tmp_path / "other"
    model = load_model(base)
    save_model(model, moved, tokenizer=load_tokenizer(base))
    with torch.no_grad():
        model.layers[0].self_attn.o_proj.weight[0, 0] += 1.0  # type: ignore[union-attr,index,operator]
    save_model(model, other, tokenizer=load_tokenizer(base))
    result = quiet(make_lora(run={"steps": 4}))
    refused = "the checkpoint has other adapters, or another base"
    assert_raises(CheckpointError, rf"{refused}: lora\.rank was 4, is 8", quiet, make_lora(lora={"rank": 8}))
    assert_raises(CheckpointError, rf"{refused}: lora\.alpha was 32", quiet, make_lora(lora={"alpha": 8.0}))
    assert_raises(CheckpointError, r"lora\.base_sha256 was", quiet, make_lora(model={"path": str(other)}))
    plain = make_lora().model_copy(update={"lora": None})
    assert_raises(CheckpointError, r"there is no \[lora\] here", quiet, plain)
    assert_raises(CheckpointError, "holds PEFT's adapters alone", load_model, result.checkpoint / "adapter")
    assert quiet(make_lora(model={"path": str(moved)})).first_step == 4


def test_refusals(make_lora: MakeConfig, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_raises(ConfigError, r"lora\.rank must be greater than or equal to 1, got 0", make_lora, lora={"rank": 0})
    assert_raises(
        ConfigError, r"plain LoRA, got use_dora.*octavo\.integrations\.peft", make_lora, lora={"use_dora": True}
    )
    assert_raises(ConfigError, "plain LoRA, got dropout", make_lora, lora={"dropout": 0.1})
    assert_raises(ConfigError, r"unknown key lora\.r; did you mean lora\.rank", make_lora, lora={"r": 8})
    assert_raises(ConfigError, r"got no model\.path; set it", make_config, lora={"rank": 4})
    no_match = r"'query' matches no linear of the model's layers; they end with down_proj, .*, v_proj$"
    assert_raises(ConfigError, no_match, quiet, make_lora(lora={"target_modules": ["q_proj", "query"]}))
    assert_raises(ConfigError, "did you mean 'q_proj'", quiet, make_lora(lora={"target_modules": ["qproj"]}))
    assert_raises(ConfigError, "'lm_head' matches no linear", quiet, make_lora(lora={"target_modules": ["lm_head"]}))
    assert_raises(ConfigError, "names no linear", quiet, make_lora(lora={"target_modules": []}))
    for recipe in ("bf16", "rowwise"):
        without_codes = make_lora(precision={"recipe": recipe}, lora={"keep_codes_only": True})
        assert_raises(RecipeError, rf"square blocks .* got precision\.recipe = '{recipe}'", quiet, without_codes)
    on_ranks = dataclasses.replace(Mesh.single(), device_mesh=object())
    monkeypatch.setattr("octavo.train.loop.Mesh.from_config", lambda *_: on_ranks)
    assert_raises(ConfigError, "trains in one process, on one GPU, got several ranks", quiet, make_lora())
    assert_raises(ConfigError, "does not count adapters yet", plan_memory, make_lora())


def test_experts_have_no_adapters_and_attention_beside_them_has() -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = Decoder(ModelConfig("qwen3_moe", 64, 32, 48, qk_norm=True, **sizes, **experts))  # type: ignore[arg-type]
    assert_raises(ConfigError, "takes in experts, which have no adapters here", add_adapters, model, LoraSection(), 0)
    one = LoraSection(target_modules=("up_proj",))
    assert_raises(ConfigError, r"\('up_proj',\) takes in experts", add_adapters, model, one, 0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    add_adapters(model, LoraSection(target_modules=("q_proj", "o_proj")), 0)
    assert [name.rpartition(".")[2] for name, _ in adapted_linears(model)] == ["qkv_proj", "o_proj"]


def test_exact_numerics_are_refused_at_the_forward(make_lora: MakeConfig, base: Path) -> None:
    model = build_model(make_lora(), load_tokenizer(base).vocab_size, None, torch.device("cpu"))
    for _, linear in adapted_linears(model):
        linear.exact = True
    assert_raises(RecipeError, "adapters do not compute exactly", logits, model)
