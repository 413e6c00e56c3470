"""A Decoder cut among 2 and 4 ranks: hidden states, logprobs and samples with the bits of one process; training."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo.distributed import tensor_group
from octavo.distributed.mesh import Mesh
from octavo.distributed.tensor_group import PartialRows, TensorGroup
from octavo.errors import OctavoError
from octavo.models import Decoder, ModelConfig
from octavo.nn import PackedContext, keep_codes_only, token_logprobs
from octavo.numerics import Numerics, get_recipe
from octavo.numerics.analysis import sqnr
from octavo.parallel import parallelize, shard
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import make_batch
from octavo.train.step import summed_loss
from tests.ranks import run_group

VOCAB, TOKENS = 96, 32
RECIPES = ("bf16", "rowwise", "blockwise")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128},
    "qwen3": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "qk_norm": True},  # at 4 ranks KV heads repeat
    "gptj": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "rotary_dim": 64},
    "qwen3_moe": {
        "num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "qk_norm": True, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    },
    "tied": {"family": "llama", "num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "tie_word_embeddings": True},
}  # fmt: skip


def make(family: str = "llama", recipe: str = "blockwise", *, exact: bool = False, hidden_size: int = 256) -> Decoder:
    """Exact ones have an FP8 cache."""
    fields = {"family": family, "tie_word_embeddings": False} | FAMILIES[family]
    config = ModelConfig(
        vocab_size=VOCAB, intermediate_size=512, num_layers=2, max_position_embeddings=128, hidden_size=hidden_size,
        **fields,
    )  # fmt: skip
    model = Decoder(config, seed=0)
    kv_cache_dtype = "fp8" if exact else "bf16"
    model.set_numerics(Numerics(get_recipe(recipe), exact=exact, kv_cache_dtype=kv_cache_dtype))
    return model


def ids(seed: int, num: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num,), generator=torch.Generator().manual_seed(seed))


def score(model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logprobs of two packed sequences."""
    tokens = ids(0, TOKENS)
    context = PackedContext.from_lengths([20, TOKENS - 20], model.numerics, "cpu", model.kv_table)
    hidden = model(tokens, context)
    logprobs, _ = token_logprobs(
        hidden,
        model.head_weight,
        tokens,
        exact=model.numerics.exact,
        head_bias=model.head_bias,
        tensor_group=model.head_group,
    )
    return hidden.detach(), logprobs.detach()


def sample(model: Decoder) -> list[Any]:
    """Tokens and logprobs; chunked prompts, a shared prefix, and too few pages for all sequences at once."""
    prompts = [ids(seed, num).tolist() for seed, num in ((1, 5), (2, 40), (3, 70))]
    prompts.append(prompts[2][:64] + prompts[0])
    llm = octavo.LLM(model, max_num_seqs=4, max_num_batched_tokens=32, num_kv_pages=5)
    params = octavo.SamplingParams(max_tokens=8, temperature=1.0, logprobs=1, seed=5, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(o.token_ids, [sorted((k, v.logprob) for k, v in d.items()) for d in o.logprobs or []]) for o in outputs]


def compare(one: Decoder, cut: Decoder, *, samples: bool) -> dict[str, bool]:
    found = {}
    for has_grad in (False, True):
        if has_grad and any(module.weight is None for module in cut.modules() if isinstance(module, octavo.nn.Linear)):
            continue
        with torch.set_grad_enabled(has_grad and not _repeats(cut)):
            pairs = zip(score(one), score(cut), strict=True)
            found[f"scores, gradients {has_grad}"] = all(torch.equal(a, b) for a, b in pairs)
    if samples:
        found["samples"] = sample(one) == sample(cut)
    return found


def _repeats(model: Decoder) -> bool:
    return any(getattr(module, "repeats_rows", False) for module in model.modules())


CASES = [("llama", recipe, exact) for recipe in RECIPES for exact in (False, True)]
CASES += [
    ("qwen3", "blockwise", False),
    ("qwen3", "rowwise", True),
    ("gptj", "blockwise", True),
    ("qwen3_moe", "blockwise", True),
    ("tied", "rowwise", True),
]


def inference_job(rank: int, world: int) -> dict[str, Any]:
    group, found, hidden_size = TensorGroup.of(), dict[str, Any](), 128 * world  # whole blocks for every rank
    for family, recipe, exact in CASES:
        one, cut = (make(family, recipe, exact=exact, hidden_size=hidden_size) for _ in range(2))
        parallelize(cut, group, mode="gather")
        found[f"{family} {recipe} {exact}"] = compare(one, cut, samples=exact)
        if _repeats(cut):
            found["repeats"] = refusal(lambda _, cut=cut: score(cut), group)
    one, cut = (make(hidden_size=hidden_size) for _ in range(2))
    for model in (one, cut):
        keep_codes_only(model)
    parallelize(cut, group, mode="gather")
    found["codes"] = compare(one, cut, samples=True)
    one, cut = (make(hidden_size=hidden_size) for _ in range(2))
    report = parallelize(cut, group)
    found["text"], found["share"] = str(report), report.num_local_params / report.num_params
    found["reduce"] = sqnr(score(one)[0], score(cut)[0])
    found["refused"] = [refusal(case, group) for case in REFUSED]
    found |= {f"dealt {recipe} {mode}": dealt(group, recipe, mode, hidden_size) for recipe, mode in DEALT}
    return found


DEALT = (("blockwise", "gather"), ("rowwise", "reduce"), ("blockwise", "reduce"), ("tensorwise", "reduce"))


def dealt(group: TensorGroup, recipe: str, mode: Any, hidden_size: int) -> dict[str, bool]:
    """A model whose ranks compute the norms of a share of the rows each, beside one whose ranks compute all."""
    one, cut = (make("qwen3", recipe, hidden_size=hidden_size) for _ in range(2))
    if mode == "reduce":
        parallelize(one, group, mode=mode)
    parallelize(cut, group, mode=mode)
    num_dealt = 0
    share = PartialRows.share

    def counted(parts: PartialRows) -> torch.Tensor:
        nonlocal num_dealt
        num_dealt += 1
        return share(parts)

    with (
        torch.no_grad(),
        mock.patch.object(tensor_group, "MIN_DEALT_BYTES", 0),
        mock.patch.object(tensor_group, "MIN_DEALT_ROWS", 4),
        mock.patch.object(PartialRows, "share", counted),
    ):
        shared = score(cut)
        num_scoring = num_dealt  # on a CPU the sum behind attention is made before the norm
        samples = sample(cut)
    is_as_expected = num_dealt == 0 if recipe == "tensorwise" else num_scoring == 1 and num_dealt > 3
    with torch.no_grad():
        scores = score(one)
    if mode == "reduce" and num_dealt and group.size > 2:  # a backend adds more than two parts in an order of its own
        return {"scores": sqnr(scores[0], shared[0]) > 25, "dealt": is_as_expected}
    found = {f"scores {i}": torch.equal(*pair) for i, pair in enumerate(zip(scores, shared, strict=True))}
    return found | {"samples": sample(one) == samples, "dealt": is_as_expected}


def refusal(case: Any, group: TensorGroup) -> str:
    try:
        case(group)
    except OctavoError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _twice(group: TensorGroup) -> None:
    model = make()
    parallelize(model, group)
    parallelize(model, group)


def _other_weights(group: TensorGroup) -> None:
    model = make()
    with torch.no_grad():
        model.norm.weight.add_(group.rank)
    parallelize(model, group)


def _heads(group: TensorGroup) -> None:
    config = dataclasses.replace(make().config, num_heads=3, num_kv_heads=3)
    parallelize(Decoder(config), group)


def _blocks(group: TensorGroup) -> None:
    config = dataclasses.replace(make().config, num_heads=4, num_kv_heads=4, head_dim=32)
    model = Decoder(config)
    model.set_numerics(Numerics(get_recipe("blockwise")))
    parallelize(model, group)


def _optimizer_before(group: TensorGroup) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, group)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.step()


REFUSED = (
    _optimizer_before,
    _twice,
    _other_weights,
    _heads,
    _blocks,
    lambda group: parallelize(torch.nn.Linear(2, 2), group),  # type: ignore[arg-type]
    lambda group: parallelize(make(exact=True), group, mode="reduce"),
    lambda group: parallelize(make(), group, mode="sum"),  # type: ignore[arg-type]
    lambda _: parallelize(make(), None),  # type: ignore[arg-type]
    lambda _: parallelize(make(), dist.group.WORLD),  # type: ignore[arg-type]
    lambda group: parallelize(make(recipe="delayed"), group, mode="gather"),
)
REFUSALS = (
    "ConfigError: this SGD was made before the model was sharded or cut",
    "ConfigError: the model is cut or sharded already",
    "ConfigError: all ranks must run the same; the sum of the bits of norm.weight",
    "ShapeError: tensor-parallel ranks must divide the heads",
    "ShapeError: 'blockwise' has blocks of 128",
    "ConfigError: parallelize cuts octavo's Decoders, got Linear",
    "ConfigError: mode='reduce' is not exact",
    "ConfigError: mode must be one of ('gather', 'reduce')",
    "ConfigError: the ranks of a cut must be a TensorGroup, got None; give mesh.tensor_group",
    "ConfigError: the ranks of a cut must be a TensorGroup, got a ProcessGroup",
    "RecipeError: recipe 'delayed' has one scale for a whole weight",
)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def inferred(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_group(inference_job, request.param)


@pytest.mark.parametrize(("family", "recipe", "exact"), CASES)
def test_a_cut_model_has_the_bits_of_one_process(
    inferred: list[dict[str, Any]], family: str, recipe: str, exact: bool
) -> None:
    for found in inferred:
        assert all(found[f"{family} {recipe} {exact}"].values()), found[f"{family} {recipe} {exact}"]


@pytest.mark.parametrize(("recipe", "mode"), DEALT)
def test_norms_of_a_share_of_the_rows_have_the_same_bits(
    inferred: list[dict[str, Any]], recipe: str, mode: str
) -> None:
    for found in inferred:
        assert all(found[f"dealt {recipe} {mode}"].values()), found[f"dealt {recipe} {mode}"]


def test_ranks_that_share_kv_heads_do_not_train(inferred: list[dict[str, Any]]) -> None:
    for found in inferred:  # two KV heads
        refused = found.get("repeats", "")
        assert refused.startswith("ConfigError: training with more tensor-parallel ranks than KV") == (
            len(inferred) == 4
        )


def test_codes_alone_are_cut_too(inferred: list[dict[str, Any]]) -> None:
    assert all(all(found["codes"].values()) for found in inferred)


def test_reduce_is_said_to_have_other_bits(inferred: list[dict[str, Any]]) -> None:
    for found in inferred:
        assert "9 linears cut" in found["text"] and "reduce: partial sums are added" in found["text"]
        assert found["share"] < 0.6
        assert 20 < found["reduce"] < 60  # re-quantization spreads a difference over the layers


def test_what_cannot_be_cut_is_refused(inferred: list[dict[str, Any]]) -> None:
    for found in inferred:
        for text, expected in zip(found["refused"], REFUSALS, strict=True):
            assert text.startswith(expected), text


# Training

STEPS, MICRO_BATCHES = 2, 4
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
# what every rank has whole
ALIKE = {
    "norm.weight",
    *(f"layers.{i}.{n}.weight" for i in (0, 1) for n in _NORMS),
}


def train(model: Decoder, share: range, max_norm: float = 0.5) -> dict[str, Any]:
    """Losses and norms of some steps over a share of micro-batches, and the parameters that every rank has whole."""
    optimizer = MasterAdamW(model, OptimizerSection(lr=0.001))
    found: dict[str, Any] = {"losses": [], "norms": [], "grads": {}}
    for step in range(STEPS):
        for index in share:
            tokens = ids(100 * step + index, TOKENS + 1)
            loss = summed_loss(model, make_batch([tokens.numpy()], None)) / (MICRO_BATCHES * TOKENS)
            loss.backward()
            optimizer.accumulate_gradients()
            found["losses"].append(loss.item())
        found["grads"] = found["grads"] or {name: whole(grad) for name, grad in grads_of(optimizer).items()}
        found["norms"].append(optimizer.clip_gradients(max_norm).item())
        optimizer.step()
    found["params"] = {name: whole(p) for name, p in model.named_parameters()}
    return found


def grads_of(optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    return {name: master.grad for name, master in optimizer._update._masters.items()}  # type: ignore[union-attr,misc]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().float().clone()


def training_job(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family, recipe, mode in (
        ("llama", "blockwise", "gather"), ("tied", "blockwise", "reduce"), ("qwen3", "rowwise", "gather"),
        ("gptj", "bf16", "gather"), ("llama", "delayed", "reduce"), ("llama", "tensorwise", "reduce"),
    ):  # fmt: skip
        runs = []
        for _ in range(2):
            model = make(family, recipe)
            parallelize(model, TensorGroup.of(), mode=mode)  # type: ignore[arg-type]
            runs.append(train(model, range(MICRO_BATCHES)))
        found[f"{family} {recipe} {mode}"] = (runs[0], same(*runs), train(make(family, recipe), range(MICRO_BATCHES)))
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    params = all(torch.equal(a["params"][name], b["params"][name]) for name in a["params"])
    return params and a["losses"] == b["losses"] and a["norms"] == b["norms"]


def test_one_rank_cuts_nothing_and_says_so() -> None:
    model = make()
    report = parallelize(model, Mesh.single())
    assert report.mode is None and report.num_cut == 0 and model.tensor_group is None
    assert str(report) == "nothing cut: 1 tensor-parallel rank, which holds and computes the whole model"


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_group(training_job, 2)


@pytest.mark.largest  # runs of `octavo train` over two ranks say the same in CI
@pytest.mark.parametrize(
    "case",
    ["llama blockwise gather", "tied blockwise reduce", "qwen3 rowwise gather", "gptj bf16 gather",
     "llama delayed reduce", "llama tensorwise reduce"],
)  # fmt: skip
def test_training_repeats_itself_and_stays_near_one_process(trained: list[dict[str, Any]], case: str) -> None:
    for found in trained:
        run, repeats, one = found[case]
        assert repeats
        assert run["losses"] == pytest.approx(one["losses"], rel=0.01)
        assert run["norms"] == pytest.approx(one["norms"], rel=0.01)
        for name in ALIKE & run["grads"].keys():
            assert sqnr(one["grads"][name], run["grads"][name]) > 12, name  # of a whole model in FP8, not of one linear
    first, second = (found[case][0] for found in trained)
    assert first["losses"] == second["losses"] and first["norms"] == second["norms"]
    for name in ALIKE & first["params"].keys():
        assert torch.equal(first["params"][name], second["params"][name]), name


def sharded_job(rank: int, world: int) -> dict[str, Any]:
    """Two ranks cut each linear, two share the slices."""
    mesh = Mesh.of_process_group(1, 2, "cpu", 2)
    assert mesh.tensor_group is not None
    found: dict[str, Any] = {"place": (mesh.rank, mesh.world_size, mesh.tensor_group.rank, mesh.is_first)}
    for recipe in ("bf16", "blockwise"):
        model = make(recipe=recipe).float()
        parallelize(model, mesh, mode="gather")
        shard(model, mesh, reduction="ordered", param_dtype=torch.bfloat16)
        sharded = train(model, mesh.own_share(MICRO_BATCHES))
        cut = make(recipe=recipe).float()
        parallelize(cut, mesh, mode="gather")
        optimizer_runs = train_in_bf16(cut)
        found[recipe] = sharded, optimizer_runs
    return found


def train_in_bf16(model: Decoder) -> dict[str, Any]:
    """As train over all micro-batches, with parameters in bf16 over fp32 masters, as the shards gather them."""
    return train(model.to(torch.bfloat16), range(MICRO_BATCHES))


@pytest.mark.slow
def test_cut_and_sharded_has_the_bits_of_cut_alone() -> None:
    for rank, found in enumerate(run_group(sharded_job, 4)):
        assert found["place"] == (rank // 2, 2, rank % 2, rank == 0)
        for recipe in ("bf16", "blockwise"):
            sharded, cut = found[recipe]
            assert sharded["norms"] == cut["norms"]
            assert sharded["losses"] == [
                cut["losses"][s * MICRO_BATCHES + i] for s in range(STEPS) for i in (rank // 2, rank // 2 + 2)
            ]
            for name, tensor in cut["params"].items():
                assert torch.equal(sharded["params"][name].bfloat16().float(), tensor), name
