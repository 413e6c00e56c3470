"""`ordered`: gradients that ranks add in order, against the same micro-batches on one GPU, in bits."""

import dataclasses

import torch

from bench.speed.scale.models import build, make_tokens, shape
from bench.speed.scale.session import Session
from octavo.distributed.mesh import Mesh
from octavo.distributed.shards import cut, local
from octavo.models import Decoder
from octavo.run.determinism import deterministic
from octavo.train.data import Batch
from octavo.train.step import summed_loss

NUM_LAYERS, NUM_TOKENS, NUM_OWN = 4, 2048, 2  # micro-batches of a rank: the second is added to a sum
COMPARED, DIFFERING = "numbers compared", "numbers that differ"
RECIPES = ("bf16", "blockwise")


def ordered(session: Session) -> None:
    """FSDP2, and replicas of shards where there are ranks enough for both."""
    num_ranks = session.mesh.world_size
    for recipe in RECIPES:
        for num_replicas in (1, 2) if num_ranks >= 4 else (1,):
            case = case_label(recipe, num_ranks, num_replicas)
            session.attempt(case, lambda c=case, r=recipe, n=num_replicas: _compare(session, c, r, n))  # type: ignore[misc]


def case_label(recipe: str, num_gpus: int, num_replicas: int) -> str:
    """A case's name in the record."""
    layout = "FSDP2" if num_replicas == 1 else f"HSDP {num_replicas} x {num_gpus // num_replicas}"
    return f"ordered gradients, Qwen3-8B ({NUM_LAYERS} layers), {recipe}: {num_gpus} GPUs, {layout}"


def _compare(session: Session, case: str, recipe: str, num_replicas: int) -> None:
    everyone = session.mesh
    config = shape(session, NUM_LAYERS)
    length = min(NUM_TOKENS, config.max_position_embeddings)
    batches = [make_tokens(config, 1, length, seed=i) for i in range(NUM_OWN * everyone.world_size)]
    with deterministic(True):
        model, _ = build(session, config, recipe)
        wanted = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
        losses = []
        for index in range(len(batches)):
            losses.append(_backward(model, batches, index))
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, "it trains"
                wanted[name] += parameter.grad.float()
                parameter.grad = None
        mesh = everyone
        if num_replicas > 1:
            mesh = Mesh.of_process_group(num_replicas, everyone.world_size // num_replicas, session.device)
        on_mesh = dataclasses.replace(session, mesh=mesh)
        sharding = {"reduction": "ordered", "param_dtype": torch.bfloat16}
        model, _ = build(on_mesh, config, recipe, dtype=torch.float32, **sharding)
        own = everyone.own_share(len(batches))
        found = [_backward(model, batches, index) for index in own]
    num_differing = sum(a != losses[index] for a, index in zip(found, own, strict=True))
    num_compared = len(found)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, "it trains"
        mine, one = (t.contiguous().view(torch.int32) for t in (local(parameter.grad), cut(wanted[name], parameter)))
        num_compared += mine.numel()
        num_differing += int((mine != one).sum())
    differing, compared = (sum(everyone.gather_objects(n)) for n in (num_differing, num_compared))
    session.record.add(case, COMPARED, "", compared)
    session.record.add(case, DIFFERING, "", differing)
    session.say(f"{case}: {differing:,} of {compared:,} numbers differ")
    if differing:
        session.complain(f"{case}: {differing} of {compared} losses and gradients differ from one GPU's")


def _backward(model: Decoder, batches: list[Batch], index: int) -> float:
    """The loss, of all micro-batches' targets, with gradients added."""
    loss = summed_loss(model, batches[index].to(model.device)) / sum(batch.num_targets for batch in batches)
    loss.backward()
    return float(loss.detach())
