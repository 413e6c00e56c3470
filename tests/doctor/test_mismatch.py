"""find_mismatch: planted faults of a sampler are each named as the largest contributor, and agreement is seen."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.doctor import Side, find_mismatch
from octavo.doctor.mismatch import MismatchReport
from octavo.doctor.replay import Replay
from octavo.doctor.sides import LABELS, PARTS, stale_weights
from octavo.errors import ConfigError, RecipeError, ShapeError
from octavo.models import Decoder, ModelConfig, save_model, sequence_logprobs
from octavo.nn.moe import Router
from octavo.numerics import Numerics, get_recipe
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.quantize import quantize
from octavo.rl.refit import share_weights
from octavo.serve import LLM, SamplingParams
from tests.conftest import RunOctavo
from tests.serve.random_models import sampler_logprobs

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
MAX_TOKENS = 5


def make_policy(moe: bool = False, qk_norm: bool = True) -> Decoder:
    """Two narrow layers, with weights large enough that logits differ from each other."""
    family = "qwen3_moe" if moe else "qwen3" if qk_norm else "llama"
    fields: dict[str, Any] = {"qk_norm": moe or qk_norm, "max_position_embeddings": 64}
    if moe:
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = ModelConfig(family, 96, 64, 128, 2, 2, 1, 32, **fields)
    model = Decoder(config, seed=1)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.mul_(5.0)
    model.mark_weights_updated()
    return model


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return make_policy()


@pytest.fixture(scope="module")
def moe_policy() -> Decoder:
    return make_policy(moe=True)


def sampler_of(policy: Decoder, recipe: str = "bf16", kv: str = "bf16", **fields: Any) -> Decoder:
    return share_weights(policy, Numerics(get_recipe(recipe), kv, **fields))


def sample(model: Decoder, temperature: float = 1.0) -> tuple[list[list[int]], list[int], torch.Tensor]:
    """What an engine of this model draws and reports: sequences, prompt lengths, packed logprobs."""
    params = SamplingParams(n=2, max_tokens=MAX_TOKENS, temperature=temperature, logprobs=0, ignore_eos=True)
    outputs = LLM(model, seed=3, max_num_seqs=8).generate(PROMPTS, params)
    rows = [(out.prompt_token_ids, c) for out in outputs for c in out.outputs]
    logprobs = [logprob for out in outputs for sample in sampler_logprobs(out) for logprob in sample]
    return [list(p) + list(c.token_ids) for p, c in rows], [len(p) for p, _ in rows], torch.tensor(logprobs)


def diagnose(
    trainer: Decoder, engine: Decoder, described: Side | None = None, temperature: float = 1.0
) -> MismatchReport:
    """Sample from the engine and ask why it differs; it is described as what it is unless told otherwise."""
    side = described or Side(engine, temperature, decodes=True)
    return find_mismatch(Side(trainer, temperature), side, *sample(engine, temperature))


def largest(report: MismatchReport) -> str:
    assert report.largest is not None
    return report.largest.part


# the replay itself


def test_nothing_of_the_sampler_is_the_trainer_bit_for_bit(policy: Decoder) -> None:
    engine = sampler_of(policy, "blockwise", "fp8")
    sequences, lens, _ = sample(engine)
    replay = Replay(Side(policy), Side(engine, decodes=True), (), sequences, lens)
    expected = [x[n - 1 :] for x, n in zip(sequence_logprobs(policy, sequences), lens, strict=True)]
    assert torch.equal(replay.logprobs(frozenset()), torch.cat(expected).detach())


@pytest.mark.parametrize(
    ("moe", "recipe", "kv"),
    [
        (False, "bf16", "bf16"), (False, "bf16", "fp8"), (False, "blockwise", "fp8"), (False, "rowwise", "bf16"),
        (True, "blockwise", "fp8"),
    ],
)  # fmt: skip
def test_all_of_the_sampler_is_what_the_engine_reports(request: Any, moe: bool, recipe: str, kv: str) -> None:
    policy = request.getfixturevalue("moe_policy" if moe else "policy")
    report = diagnose(policy, sampler_of(policy, recipe, kv))
    assert report.cause is None
    assert report.residual <= 1e-5


def test_the_policy_is_left_as_it_was(policy: Decoder) -> None:
    before = {name: param.clone() for name, param in policy.named_parameters()}
    engine = sampler_of(policy, "rowwise", "fp8")
    diagnose(policy, engine)
    assert all(torch.equal(before[name], param) and param.requires_grad for name, param in policy.named_parameters())
    assert policy.numerics == Numerics()
    assert not any(module._forward_pre_hooks for module in policy.modules())


# agreement


def test_an_exact_pair_agrees_bit_for_bit() -> None:
    model = make_policy()
    model.set_numerics(Numerics(get_recipe("rowwise"), "fp8", True))
    report = diagnose(model, model)
    assert report.measured["mismatch/logprob_abs_diff_max"] == 0.0
    assert report.largest is None
    assert "agree bit for bit" in report.verdict
    assert all(c.alone == 0.0 for c in report.contributions)


# parts


def test_parts_add_up_to_the_whole(policy: Decoder) -> None:
    report = diagnose(policy, sampler_of(policy, "blockwise", "fp8"))
    parts = {c.part: c for c in report.contributions}
    assert list(parts) == list(PARTS)
    assert all(parts[part].contribution > 0 for part in ("weights", "activations", "kv_cache"))
    assert parts["router"].contribution == parts["staleness"].contribution == 0.0
    assert sum(c.contribution for c in report.contributions) == pytest.approx(report.total, rel=0.35)
    assert report.total == pytest.approx(report.measured["rollout_corr/k3_kl"], rel=0.2)
    assert (parts["weights"].trainer, parts["weights"].sampler) == ("bf16", "e4m3 block_128x128")


def test_a_part_that_is_the_same_on_both_sides_contributes_nothing(policy: Decoder) -> None:
    trainer = sampler_of(policy, "rowwise")
    report = diagnose(trainer, sampler_of(policy, "rowwise", "fp8"))
    parts = {c.part: c for c in report.contributions}
    assert parts["weights"].contribution == parts["activations"].contribution == 0.0
    assert largest(report) == "kv_cache"


def test_fp8_attention_is_the_kernel_s(policy: Decoder) -> None:
    report = diagnose(sampler_of(policy, "bf16", "fp8"), sampler_of(policy, "bf16", "fp8", attention_dtype="fp8"))
    assert largest(report) == "attention"


# planted faults: the engine really has each of them


def test_a_stale_weight_is_named(policy: Decoder) -> None:
    engine = copy.deepcopy(policy)
    with torch.no_grad():
        engine.layers[1].mlp.down_proj.weight.add_(0.3 * engine.layers[1].mlp.down_proj.weight.roll(1, 0))
    engine.mark_weights_updated()
    engine.set_numerics(Numerics(get_recipe("blockwise"), "fp8"))
    report = diagnose(policy, engine)
    assert largest(report) == "staleness"
    assert report.stale == ("layers.1.mlp.down_proj.weight",)
    assert "layers.1.mlp.down_proj.weight" in report.verdict


@pytest.mark.parametrize("name", ["norm.weight", "embed_tokens.weight"])
def test_what_is_no_linear_can_be_stale_too(policy: Decoder, name: str) -> None:
    engine = copy.deepcopy(policy)
    with torch.no_grad():
        engine.get_parameter(name).mul_(torch.linspace(0.6, 1.4, 64))
    engine.mark_weights_updated()
    report = diagnose(policy, engine)
    assert (largest(report), report.stale) == ("staleness", (name,))
    assert report.residual < 1e-5


def test_codes_that_were_not_made_again_are_named(policy: Decoder) -> None:
    engine = sampler_of(policy, "rowwise")
    old = engine.layers[0].mlp.gate_up_proj
    codes = [dataclass_rolled(q) for q in old.quantized_weight()]
    old.source._forward = [(rows, code) for (rows, _), code in zip(old.source._forward, codes, strict=True)]
    old.source._whole = None
    report = diagnose(policy, engine)
    assert largest(report) == "staleness"
    assert report.stale == ("layers.0.mlp.gate_up_proj.weight",)
    assert report.residual < 1e-3 * report.total


def dataclass_rolled(q: Any) -> Any:
    return type(q)(q.qdata.view(torch.uint8).roll(1, 0).view(q.qdata.dtype), q.scale, q.scaling)


def test_a_kv_scale_of_one_is_named() -> None:
    policy = make_policy(qk_norm=False)
    with torch.no_grad():  # keys and values beyond 448, which a scale of 1 clips
        for layer in policy.layers:
            layer.self_attn.qkv_proj.weight[64:].mul_(2000.0)
            layer.self_attn.qkv_proj.weight[:64].div_(2000.0)
            layer.self_attn.o_proj.weight.div_(2000.0)
    policy.mark_weights_updated()
    engine = sampler_of(policy, "blockwise", "fp8", kv_scales="_fixed")
    report = diagnose(policy, engine)
    assert largest(report) == "kv_cache"
    assert report.contributions[PARTS.index("kv_cache")].sampler == "fp8, _fixed"
    # the same engine, said to make its scales: they were lost on the way
    told = diagnose(policy, engine, Side(sampler_of(policy, "blockwise", "fp8"), decodes=True))
    assert told.cause is not None and told.cause.name == "kv_scale_1"
    assert largest(told) == "kv_cache"


def rounded(x: torch.Tensor, scaling: Any) -> torch.Tensor:
    return quantize(x, scaling).dequantize(x.dtype)


def quantize_head(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = get_recipe("tensorwise")

    def logits(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        weight = rounded(self.head_weight.detach(), recipe.weight)
        return hp_mm(rounded(hidden, recipe.input), weight, out_dtype=torch.float32)

    monkeypatch.setattr(Decoder, "logits", logits)


def quantize_router(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = get_recipe("rowwise")

    def forward(self: Router, x: torch.Tensor) -> torch.Tensor:
        weight = rounded(self.weight.detach(), recipe.weight)
        return hp_mm(rounded(x, recipe.input), weight, out_dtype=torch.float32)

    monkeypatch.setattr(Router, "forward", forward)


@pytest.mark.parametrize(
    ("plant", "moe", "part", "name"),
    [(quantize_head, False, "head", "quantized_head"), (quantize_router, True, "router", "quantized_router")],
)
def test_what_should_stay_in_high_precision_is_named(
    request: Any,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    moe: bool,
    part: str,
    name: str,
) -> None:
    policy = request.getfixturevalue("moe_policy" if moe else "policy")
    engine = sampler_of(policy)
    with monkeypatch.context() as patch:
        plant(patch)
        drawn = sample(engine)
    report = find_mismatch(Side(policy), Side(engine, decodes=True), *drawn)
    assert report.cause is not None and report.cause.name == name
    assert largest(report) == part
    assert report.residual < 0.05 * report.total


def test_a_described_quantized_router_is_the_largest_part(moe_policy: Decoder) -> None:
    engine = sampler_of(moe_policy)
    sequences, lens, _ = sample(engine)
    side = Side(engine, decodes=True, router_recipe=get_recipe("rowwise"))
    report = find_mismatch(Side(moe_policy), side, sequences, lens)
    assert largest(report) == "router"
    assert report.residual == 0.0
    assert report.routing_flip_share is not None and 0 < report.routing_flip_share < 1
    assert report.with_replayed_routing is not None and report.with_replayed_routing < report.total


def test_experts_that_flip_are_counted(policy: Decoder, moe_policy: Decoder) -> None:
    def flips(model: Decoder, engine: Decoder) -> float | None:
        sequences = [[*prompt, *range(20, 40)] for prompt in PROMPTS]
        replay = Replay(Side(model), Side(engine, decodes=True), (), sequences, [len(prompt) for prompt in PROMPTS])
        found = replay.routing()
        return None if found is None else found[0]

    assert flips(policy, sampler_of(policy, "blockwise")) is None
    assert flips(moe_policy, sampler_of(moe_policy)) == 0.0
    share = flips(moe_policy, sampler_of(moe_policy, "blockwise", "fp8"))
    assert share is not None and 0 < share < 1


# faults of the reports themselves


def test_a_temperature_on_one_side_only_is_named(policy: Decoder) -> None:
    engine = sampler_of(policy)
    sequences, lens, _ = sample(engine, temperature=0.6)
    wrong = torch.cat([x[n - 1 :] for x, n in zip(sequence_logprobs(policy, sequences), lens, strict=True)]).detach()
    report = find_mismatch(Side(policy, 0.6), Side(engine, 0.6, decodes=True), sequences, lens, wrong)
    assert report.cause is not None and report.cause.name == "temperature"
    assert largest(report) == "head"


@pytest.mark.parametrize("shift", [1, -1])
def test_logprobs_that_are_off_by_one_are_named(policy: Decoder, shift: int) -> None:
    engine = sampler_of(policy)
    sequences, lens, logprobs = sample(engine)
    shifted = torch.cat([part.roll(shift) for part in logprobs.split(MAX_TOKENS)])
    report = find_mismatch(Side(policy), Side(engine, decodes=True), sequences, lens, shifted)
    assert report.cause is not None and report.cause.name == "off_by_one"
    assert "off by one" in report.verdict


def test_an_engine_that_fell_back_to_bf16_is_named(policy: Decoder) -> None:
    described = Side(sampler_of(policy, "rowwise"), decodes=True)
    report = diagnose(policy, sampler_of(policy), described)
    assert report.cause is not None and report.cause.name == "not_quantized"


def test_what_no_known_fault_explains_is_said(policy: Decoder) -> None:
    engine = sampler_of(policy)
    sequences, lens, logprobs = sample(engine)
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    report = find_mismatch(Side(policy), Side(engine, decodes=True), sequences, lens, logprobs + noise)
    assert report.cause is not None and report.cause.name == ""
    assert "no known fault" in report.verdict


# borders


def test_the_report_is_json(policy: Decoder) -> None:
    report = diagnose(policy, sampler_of(policy, "blockwise", "fp8"))
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["largest"] == largest(report)
    assert [row["part"] for row in plain["contributions"]] == list(PARTS)


def test_bad_input_is_refused(policy: Decoder, moe_policy: Decoder) -> None:
    engine = Side(sampler_of(policy), decodes=True)
    with pytest.raises(RecipeError, match="one architecture"):
        find_mismatch(Side(moe_policy), engine, [[1, 2]], [1])
    with pytest.raises(ShapeError, match="no longer than itself"):
        find_mismatch(Side(policy), engine, [[1, 2]], [3])
    with pytest.raises(ShapeError, match="at least one"):
        find_mismatch(Side(policy), engine, [[1, 2]], [2])
    with pytest.raises(ShapeError, match="a logprob each"):
        find_mismatch(Side(policy), engine, [[1, 2]], [1], torch.zeros(3))
    codes_only = copy.deepcopy(policy)
    codes_only.set_numerics(Numerics(get_recipe("rowwise")))
    codes_only.layers[0].mlp.down_proj.keep_codes_only()
    with pytest.raises(RecipeError, match="trainable=True"):
        find_mismatch(Side(codes_only), engine, [[1, 2]], [1])
    cut = copy.deepcopy(policy)
    cut.tensor_group = TensorGroup(None, 0, 2)
    for sides, name in (((cut, policy), "trainer"), ((policy, cut), "sampler")):
        with pytest.raises(
            ConfigError, match=f"the {name}'s are cut among 2 ranks; load the checkpoint in one process"
        ):
            find_mismatch(*map(Side, sides), [[1, 2]], [1])


def test_weights_of_codes_alone_are_compared_by_their_codes(policy: Decoder) -> None:
    engine = copy.deepcopy(policy)
    engine.set_numerics(Numerics(get_recipe("rowwise")))
    for module in (engine.layers[0].mlp.down_proj, engine.layers[1].self_attn.o_proj):
        module.keep_codes_only()
    assert stale_weights(policy, engine) == ()
    trainer = copy.deepcopy(policy)
    with torch.no_grad():
        trainer.layers[0].mlp.down_proj.weight.mul_(1.3)
    trainer.mark_weights_updated()
    assert stale_weights(trainer, engine) == ("layers.0.mlp.down_proj.weight",)
    report = diagnose(trainer, engine)
    assert report.residual < 0.05 * report.total
    assert largest(report) == "staleness"


# the command


Run = Callable[..., tuple[int | str, str]]


@pytest.fixture
def run(run_octavo: RunOctavo) -> Run:
    """run(argument, ...) is `octavo doctor mismatch`: (exit code, what it printed)."""

    def run_small(*arguments: str) -> tuple[int | str, str]:
        sizes = ("--num-prompts", "2", "--samples", "1", "--max-tokens", "4")
        ended = run_octavo("doctor", "mismatch", "--device", "cpu", *sizes, *arguments)
        return ended.code, ended.out + ended.err

    return run_small


@pytest.fixture
def checkpoint(policy: Decoder, tmp_path: Path) -> str:
    save_model(policy, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--router-recipe rowwise", "--router-recipe is of a model with experts, and this one has none"),
        ("--recipe blockwise", "rowwise is a recipe already, and --recipe blockwise another"),
        ("--kv-cache-dtype fp4", "--kv-cache-dtype must be one of"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: str, said: str, run: Run) -> None:
    code, out = run("rowwise", *arguments.split())
    assert code == 2 and said in " ".join(out.split()), out


def test_the_command_prints_a_table_and_json(checkpoint: str, run: Run) -> None:
    code, text = run(checkpoint)
    assert code == int("limit passed" in text)
    for part in LABELS.values():
        assert part in text
    assert "e4m3 block_128x128" in text and "fp8, per_token_head" in text
    code, text = run(checkpoint, "--recipe", "rowwise", "--kv-cache-dtype", "bf16", "--json")
    found = json.loads(text)
    parts = {row["part"]: row for row in found["contributions"]}
    assert (code, found["model"], found["subject"]) == (int(bool(found["findings"])), checkpoint, checkpoint)
    assert parts["weights"]["sampler"] == "e4m3 per_row"
    assert parts["kv_cache"]["contribution"] == 0.0


def test_an_older_checkpoint_is_what_staleness_costs(
    policy: Decoder, checkpoint: str, tmp_path: Path, run: Run
) -> None:
    older = copy.deepcopy(policy)
    with torch.no_grad():
        older.layers[0].mlp.down_proj.weight.mul_(-1.0)
    save_model(older, tmp_path / "older")
    code, text = run(checkpoint, "--sampler-weights", str(tmp_path / "older"), "--json")
    found = json.loads(text)
    assert found["largest"] == "staleness"
    assert found["stale"] == ["layers.0.mlp.down_proj.weight"]
    assert code == 1 and found["findings"]  # beyond the limits of [health]


@pytest.mark.parametrize(
    ("option", "part"), [(("--kv-scale", "0.001"), "kv_cache"), (("--head-recipe", "tensorwise"), "head")]
)
def test_an_engine_elsewhere_is_described(checkpoint: str, option: tuple[str, str], part: str, run: Run) -> None:
    arguments = (checkpoint, "--recipe", "bf16", "--kv-cache-dtype", "bf16", *option, "--json")
    assert json.loads(run(*arguments)[1])["largest"] == part


def test_keys_are_of_a_file(checkpoint: str, run: Run) -> None:
    for model in (checkpoint, "rowwise"):
        code, said = run(model, "--set", "run.steps=1")
        assert code == 2 and "--set sets keys of a TOML file" in " ".join(said.split())


def test_a_recipe_file_says_both_sides(tmp_path: Path, run: Run) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        "exact = false\n[model]\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 1\n"
        'num_attention_heads = 2\nnum_key_value_heads = 1\n[rollout]\nrecipe = "rowwise"\ntemperature = 0.8\n'
        '[trainer]\nrecipe = "blockwise"\n'
    )
    found = json.loads(run(str(config), "--json")[1])
    parts = {row["part"]: row for row in found["contributions"]}
    assert (parts["weights"]["trainer"], parts["weights"]["sampler"]) == ("e4m3 block_128x128", "e4m3 per_row")
    assert "temperature 0.8" in parts["head"]["sampler"]
    assert "random" in found["note"]
    exact = json.loads(run(str(config), "--set", "exact=true", "--set", "rollout.recipe=", "--json")[1])
    assert exact["measured"]["mismatch/logprob_abs_diff_max"] == 0.0
    assert exact["largest"] is None


def test_what_names_no_model_is_refused(run: Run) -> None:
    code, text = run("nowhere")
    assert code == 2 and "no checkpoint directory" in text
    code, text = run("rowwise", "--prompt", "hello")
    assert code == 2 and "no tokenizer" in text
