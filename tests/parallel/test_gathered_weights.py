"""Weights gathered as FP8 codes, on 2 ranks: writes, scales, NaN, checkpoints, samplers, what stays in bf16."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import octavo
from octavo import nn
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.errors import ConfigError, RecipeError, StaleCodesError
from octavo.nn.live_weights import stop_watching
from octavo.nn.weights.gathered import GatheredWeight
from octavo.numerics import get_recipe
from octavo.parallel import gathered, shard
from octavo.parallel.sharded_weight import ShardedWeight
from tests.parallel.gathered_models import RECIPES, Stack, draw, held_bytes, loss_of, make_decoder, make_stack
from tests.ranks import run_ranks

# Jobs


def noticed(mesh: Mesh) -> dict[str, Any]:
    """Whether a forward after a write has the outputs of the new weights; and a write that no one can notice."""
    found: dict[str, Any] = {}

    def halve(to: Callable[[Any], torch.Tensor]) -> Callable[[torch.nn.Module], None]:
        def write(model: torch.nn.Module) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    to(p).mul_(0.5)

        return write

    def step(model: torch.nn.Module, **options: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **options)
        loss_of(model, draw(0, 0)).backward()
        optimizer.step()
        states = [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "_local_tensor")]
        found.setdefault("states", []).extend(type(v._local_tensor).__name__ for v in states)

    def unnoticed(model: torch.nn.Module, name: str = "seen") -> None:
        halve(lambda p: p.to_local().data)(model)
        try:
            model(draw(0, 0))
            found[name] = "nothing"
        except StaleCodesError as error:
            found[name] = str(error)
        nn.mark_weights_updated(model)

    def unwatched(model: torch.nn.Module) -> None:
        stop_watching(model)
        unnoticed(model, "unwatched")

    writes = {
        "foreach": functools.partial(step, foreach=True),
        "fused": functools.partial(step, fused=True),
        "in place": halve(lambda p: p),
        "local": halve(lambda p: p.to_local()),
        "loaded": lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
        "assigned": lambda model: model.load_state_dict(
            {k: v * 0.5 for k, v in model.state_dict().items()}, assign=True
        ),
        "unnoticed": unnoticed,
        "unwatched": unwatched,
    }
    for recipe in ("blockwise", "tensorwise"):
        for name, write in writes.items():
            model, fresh = make_stack(recipe, mesh), make_stack(recipe, mesh)
            shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
            loss_of(model, draw(0, 0)).backward()
            model.zero_grad()
            write(model)
            fresh.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
            model.zero_grad()
            found[f"{name} {recipe}"] = torch.equal(model(draw(1, 0)), fresh(draw(1, 0)))
    return found


def saved(mesh: Mesh, folder: str) -> dict[str, Any]:
    """State dicts know plain tensors alone; a checkpoint goes into a model that gathers bf16, and back."""
    import torch.distributed.checkpoint as dcp

    found: dict[str, Any] = {}
    model, other = make_stack("blockwise", mesh), make_stack("blockwise", mesh)
    shard(model, mesh, all_gather_dtype="fp8")
    shard(other, mesh)
    loss_of(model, draw(0, 0)).backward()
    found["coded"] = [type(p._local_tensor) is ShardedWeight for p in model.parameters() if p.dim() == 2]
    state = model.state_dict()
    found["types"] = sorted({type(v._local_tensor).__name__ for v in state.values()})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    for target in (other, model):
        state = target.state_dict()
        with torch.no_grad():
            for value in state.values():
                value.zero_()
        dcp.load({"model": state}, checkpoint_id=folder)
        target.load_state_dict(state)
    found["equal"] = torch.equal(model(draw(1, 0)), other(draw(1, 0)))
    found["local"] = b"ShardedWeight" not in _pickled(next(p for p in model.parameters() if p.dim() == 2))
    return found


def _pickled(parameter: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(parameter.to_local(), buffer)
    return buffer.getvalue()


def scales_of_a_step(mesh: Mesh) -> list[bool]:
    """Whether the backward's codes leave the forward's scale where it is, for which GEMMs may still wait."""
    found = []
    for recipe in ("tensorwise", "delayed by step"):
        model = make_stack(recipe, mesh)
        shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
        sources = [m.source for m in model.modules() if isinstance(m, nn.Linear)]
        loss = loss_of(model, draw(0, 0))
        before = [source.scale for source in sources]  # type: ignore[union-attr]
        loss.backward()
        found += [source.scale is scale for source, scale in zip(sources, before, strict=True)]  # type: ignore[union-attr]
    return found


def broken(mesh: Mesh) -> dict[str, Any]:
    """NaN and inf in one rank's rows, as one process shows them on every rank."""
    found = {}
    for recipe in RECIPES:
        for value in (float("nan"), float("inf")):
            model, one = make_stack(recipe, mesh), make_stack(recipe, mesh)
            with torch.no_grad():
                for each in (model, one):
                    each.layers[1].down.weight[-1, 3] = value  # type: ignore[union-attr, index]
            shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
            out, expected = model(draw(0, 0)), one(draw(0, 0))
            equal = torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
            found[f"{recipe} {value}"] = [equal, bool(out.isnan().any()) == bool(expected.isnan().any())]
            found.setdefault("nan shows", []).append(bool(out.isnan().any()) if value != value else True)
    return found


def refused(mesh: Mesh) -> dict[str, Any]:
    """Reasons for bf16, by what is cut, computed or shared; and errors."""
    model = torch.nn.Module()
    for name in ("rows", "emulated", "high", "shared", "tied", "frozen", "own", "plain", "fine"):
        setattr(model, name, torch.nn.Linear(128, 512))
    model.ragged, model.uneven = torch.nn.Linear(128, 192), torch.nn.Linear(128, 129)
    model.fused = nn.Linear(128, 512, parts=(256, 256))
    model.frozen.requires_grad_(False)
    model.bfloat16()
    recipes: dict[str, Any] = dict.fromkeys(("ragged", "uneven", "shared", "tied", "fine"), "blockwise")
    recipes |= {"rows": "rowwise", "emulated": get_recipe("blockwise", fake_quant=True), "fused": "tensorwise"}
    recipes |= {"high": get_recipe("blockwise", high_precision_gemms=("grad_input",)), "frozen": "delayed"}
    recipes |= {"own": get_recipe("delayed", reduce_amax=False), "plain": "bf16"}
    nn.convert(model, "blockwise")
    for name, recipe in recipes.items():
        getattr(model, name).set_recipe(get_recipe(recipe))
    model.tied.weight = model.shared.weight
    report = shard(model, mesh, all_gather_dtype="fp8")
    found: dict[str, Any] = {"reasons": {line.name: line.reason for line in report.gathers}, "text": str(report)}
    found["bytes"] = {line.name: line.num_bytes for line in report.gathers}
    for recipe, match in (
        (None, "call the model that was sharded"),
        ("blockwise", "gathered as codes of recipe 'delayed', and 'blockwise' is asked for"),
        ("bf16", "cannot run in high precision"),
    ):
        stack = make_stack("delayed", mesh)
        shard(stack, mesh, all_gather_dtype="fp8")
        if recipe is not None:
            stack.layers[0].up.recipe = get_recipe(recipe)  # type: ignore[union-attr]
        with pytest.raises(RecipeError, match=match):
            (stack.layers[0] if recipe is None else stack)(draw(0, 0))
    with pytest.raises(StaleCodesError, match="call the sharded module"):
        stack.layers[1].down.forward_operands(get_recipe("delayed"))  # type: ignore[union-attr]
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from octavo.parallel.fp8_all_gather import gather_codes

    offloaded = make_stack("blockwise", mesh)
    fully_shard(offloaded, mesh=mesh.device_mesh["dp_shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    found["offloaded"] = [line.reason for line in gather_codes(offloaded, [offloaded], None)]
    late = make_stack("blockwise", mesh)
    shard(late, mesh)
    late(draw(0, 0))
    with pytest.raises(ConfigError, match="this model has run"):
        gather_codes(late, [*late.layers, late], None)
    return found


def sample(mesh: Mesh) -> list[float]:
    """A colocated engine reads the gathered codes: differences of log-probabilities, sampled and scored."""
    model = make_decoder("blockwise", mesh, exact=True)
    shard(model, mesh, all_gather_dtype="fp8")
    llm = octavo.LLM(model, max_num_seqs=4, num_kv_pages=16, seed=0)
    params = octavo.SamplingParams(temperature=1.0, max_tokens=4 + mesh.rank, ignore_eos=True, logprobs=0)
    found = []
    for _ in range(2):
        prompt = list(range(mesh.rank, mesh.rank + 9))
        answer = llm.generate([prompt], params)[0].outputs[0]
        with torch.no_grad(), gathered(model):
            (scored,) = octavo.sequence_logprobs(model, [prompt + answer.token_ids], prompt_lens=[len(prompt)])
        sampled = [step[t].logprob for step, t in zip(answer.logprobs, answer.token_ids, strict=True)]
        found.append((scored - torch.tensor(sampled)).abs().max().item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.75)
    return [*found, float(held_bytes(model))]


def meta(mesh: Mesh) -> bool:
    """Sharded without memory, then given some and values: as large models are loaded."""
    torch.manual_seed(0)
    expected = make_stack("blockwise", mesh)
    with torch.device("meta"):
        model = Stack(256).bfloat16()
    nn.convert(model, "blockwise")
    shard(model, mesh, all_gather_dtype="fp8")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            rows = theirs.chunk(mesh.world_size)[mesh.rank]
            mine.to_local().copy_(rows)
    coded = all(type(p._local_tensor) is ShardedWeight for p in model.parameters() if p.dim() == 2)
    return coded and torch.equal(model(draw(0, 0)), expected(draw(0, 0)))


def fast_job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    found = {
        "noticed": noticed(mesh),
        "scales": scales_of_a_step(mesh),
        "broken": broken(mesh),
        "refused": refused(mesh),
    }
    mesh.close()
    return found


def slow_job(rank: int, folder: str) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    found = {"saved": saved(mesh, folder), "sample": sample(mesh), "meta": meta(mesh)}
    mesh.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fast_job, 2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    job = functools.partial(slow_job, folder=str(tmp_path_factory.mktemp("checkpoint")))
    return run_ranks(job, 2)


def test_writes_are_noticed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        states, seen = found["noticed"].pop("states"), found["noticed"].pop("seen")
        assert set(states) == {"Tensor"} and "mark_weights_updated" in seen
        assert found["noticed"].pop("unwatched") == "nothing"
        assert len(found["noticed"]) == 16 and all(found["noticed"].values()), found["noticed"]


def test_a_version_has_one_scale(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["scales"] == [True] * 8


def test_nan_and_inf_show_as_in_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert all(found["broken"].pop("nan shows"))
        assert all(equal for pair in found["broken"].values() for equal in pair), found["broken"]


def test_the_report_says_what_stays_in_high_precision(ranks: list[dict[str, Any]]) -> None:
    expected = {
        "rows": "the backward of per_row reads codes of other scales",
        "emulated": "computes from the high-precision weight",
        "high": "computes from the high-precision weight",
        "shared": "another module has the same weight",
        "tied": "another module has the same weight",
        "ragged": "192 rows are no multiple of 2 ranks x 128",
        "uneven": "129 rows are no multiple of 2 ranks x 128",
        "fused": "its parts (256, 256) have a scale each",
        "frozen": "a frozen weight's delayed scale",
        "own": "delayed scales are not the same on all ranks",
        "plain": "quantizes no weight",
        "fine": "",
    }
    for found in ranks:
        reasons, sizes = found["refused"]["reasons"], found["refused"]["bytes"]
        assert reasons.keys() == expected.keys()
        for name, text in expected.items():
            assert text in reasons[name] and bool(text) == bool(reasons[name]), name
        assert sizes["fine"] == 512 * 128 + 4 * 4 and sizes["rows"] == 2 * 512 * 128
        assert found["refused"]["offloaded"] == ["it is offloaded to the CPU"] * 4
        assert "all-gather of fine: FP8 codes, 65552 bytes" in found["refused"]["text"]
    assert ranks[0]["refused"] == ranks[1]["refused"]


@pytest.mark.slow
def test_checkpoints_know_plain_tensors_alone(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["saved"] == {"coded": [True] * 4, "types": ["Tensor"], "equal": True, "local": True}


@pytest.mark.slow
def test_a_sampler_in_process_computes_from_the_gathered_codes(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["sample"] == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_model_without_memory_is_sharded_and_then_filled(two: list[dict[str, Any]]) -> None:
    assert all(found["meta"] for found in two)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="all_gather_dtype must be 'fp8' or None, got 'bf16'"):
        shard(torch.nn.Linear(8, 8), Mesh.single(), all_gather_dtype="bf16")  # type: ignore[arg-type]


def test_one_process_gathers_nothing() -> None:
    assert shard(torch.nn.Linear(8, 8), Mesh.single(), all_gather_dtype="fp8").gathers == ()


def test_other_rows_at_a_freed_address_are_other_rows() -> None:
    """Parameters one after the other over the same memory, as an allocator gives a freed address again."""
    recipe, memory = get_recipe("blockwise"), bytearray(16 * 1024 * 4)
    source = GatheredWeight((16,), recipe, lambda weight: None)
    state, addresses = None, set()
    for _ in range(50):
        parameter = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(16, 1024))
        source._sharded = SimpleNamespace(_local_tensor=parameter.data, _version=0, requires_grad=False)
        addresses.add(parameter.data_ptr())
        old, state = state, source.shard_state()
        assert state != old and state == source.shard_state()
        source._sharded = parameter = None  # type: ignore[assignment]
    assert len(addresses) == 1
