"""Layers under torch.compile (no break, no recompilation), CUDA graphs, accumulation and DistributedDataParallel."""

import copy

import pytest
import torch

import octavo
from octavo import nn
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_all_bitwise, assert_all_sqnr
from tests.ranks import run_group
from tests.recipes import FP8_RECIPES as RECIPES


def build(recipe, device="cpu"):
    torch.manual_seed(0)
    layer = nn.TransformerLayer(256, 384, 4, 2).to(device)
    octavo.convert(layer, recipe)
    return layer


def train(layer, call, steps, generator, device):
    """Plain SGD on fresh inputs; the outputs of every step and the last gradients."""
    outputs = []
    for _ in range(steps):
        x = torch.randn(2, 64, 256, generator=generator).to(device, torch.bfloat16)
        layer.zero_grad()
        out = call(x)
        out.float().square().mean().backward()
        outputs.append(out.detach().clone())
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
    return outputs, [p.grad.clone() for p in layer.parameters()]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(r, marks=pytest.mark.slow if r in ("delayed", "blockwise") else pytest.mark.largest)
        for r in ("bf16", *RECIPES)
    ],
)
def test_a_layer_compiles_whole_and_once(recipe, device):
    torch._dynamo.reset()
    eager, compiled = build(recipe, device), build(recipe, device)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    wanted, wanted_grads = train(eager, eager, 6, torch.Generator().manual_seed(1), device)
    generator = torch.Generator().manual_seed(1)
    found, _ = train(compiled, call, 3, generator, device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        more, found_grads = train(compiled, call, 3, generator, device)
    assert_all_sqnr([*found, *more], wanted, 30.0)
    assert_all_sqnr(found_grads, wanted_grads, 25.0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_compiled_checkpoints_replay_the_codes_of_the_forward(recipe, is_inside, generator):
    """Steps have the bits of those without a checkpoint; inside compiled code nothing between the linears is saved."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(*(nn.Linear(128, width, bias=False) for width in (128, 128))).bfloat16()
    octavo.convert(model, recipe)
    eager, saved = copy.deepcopy(model), []
    options = {"use_reentrant": False} | ({"context_fn": nn.recompute_all} if is_inside else {})

    def checkpointed(x, run=model):
        return torch.utils.checkpoint.checkpoint(run, x, **options)

    compiled = torch.compile(checkpointed if is_inside else model, fullgraph=True)
    call = compiled if is_inside else lambda x: checkpointed(x, compiled)
    for step in range(3):
        x = (torch.randn(64, 128, generator=generator) * (step + 1)).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            out = call(x)
        grad = torch.randn(out.shape, generator=generator).bfloat16()
        found = torch.autograd.grad(out, [x, *model.parameters()], grad)
        assert_all_bitwise(found, torch.autograd.grad(eager(x), [x, *eager.parameters()], grad))
        assert_all_bitwise(model.buffers(), eager.buffers())
        with torch.no_grad():
            for parameter in (*model.parameters(), *eager.parameters()):
                parameter *= 1.1
    if is_inside:
        given = [x, *model.parameters(), *model.buffers()]
        assert sum(saved) <= 3 * (sum(tensor.nbytes for tensor in given) + 1024)  # of scales


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_graphed_layer_equals_eager(recipe):
    eager, graphed = build(recipe, "cuda"), build(recipe, "cuda")
    sample = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    call = torch.cuda.make_graphed_callables(graphed, (sample,))
    if recipe == "delayed":  # the warm-up of the capture has staged amaxes
        graphed.load_state_dict(build(recipe, "cuda").state_dict())
        for name, buffer in graphed.named_buffers():
            buffer.fill_(1.0 if "scale" in name else 0.0)
    wanted, wanted_grads = train(eager, eager, 5, torch.Generator().manual_seed(1), "cuda")
    found, found_grads = train(graphed, call, 5, torch.Generator().manual_seed(1), "cuda")
    assert_all_sqnr([*found, *found_grads], [*wanted, *wanted_grads], 30.0)  # cuDNN's backward adds in no fixed order
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulation_adds_the_gradients_of_micro_batches(recipe, generator, device):
    layer, alone = build(recipe, device), build(recipe, device)
    batches = [torch.randn(2, 64, 256, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
    singles = []
    for x in batches:
        layer(x).float().square().mean().backward()
        alone.zero_grad()
        alone(x).float().square().mean().backward()
        singles.append([p.grad.clone() for p in alone.parameters()])
    for parameter, parts in zip(layer.parameters(), zip(*singles, strict=True), strict=True):
        assert_sqnr(parameter.grad, sum(part.float() for part in parts), 40.0)  # autograd adds in bf16


DDP_RECIPES = ("tensorwise", "blockwise", "delayed")


def _rank(rank, world_size):
    results = {}
    for recipe in DDP_RECIPES:
        layer = torch.nn.parallel.DistributedDataParallel(build(recipe), broadcast_buffers=False)
        x = torch.randn(world_size, 2, 64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
        for _ in range(2):
            layer.zero_grad()
            layer(x[rank]).float().square().mean().backward()
        gradients = [p.grad.float() for p in layer.module.parameters()]
        results[recipe] = (gradients, dict(layer.module.named_buffers()))
    return results


@pytest.fixture(scope="module")
def ddp():
    """What each of two ranks ends with under each recipe: gradients and buffers."""
    ranks = run_group(_rank, 2)
    return {recipe: [rank[recipe] for rank in ranks] for recipe in DDP_RECIPES}


def run_alone(recipe, steps):
    """Two layers that see one rank's batch each, in this process."""
    layers = [build(recipe), build(recipe)]
    x = torch.randn(2, 2, 64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for layer, part in zip(layers, x, strict=True):
        for _ in range(steps):
            layer.zero_grad()
            layer(part).float().square().mean().backward()
    return layers


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_ddp_averages_what_one_process_computes(recipe, ddp):
    ranks = ddp[recipe]
    for index, (a, b) in enumerate(zip(*(layer.parameters() for layer in run_alone(recipe, 2)), strict=True)):
        mean = (a.grad / 2 + b.grad / 2).float()  # DDP divides, then adds, in the gradient's dtype
        for gradients, _ in ranks:
            assert_bitwise(gradients[index], mean)


@pytest.mark.slow
def test_ddp_makes_delayed_scales_of_all_ranks_amaxes(ddp):
    (grads, buffers), (other_grads, other_buffers) = ddp["delayed"]
    alone = [dict(layer.named_buffers()) for layer in run_alone("delayed", 1)]
    for name, buffer in buffers.items():
        if "scale" in name:
            assert_bitwise(other_buffers[name], buffer, name)
        else:  # the first step's amaxes, rolled to the last row at the second
            assert_bitwise(buffer[-1], torch.maximum(*(own[name][0] for own in alone)), name)
    assert_all_bitwise(grads, other_grads)
