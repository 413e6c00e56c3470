"""all_gather_dtype="fp8" on 2 and 4 ranks: bits of one process, a quantization a step, half the bytes, nothing held."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import nn
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.errors import ConfigError, RecipeError, StaleCodesError
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.ops.quantize.many import reference as many_reference
from octavo.parallel import gathered, shard
from octavo.parallel.sharded_weight import ShardedWeight
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import make_batch
from octavo.train.step import summed_loss
from tests.ranks import run_ranks

RECIPES = ("blockwise", "tensorwise", "delayed")
KINDS: dict[str, dict[str, Any] | None] = {  # how the layers run, and are compiled
    "eager": None,
    "recomputed": None,
    "compiled": {"backend": "aot_eager", "fullgraph": True},
    "inductor": {"backend": "inductor"},
}
TOKENS = 24
ALL = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
# what of a Decoder's layer is gathered as codes: under one scale a tensor a fused weight has one a part
CODED = {"blockwise": ALL, "tensorwise": (ALL[1], ALL[3]), "delayed by step": (ALL[1], ALL[3])}


class Block(torch.nn.Module):
    """A foreign layer: a norm and two linears, of whole blocks on so many ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(size)
        self.up, self.down = torch.nn.Linear(size, 2 * size, bias=False), torch.nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    """Two of them; activations are computed again in the backward where that is asked for."""

    def __init__(self, size: int, recompute: bool = False) -> None:
        super().__init__()
        self.layers, self.recompute = torch.nn.ModuleList([Block(size), Block(size)]), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def recipe_of(name: str) -> Recipe:
    return get_recipe("delayed", update_every="step") if name == "delayed by step" else get_recipe(name)


def make_stack(recipe: str, mesh: Mesh, recompute: bool = False) -> Stack:
    """Under one recipe, or "mixed": blockwise, but for the last layer's, delayed and tensorwise."""
    torch.manual_seed(0)
    model = Stack(256, recompute).bfloat16()
    nn.convert(model, recipe_of("blockwise" if recipe == "mixed" else recipe))
    if recipe == "mixed":
        model.layers[1].up.set_recipe(get_recipe("delayed"))  # type: ignore[union-attr, operator]
        model.layers[1].down.set_recipe(get_recipe("tensorwise"))  # type: ignore[union-attr, operator]
    return model


def make_decoder(recipe: str, mesh: Mesh, dtype: torch.dtype = torch.bfloat16, exact: bool = False) -> Decoder:
    size = 128 * mesh.world_size  # q: size rows, k and v: 128 * ranks / 2 each, so that a rank has whole blocks
    heads = {"num_heads": mesh.world_size, "num_kv_heads": mesh.world_size // 2, "head_dim": 128}
    config = ModelConfig(
        "llama", 96, size, size, num_layers=2, **heads, max_position_embeddings=64, tie_word_embeddings=False
    )
    model = Decoder(config, seed=0).to(dtype)
    model.set_numerics(Numerics(recipe_of(recipe), kv_cache_dtype="fp8" if exact else "bf16", exact=exact))
    return model


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def held_bytes(model: torch.nn.Module) -> int:
    return sum(m.source.held_bytes() for m in model.modules() if isinstance(m, nn.Linear))


def draw(step: int, rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


@contextmanager
def wire() -> Iterator[list[int]]:
    """Bytes that each all-gather within takes of this rank."""
    sizes: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # since torch 2.13
    run = getattr(dist, name)

    def counted(*tensors: torch.Tensor, **named: Any) -> Any:
        sizes.append((named.get("input_tensor") if len(tensors) < 2 else tensors[1]).nbytes)  # type: ignore[union-attr]
        return run(*tensors, **named)

    with mock.patch.object(dist, name, counted):
        yield sizes


@contextmanager
def casts() -> Iterator[list[torch.Size]]:
    """Shapes that sharded weights quantize within."""
    shapes: list[torch.Size] = []
    run = many_reference.quantize_one

    def counted(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        shapes.append(x.shape)
        return run(x, *rest, **named)

    with mock.patch.object(many_reference, "quantize_one", counted):
        yield shapes


# Jobs


def against_one_process(recipe: str, mesh: Mesh) -> dict[str, Any]:
    """A Decoder with masters: three steps of two micro-batches a rank, gradients added in order."""

    def train(model: Decoder, share: range) -> list[Any]:
        optimizer, losses, grads = MasterAdamW(model, OptimizerSection(lr=0.01)), [], []
        for step in range(3):
            for index in share:
                ids = torch.randint(0, 96, (TOKENS + 1,), generator=torch.Generator().manual_seed(50 * step + index))
                loss = summed_loss(model, make_batch([ids.numpy()], None)) / 100
                loss.backward()
                optimizer.accumulate_gradients()
                losses.append(loss.item())
            masters = optimizer._update._masters  # type: ignore[union-attr]
            grads.append([whole(master.grad) for master in masters.values()])
            optimizer.step()
        return [losses, grads, [whole(master) for master in masters.values()]]

    num = 2 * mesh.world_size
    losses, grads, masters = train(make_decoder(recipe, mesh), range(num))
    model = make_decoder(recipe, mesh, torch.float32)
    report = shard(model, mesh, reduction="ordered", param_dtype=torch.bfloat16, all_gather_dtype="fp8")
    share = mesh.own_share(num)
    own_losses, own_grads, own_masters = train(model, share)
    pairs = [
        *zip(itertools.chain(*grads), itertools.chain(*own_grads), strict=True),
        *zip(masters, own_masters, strict=True),
    ]
    return {
        "losses": own_losses == [losses[step * num + i] for step in range(3) for i in share],
        "differing": sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs),
        "coded": [line.name for line in report.gathers if not line.reason],
        "held": held_bytes(model),
    }


def evaluations(recipe: str, mesh: Mesh) -> list[bool]:
    """Outputs without gradients before, between and after steps, and the steps: whether they are a bf16 gather's."""
    results = []
    for asked in (None, "fp8"):
        model = make_stack(recipe, mesh)
        shard(model, mesh, reduction="sum", all_gather_dtype=asked)  # type: ignore[arg-type]
        with torch.no_grad():
            found = [model(draw(0, 0))]
        for mode in (torch.inference_mode, torch.no_grad):
            found += train_stack(model, mesh, steps=2)
            model.eval()
            with mode():
                found.append(model(draw(0, 0)).clone())
            model.train()
        results.append(found)
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


def train_stack(model: torch.nn.Module, mesh: Mesh, steps: int = 3, micro_batches: int = 1) -> list[torch.Tensor]:
    """Losses, gradients and weights of some steps, bf16 gradients."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)  # type: ignore[operator]
            loss = loss_of(model, draw(step, mesh.rank + 8 * i))
            loss.backward()
            found.append(loss.detach())
        found += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    scales = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("fp8_quant_scale")]
    return found + [whole(p) for p in model.parameters()] + scales


def against_bf16(recipe: str, mesh: Mesh, kinds: Collection[str] = tuple(KINDS)) -> dict[str, Any]:
    """The same training with bf16 on the wire: bits, bytes, casts; compiled, recomputed, over micro-batches too."""
    found: dict[str, Any] = {}
    sizes: dict[Any, list[int]] = {}
    for name in kinds:
        results, options = [], KINDS[name]
        for asked in (None, "fp8"):
            torch._dynamo.reset()
            model = make_stack(recipe, mesh, name == "recomputed")
            shard(model, mesh, reduction="sum", all_gather_dtype=asked)  # type: ignore[arg-type]
            if options is not None:
                for layer in model.layers:
                    layer.compile(**options)
            inside: list[int] = []  # bytes of a whole weight in its forward
            model.layers[0].down.register_forward_pre_hook(  # type: ignore[union-attr, operator]
                lambda module, _, inside=inside: inside.append(module.weight.untyped_storage().size())
            )
            with wire() as sizes[name, asked], casts() as shapes:
                results.append(train_stack(model, mesh))
        found[name] = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        found[f"casts {name}"] = len(shapes)
        found[f"held {name}"] = [held_bytes(model), *inside]
    norms = 2 * (256 + 256) // mesh.world_size  # norm and bias of a layer, in bf16 on both wires
    found["bytes"] = [sum(sizes["eager", asked]) - norms * len(sizes["eager", asked]) for asked in ("fp8", None)]
    found["counts"] = [len(sizes["eager", asked]) for asked in ("fp8", None)]
    with casts() as shapes:
        model = make_stack(recipe, mesh)
        shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
        train_stack(model, mesh, steps=2, micro_batches=3)
    found["casts of micro-batches"] = len(shapes)
    return found


def accumulation(mesh: Mesh) -> list[bool]:
    """Micro-batches without a reduction, under scales that hold for a step: whether they are those of a bf16 gather."""
    found = []
    for recipe in ("blockwise", "tensorwise", "delayed by step"):
        results = []
        for asked in (None, "fp8"):
            model = make_stack(recipe, mesh)
            shard(model, mesh, reduction="sum", all_gather_dtype=asked)  # type: ignore[arg-type]
            results.append(train_stack(model, mesh, steps=3, micro_batches=3))
        found.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return found


def memory(recipe: str, mesh: Mesh) -> dict[str, Any]:
    """Bytes of 8-bit tensors that a compiled layer's backward waits for, and of parameters and codes while whole."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_stack(recipe, mesh)
    shard(model, mesh, reduction="sum", all_gather_dtype="fp8")
    for layer in model.layers:
        layer.compile(backend="inductor", fullgraph=True)
    saved: list[torch.Tensor] = []
    train_stack(model, mesh, steps=3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_of(model, draw(0, 0))
    return {
        "saved": [t.untyped_storage().size() for t in saved if t.element_size() == 1],
        "recompiles": dict(torch._dynamo.utils.counters["recompiles"]),
    }


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

    def unnoticed(model: torch.nn.Module) -> None:
        halve(lambda p: p.to_local().data)(model)
        try:
            model(draw(0, 0))
            found["seen"] = "nothing"
        except StaleCodesError as error:
            found["seen"] = str(error)
        nn.mark_weights_updated(model)

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
        "one": {"blockwise": against_one_process("blockwise", mesh)},
        "eager": against_bf16("mixed", mesh, ("eager",)),
    }
    found |= {
        "evaluations": evaluations("mixed", mesh),
        "noticed": noticed(mesh),
        "scales": scales_of_a_step(mesh),
        "broken": broken(mesh),
        "refused": refused(mesh),
    }
    mesh.close()
    return found


def slow_job(rank: int, folder: str) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(), "cpu")
    found: dict[str, Any] = {"one": {recipe: against_one_process(recipe, mesh) for recipe in CODED}}
    found["accumulation"] = accumulation(mesh)
    if mesh.world_size == 4:
        hsdp = Mesh.of_process_group(2, 2, "cpu")
        found["hsdp"] = {recipe: against_one_process(recipe, hsdp) for recipe in CODED}
    else:
        found["bf16"] = {recipe: against_bf16(recipe, mesh) for recipe in RECIPES}
        found["memory"] = {recipe: memory(recipe, mesh) for recipe in RECIPES}
        found["saved"], found["sample"], found["meta"] = saved(mesh, folder), sample(mesh), meta(mesh)
    mesh.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(fast_job, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    job = functools.partial(slow_job, folder=str(tmp_path_factory.mktemp("checkpoint")))
    return run_ranks(job, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(functools.partial(slow_job, folder=""), 4, tmp_path_factory.mktemp("four"))


def check_one(found: dict[str, Any], coded: tuple[str, ...]) -> None:
    names = [f"layers.{i}.{name}" for i in range(2) for name in coded]
    assert found == {"losses": True, "differing": 0, "coded": names, "held": 0}


def test_training_has_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        check_one(found["one"]["blockwise"], CODED["blockwise"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CODED)
def test_so_it_has_on_four_ranks_and_with_replicas(
    recipe: str, two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    for found in (*two, *four):
        check_one(found["one"][recipe], CODED[recipe])
    for found in four:
        check_one(found["hsdp"][recipe], CODED[recipe])


def check_against_bf16(found: dict[str, Any], recipe: str, kind: str) -> None:
    assert found[kind] and all(found[kind])
    assert found[f"held {kind}"] == [0] * (7 if kind == "recomputed" else 4)  # forwards of three steps
    assert found[f"casts {kind}"] == 24  # 4 weights in 3 steps, gathered twice a step


def check_bytes(found: dict[str, Any], limit: float) -> None:
    coded, plain = found["bytes"]
    assert 0 < coded <= limit * plain
    assert found["counts"] == [12, 12]  # two layers, three steps, forward and backward


def test_mixed_recipes_have_the_bits_of_a_gather_in_bf16(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        check_against_bf16(found["eager"], "mixed", "eager")
        check_bytes(found["eager"], 0.501)


def test_evaluations_beside_training_have_the_bits_of_a_gather_in_bf16(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["evaluations"] and all(found["evaluations"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "recomputed", "compiled", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_has_the_bits_of_a_gather_in_bf16(recipe: str, kind: str, two: list[dict[str, Any]]) -> None:
    """Delayed scaling's scales too. A rank quantizes its rows at each gather, and half the bytes travel."""
    for found in two:
        check_against_bf16(found["bf16"][recipe], recipe, kind)
        check_bytes(found["bf16"][recipe], 0.501)
        # 4 weights in 2 steps of 3 micro-batches, each gathered twice; one scale a step
        assert found["bf16"][recipe]["casts of micro-batches"] == 48


@pytest.mark.slow
def test_micro_batches_without_a_reduction(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    for found in (*two, *four):
        assert found["accumulation"] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_hold_nothing_whole(recipe: str, two: list[dict[str, Any]]) -> None:
    """Between forward and backward what the graph saved has no memory, and the parameter never has any."""
    for found in two:
        assert found["memory"][recipe] == {"saved": [0] * 4, "recompiles": {}}


def test_writes_are_noticed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        states, seen = found["noticed"].pop("states"), found["noticed"].pop("seen")
        assert set(states) == {"Tensor"} and "mark_weights_updated" in seen
        assert len(found["noticed"]) == 14 and all(found["noticed"].values()), found["noticed"]


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
