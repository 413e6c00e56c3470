"""FSDP2 over two processes: after a reshard no rank keeps whole FP8 codes or uses old ones; the bits are of one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo import nn
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, get_recipe
from tests.ranks import run_group

pytestmark = pytest.mark.slow
RECIPES = ("delayed", "rowwise", "blockwise")
LENGTHS = [40, 24]


def make(recipe: str, exact: bool = False) -> Decoder:
    config = ModelConfig("llama", 128, 128, 256, 2, 2, 1, 64, max_position_embeddings=256)
    model = Decoder(config, seed=0)
    model.set_numerics(Numerics(get_recipe(recipe), kv_cache_dtype="fp8" if exact else "bf16", exact=exact))
    return model


def sequences(rank: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 128, (length,), generator=generator).tolist() for length in LENGTHS]


def shard(model: Decoder) -> Decoder:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model


def held_bytes(model: torch.nn.Module) -> int:
    return sum(m.source.held_bytes() for m in model.modules() if isinstance(m, nn.Linear))


def loss_of(model: Decoder, rank: int) -> torch.Tensor:
    """Through the model's own forward, as a trainer calls it."""
    flat = torch.tensor([token for ids in sequences(rank) for token in ids])
    context = nn.PackedContext.from_lengths(LENGTHS, model.numerics, model.device, model.kv_table)
    return model(flat, context).float().square().mean()


def train_twice(recipe: str, rank: int) -> dict[str, Any]:
    """Two steps, sharded; and in one process the ranks' micro-batches one after the other."""
    whole, sharded = make(recipe), shard(make(recipe))
    found: dict[str, Any] = {"held": [], "equal_losses": [], "equal_gradients": [], "equal_scales": []}
    for _ in range(2):
        expected = []
        for other in range(dist.get_world_size()):
            loss = loss_of(whole, other)
            loss.backward()
            expected.append(loss.item())
        loss = loss_of(sharded, rank)
        found["held"].append(held_bytes(sharded))
        loss.backward()
        found["held"].append(held_bytes(sharded))
        if recipe != "delayed":  # whose scales see both ranks' batches at once
            found["equal_losses"].append(loss.item() == expected[rank])
            for mine, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
                if theirs.grad is not None:  # lm_head is not in this loss
                    found["equal_gradients"].append(torch.equal(mine.grad.full_tensor(), theirs.grad))
        scales = [b for n, b in sharded.named_buffers() if n.endswith("fp8_quant_scale")]
        found["equal_scales"] += [_is_everywhere(scale) for scale in scales]
        with torch.no_grad():  # an optimizer that tells no one: no hook of torch's runs
            for model in (whole, sharded):
                for parameter in model.parameters():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.data.mul_(0.5)
                    parameter.grad = None
        whole.mark_weights_updated()
    return found


def _is_everywhere(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    return all(torch.equal(copy, tensor) for copy in copies)


def count_collectives(rank: int) -> dict[str, list[Any]]:
    """Of three linears under delayed scaling: all-reduces of each of three steps, then the scales after them."""
    found: dict[str, list[Any]] = {}
    bucketed = {"options": {"bucket_all_reduces_fx": "all"}}  # of inductor's
    options = {"eager": None, "compiled": {"backend": "aot_eager"}, "bucketed": bucketed}
    for name, asked in options.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(3))).bfloat16()
        nn.convert(model, "delayed")
        step = model if asked is None else torch.compile(model, fullgraph=True, **asked)
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(rank)).bfloat16()
        found[name] = []
        for _ in range(3):
            with torch.profiler.profile() as profile:
                step(x).float().square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()  # eager code keeps no codes of the last scale either
            found[name].append(sum(event.name == "gloo:all_reduce" for event in profile.events()))
        found[name].append([layer.fp8_quant_scale.tolist() for layer in model])
    return found


def groups(rank: int) -> list[bool]:
    """Whether scales are alike on both ranks: under a group of each rank's own, by both ways to name it, and none."""
    own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    found = []
    for named in ("model", "autocast", "none"):
        model = make("delayed")
        if named == "model":
            nn.set_amax_reduction_group(model, own)
        recipe = model.numerics.recipe
        with octavo.autocast(recipe=recipe, amax_reduction_group=own if named == "autocast" else None):
            for _ in range(2):
                loss_of(model, rank).backward()
        found.append(_is_everywhere(model.layers[0].mlp.down_proj.fp8_quant_scale))
    return found


def sample(rank: int) -> dict[str, Any]:
    """A sharded exact policy generates in process, is trained, and generates again."""
    model = shard(make("blockwise", exact=True))
    llm = octavo.LLM(model, max_num_seqs=4, num_kv_pages=16, seed=0)
    params = octavo.SamplingParams(temperature=1.0, max_tokens=5 + rank, ignore_eos=True, logprobs=0)
    found: dict[str, Any] = {"difference": [], "held": [], "tokens": []}
    for _ in range(2):
        outputs = llm.generate(sequences(rank), params)  # each rank its own prompts, and another number of steps
        found["held"].append(held_bytes(model))
        found["is_sharded"] = all(hasattr(p, "placements") for p in model.parameters())
        loss_of(model, rank)  # a root that has run once gathers lazily
        for prompt, output in zip(sequences(rank), outputs, strict=True):
            answer = output.outputs[0]
            from octavo.parallel.gather import gathered

            with torch.no_grad(), gathered(model):
                (scored,) = octavo.sequence_logprobs(model, [prompt + answer.token_ids], prompt_lens=[len(prompt)])
            sampled = [step[t].logprob for step, t in zip(answer.logprobs, answer.token_ids, strict=True)]
            found["difference"].append((scored - torch.tensor(sampled)).abs().max().item())
            found["tokens"].append(answer.token_ids)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(0.75)
        model.mark_weights_updated()
    found["cached"] = []
    for _ in range(2):  # weights written without a call
        found["cached"].append(llm.generate([list(range(100))], params)[0].num_cached_tokens)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(0.75)
    return found


def autocast_holds_nothing(rank: int) -> int:
    """torch's own linears under octavo.autocast, whose parameters no hook tells of."""
    from torch.distributed.fsdp import fully_shard

    from octavo.nn.weights.plain import _sources

    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)).bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for recipe in ("blockwise", "delayed"):
        with octavo.autocast(recipe=recipe):
            model(torch.ones(16, 128, dtype=torch.bfloat16)).square().mean().backward()
    linears = [held for module in model.modules() for held in vars(module).get("_octavo_fp8", {}).values()]
    return len(_sources) + sum(linear.source.held_bytes() for linear in linears)


def compile_and_shard(rank: int) -> list[Any]:
    """octavo.convert, torch.compile by layer and fully_shard: the bits of eager, sharded or not, and bytes held."""
    from torch.distributed.fsdp import fully_shard

    found: list[Any] = []
    for recipe in ("rowwise", "delayed"):
        models = []
        for kind in ("plain", "eager", "compiled"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(2))).bfloat16()
            nn.convert(model, recipe)
            for layer in model:
                if kind == "compiled":
                    layer.compile(backend="aot_eager")
                if kind != "plain":
                    fully_shard(layer)
            if kind != "plain":
                fully_shard(model)
            models.append(model)
        for _ in range(2):
            x = torch.randn(16, 128, generator=torch.Generator().manual_seed(5)).bfloat16()  # the same on both ranks
            for model in models:
                # new weights: without, a weight that stays keeps the codes of delayed scaling's last scale
                torch.optim.SGD(model.parameters(), lr=0.01).step()
                model.zero_grad()
                model(x).float().square().mean().backward()
        plain, eager, compiled = (
            [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            for model in models
        )
        found += [torch.equal(a, b) for a, b in (*zip(plain, eager, strict=True), *zip(eager, compiled, strict=True))]
        found += [held_bytes(model) for model in models[1:]]
    return found


class Block(torch.nn.Module):
    """A norm, a gated activation and their linears, the inputs of which torch.compile can make again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(torch.nn.functional.rms_norm(x, (128,))).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def partitioned(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """inductor chooses what is saved, and torch runs the rest: its own code takes a compiler of C++ seconds."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, inner_compile=lambda inner, *_, **__: make_boxed_func(inner.forward))


def saved_for_backward(rank: int) -> dict[str, list[Any]]:
    """By recipe: FP8 bytes that a compiled, sharded block saves for its backward, then whether its gradients are those
    of the same block compiled and not sharded, which saves codes."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, list[Any]] = {}
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).bfloat16()  # the same on both ranks
    for recipe in ("rowwise", "delayed"):
        found[recipe], gradients = [], []
        for is_sharded in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            block = Block().bfloat16()
            nn.convert(block, recipe)
            block.compile(backend=partitioned)
            if is_sharded:
                fully_shard(block)
            saved: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                out = block(x)
            found[recipe].append(sum(t.numel() for t in saved if t.dtype == torch.float8_e4m3fn))
            out.float().square().mean().backward()
            gradients.append([p.grad.full_tensor() if is_sharded else p.grad for p in block.parameters()])
        found[recipe] += [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]
    return found


def run(rank: int, _: int) -> dict[str, Any]:
    found: dict[str, Any] = {recipe: train_twice(recipe, rank) for recipe in RECIPES}
    found["collectives"] = count_collectives(rank)
    found["groups"] = groups(rank)
    found["sample"] = sample(rank)
    found["compiled"] = compile_and_shard(rank)
    found["autocast"] = autocast_holds_nothing(rank)
    found["saved"] = saved_for_backward(rank)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_group(run, 2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_codes_are_held_after_a_reshard(recipe: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found[recipe]["held"] == [0, 0, 0, 0]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_the_bits_are_those_of_one_process(recipe: str, ranks: list[dict[str, Any]]) -> None:
    """Also after weights were written behind every hook and counter: a gathered weight is always quantized again."""
    for found in ranks:
        assert found[recipe]["equal_losses"] == [True, True]
        assert found[recipe]["equal_gradients"] and all(found[recipe]["equal_gradients"])


def test_delayed_scaling_agrees_in_one_collective_a_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["delayed"]["equal_scales"] and all(found["delayed"]["equal_scales"])
        assert found["collectives"]["eager"][:3] == [1, 1, 1]  # convert has made the linears known to each other


def test_compiled_delayed_scaling_agrees_linear_by_linear_or_in_one_bucket(ranks: list[dict[str, Any]]) -> None:
    """A graph has a collective for each linear in it, which torch.compile makes one of where its option asks for it."""
    for found in ranks:
        counts, scales = ({name: of[part] for name, of in found["collectives"].items()} for part in (2, 3))
        assert counts == {"eager": 1, "compiled": 3, "bucketed": 1}
        assert scales["eager"] == scales["compiled"] == scales["bucketed"]
    assert ranks[0]["collectives"] == ranks[1]["collectives"]


def test_delayed_scaling_agrees_within_the_named_group(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["groups"] == [False, False, True]


def test_a_sharded_policy_samples_in_process_with_the_bits_that_it_trains(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sample"]["difference"] == [0.0] * 4
        assert found["sample"]["is_sharded"] and found["sample"]["held"] == [0, 0]
        assert found["sample"]["cached"] == [0, 0]
    assert ranks[0]["sample"]["tokens"][0] != ranks[1]["sample"]["tokens"][0][:5]


def test_compiled_layers_under_fsdp_have_the_bits_of_eager_ones(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["compiled"] == [True] * 4 + [0, 0] + [True] * 4 + [0, 0]


def test_compiled_and_sharded_linears_save_no_codes(ranks: list[dict[str, Any]]) -> None:
    """torch.compile cannot make FP8 codes again in the backward, but the inputs that they are made from."""
    for found in ranks:
        for recipe in ("rowwise", "delayed"):
            codes, none, *are_equal = found["saved"][recipe]
            assert (codes, none) == (64 * (128 + 128), 0) and are_equal == [True, True]
