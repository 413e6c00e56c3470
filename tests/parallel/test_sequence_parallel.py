"""Tokens cut among the ranks that cut each linear: the bits of one process forward, close gradients, any length."""

from typing import Any

import pytest
import torch

from octavo.distributed.mesh import Mesh
from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.token_shards import TokenShards
from octavo.models import Decoder
from octavo.nn import ColumnLinear, PackedContext, RowLinear, token_logprobs
from octavo.nn.checkpoint import checkpoint
from octavo.nn.cut_linear import CutLinear
from octavo.numerics.analysis import sqnr
from octavo.parallel import parallelize, shard
from tests.nn.test_cut_linear import IN, LEAST_DB, OUT, give, share, whole
from tests.ranks import run_group

from .test_tensor_parallel import ALIKE, MICRO_BATCHES, ids, make, same, train, train_in_bf16

RECIPES = ("bf16", "rowwise", "blockwise", "tensorwise")
LENGTHS = (512, 37)  # whole blocks of 128 on each of 2 and 4 ranks; what no number of ranks divides
KINDS = ("column", "row gather", "row reduce")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# One linear


def linear_job(rank: int, world: int) -> dict[str, Any]:
    group, found = TensorGroup.of(), dict[str, Any]()
    for recipe in RECIPES:
        for num in LENGTHS:
            for bias in (False, True):
                found[f"torch {recipe} {num} {bias}"] = torchs_columns_are_alike(whole(recipe, bias), group, num)
                for kind in KINDS:
                    one = whole(recipe, bias)
                    runs = [run_linear(kind, one, group, num, bias) for _ in range(2)]
                    repeats = all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
                    pairs = list(zip(*runs[0], strict=True))
                    equal, close = torch.equal(*pairs[0]), [sqnr(b.float(), a.float()) for a, b in pairs]
                    found[f"{kind} {recipe} {num} {bias}"] = repeats, equal, close
    return found


def torchs_columns_are_alike(one: Any, group: TensorGroup, num: int) -> bool:
    """Whether torch's own product with a rank's rows of the weight has the bits of the whole one on this processor."""
    x, rows = torch.randn(num, IN).bfloat16(), share(OUT, group)
    bias = None if one.bias is None else one.bias[rows]
    part = torch.nn.functional.linear(x, one.weight[rows].contiguous(), bias)
    return torch.equal(part, torch.nn.functional.linear(x, one.weight, one.bias)[:, rows])


def run_linear(
    kind: str, one: torch.nn.Module, group: TensorGroup, num: int, bias: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients (input, weight, bias) of a cut linear, and this rank's part of those of the whole one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, IN, generator=generator).bfloat16()
    grad = torch.randn(num, OUT, generator=generator).bfloat16()
    one.zero_grad()
    of_one = x.clone().requires_grad_()
    out_of_one = one(of_one)
    out_of_one.backward(grad)
    shards = TokenShards(group)
    shards.num_tokens = num
    each = -(-num // group.size)
    tokens = slice(group.rank * each, min((group.rank + 1) * each, num))
    everything, rows, columns = slice(None), share(OUT, group), share(IN, group)
    cut: CutLinear
    if kind == "column":
        cut, in_place, out_place = ColumnLinear(IN, OUT, bias, group=group), (tokens, everything), (everything, rows)
    else:
        cut = RowLinear(IN, OUT, bias, group=group, mode=kind.split()[1])  # type: ignore[arg-type]
        in_place, out_place = (everything, columns), (tokens, everything)
    is_summed = kind == "row reduce"
    kept = (everything, columns) if is_summed else (rows, everything)
    give(cut, one, torch.arange(OUT)[kept[0]], kept[1])  # type: ignore[arg-type]
    cut.token_shards = shards
    of_cut = torch.nn.functional.pad(x[in_place], (0, 0, 0, each - len(x[in_place]) if kind == "column" else 0))
    of_cut.requires_grad_()
    out = cut(of_cut)
    received = torch.full_like(out, 0.0)
    received[: len(grad[out_place])] = grad[out_place]  # dummy tokens have no gradient
    out.backward(received)
    own = [out[: len(grad[out_place])], of_cut.grad[: len(x[in_place])], cut.weight.grad]  # type: ignore[union-attr,index]
    theirs = [out_of_one[out_place], of_one.grad[in_place], one.weight.grad[kept]]  # type: ignore[index,union-attr]
    if bias:
        own.append(cut.bias.grad)  # type: ignore[union-attr,arg-type]
        theirs.append(one.bias.grad[kept[0]])  # type: ignore[index,union-attr]
    return own, theirs  # type: ignore[return-value]


@pytest.fixture(scope="module")
def linears(num_ranks: int) -> list[dict[str, Any]]:
    return run_group(linear_job, num_ranks)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num", LENGTHS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_over_own_tokens(linears: list[dict[str, Any]], kind: str, recipe: str, num: int, bias: bool) -> None:
    for found in linears:
        repeats, equal, close = found[f"{kind} {recipe} {num} {bias}"]
        assert repeats
        # each sum on one rank: the bits of one process, in bf16 where the CPU's library adds alike for fewer columns
        if recipe != "bf16" or found[f"torch {recipe} {num} {bias}"] or kind == "row reduce":
            assert equal == (kind != "row reduce")
        assert min(close) > LEAST_DB, close


# A Decoder

CASES = [("llama", recipe, exact) for recipe in ("bf16", "rowwise", "blockwise") for exact in (False, True)]
CASES += [("qwen3", "rowwise", False), ("gptj", "blockwise", False), ("gptj", "bf16", False),
          ("qwen3_moe", "blockwise", True), ("tied", "bf16", False)]  # fmt: skip


def run_decoder(model: Decoder, num: int) -> dict[str, torch.Tensor]:
    """Hidden states, logprobs and gradients of two packed sequences."""
    model.zero_grad()
    tokens = ids(0, num)
    lengths = [num // 2 + 1, num - num // 2 - 1] if num > 2 else [num]
    context = PackedContext.from_lengths(lengths, model.numerics, "cpu", model.kv_table)
    hidden = model(tokens, context)
    options = {"head_bias": model.head_bias, "tensor_group": model.head_group, "exact": model.numerics.exact}
    logprobs, _ = token_logprobs(hidden, model.head_weight, tokens, **options)  # type: ignore[arg-type]
    (-logprobs.mean()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), "logprobs": logprobs.detach(), **grads}


def decoder_job(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family, recipe, exact in CASES:
        if family == "qwen3" and world > 2:
            continue  # ranks that share KV heads do not train
        one, plain, own = (make(family, recipe, exact=exact, hidden_size=128 * world) for _ in range(3))
        for model in (plain, own):
            report = parallelize(model, TensorGroup.of(), mode="gather", sequence_parallel=model is own)
        for num in (37, 1):
            of_one, of_plain, of_own = (run_decoder(model, num) for model in (one, plain, own))
            found[f"{family} {recipe} {exact} {num}"] = {
                "bits": all(torch.equal(of_one[name], of_own[name]) for name in ("hidden", "logprobs")),
                "same": {name for name, grad in of_plain.items() if torch.equal(grad, of_own[name])},
                "close": {name: sqnr(grad.float(), of_own[name].float()) for name, grad in of_plain.items()},
                "own": {name: of_own[name] for name in ALIKE & of_own.keys()},
            }
        with torch.no_grad():
            context = PackedContext.from_lengths([37], own.numerics, "cpu", own.kv_table)
            quiet = [model(ids(0, 37), context) for model in (one, own)]
        found[f"{family} {recipe} {exact} quiet"] = torch.equal(*quiet)
    context = PackedContext.from_lengths([36], own.numerics, "cpu", own.kv_table)  # whole rows of every rank
    found["is_view"] = own(ids(0, 36), context)._base is not None
    found["text"] = str(report)
    found["saved"] = saved_by_norms(world)
    found["recomputed"] = recomputed()
    return found


def saved_by_norms(world: int) -> list[set[int]]:
    """Rows of what is saved for the backward and is as wide as the residual stream, without and with own tokens."""
    found = []
    for is_own in (False, True):
        model = make("llama", "blockwise", hidden_size=128 * world)
        parallelize(model, TensorGroup.of(), mode="gather", sequence_parallel=is_own)
        rows: set[int] = set()

        def note(tensor: torch.Tensor, rows: set[int] = rows) -> torch.Tensor:
            if tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and tensor.shape[1] == 128 * world:
                rows.add(tensor.shape[0])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(ids(0, 80), PackedContext.from_lengths([80], model.numerics, "cpu", model.kv_table))
        found.append(rows - {weight.shape[0] for weight in model.parameters()})
    return found


def recomputed() -> bool:
    """Whether layers that are run again in the backward, after a forward of another length, give the same gradients."""
    runs = []
    for is_recomputed in (False, True):
        model = make("llama", "blockwise")
        if is_recomputed:
            for layer in model.layers:
                forward = layer.forward
                layer.forward = lambda *args, forward=forward: checkpoint(forward, *args)  # type: ignore[method-assign]
        parallelize(model, TensorGroup.of(), mode="reduce", sequence_parallel=True)
        outputs = [model(ids(num, num), PackedContext.from_lengths([num], model.numerics, "cpu")) for num in (37, 20)]
        for output in outputs:
            output.float().square().mean().backward()
        runs.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.fixture(scope="module")
def decoders(num_ranks: int) -> list[dict[str, Any]]:
    return run_group(decoder_job, num_ranks)


@pytest.mark.parametrize("num", [37, 1])
@pytest.mark.parametrize(("family", "recipe", "exact"), CASES)
def test_a_decoder_has_the_bits_of_one_process_and_the_gradients_of_a_cut_one(
    decoders: list[dict[str, Any]], family: str, recipe: str, exact: bool, num: int
) -> None:
    if family == "qwen3" and len(decoders) > 2:
        pytest.skip("four ranks share two KV heads, and do not train")
    first = decoders[0][f"{family} {recipe} {exact} {num}"]
    for found in decoders:
        case = found[f"{family} {recipe} {exact} {num}"]
        assert case["bits"]
        changed = {name for name in case["close"] if name not in case["same"]}
        if len(decoders) == 2:  # with two terms no sum has another order, but those over tokens: of the norms' weights
            assert all("norm" in name for name in changed), changed
        # sums of four terms have another order than without, and an FP8 code of a gradient that flips is a whole step
        # off: with and without own tokens the gradients are equally far from one process, 23 dB
        least = LEAST_DB if len(decoders) == 2 or recipe == "bf16" else 20.0
        assert min(case["close"].values()) > least, case["close"]
        for name, grad in case["own"].items():
            assert torch.equal(grad, first["own"][name]), name
        assert found[f"{family} {recipe} {exact} quiet"]


def test_less_is_kept_for_the_backward(decoders: list[dict[str, Any]]) -> None:
    for found in decoders:
        plain, own = found["saved"]
        assert 80 in plain and own == {80 // len(decoders)}
        assert found["text"].endswith("in training each rank has its own tokens between them")


def test_hidden_states_are_no_view_of_which_fsdp2_warns(decoders: list[dict[str, Any]]) -> None:
    assert not any(found["is_view"] for found in decoders)


def test_layers_that_run_again_know_their_tokens(decoders: list[dict[str, Any]]) -> None:
    assert all(found["recomputed"] for found in decoders)


# Training


def training_job(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for family, recipe, mode in (
        ("llama", "blockwise", "gather"), ("llama", "blockwise", "reduce"), ("gptj", "rowwise", "reduce"),
        ("llama", "delayed", "reduce"), ("qwen3_moe", "bf16", "gather"),
    ):  # fmt: skip
        runs = []
        for sequence_parallel in (True, True, False):
            model = make(family, recipe)
            parallelize(model, TensorGroup.of(), mode=mode, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
            runs.append(train(model, range(MICRO_BATCHES)))
        found[f"{family} {recipe} {mode}"] = (runs[0], same(*runs[:2]), runs[2])
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_group(training_job, 2)


@pytest.mark.parametrize(
    "case",
    ["llama blockwise gather", "llama blockwise reduce", "gptj rowwise reduce", "llama delayed reduce",
     "qwen3_moe bf16 gather"],
)  # fmt: skip
def test_training_repeats_itself_and_stays_near_a_cut_model(trained: list[dict[str, Any]], case: str) -> None:
    for found in trained:
        own, repeats, plain = found[case]
        assert repeats
        assert own["losses"] == pytest.approx(plain["losses"], rel=0.01)
        assert own["norms"] == pytest.approx(plain["norms"], rel=0.01)
    first, second = (found[case][0] for found in trained)
    assert first["losses"] == second["losses"] and first["norms"] == second["norms"]
    for name in ALIKE & first["params"].keys():
        assert torch.equal(first["params"][name], second["params"][name]), name


def sharded_job(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two ranks cut each linear and the tokens, two share the slices."""
    mesh = Mesh.of_process_group(1, 2, "cpu", 2)
    sharded = make().float()
    parallelize(sharded, mesh, mode="gather", sequence_parallel=True)
    shard(sharded, mesh, reduction="ordered", param_dtype=torch.bfloat16)
    cut = make().float()
    parallelize(cut, mesh, mode="gather", sequence_parallel=True)
    return train(sharded, mesh.own_share(MICRO_BATCHES)), train_in_bf16(cut)


@pytest.mark.slow
def test_cut_and_sharded_has_the_bits_of_cut_alone() -> None:
    for sharded, cut in run_group(sharded_job, 4):
        assert sharded["norms"] == cut["norms"]
        for name, tensor in cut["params"].items():
            assert torch.equal(sharded["params"][name].bfloat16().float(), tensor), name
