"""accelerate's FSDP2 over the ranks, beside one GPU alone, which every rank runs for itself."""

import importlib.metadata
from typing import Any

import torch

from bench.speed.trainers.variants import (
    MODEL,
    TIMED_STEPS,
    WARM_UP_STEPS,
    Step,
    TrainersSession,
    Variants,
    compile_layers,
    make_llama,
    make_optimizer,
    optimizer_update,
    recipe_of_loops,
    training_step,
)


def accelerate(session: TrainersSession) -> None:
    """Each recipe on one GPU, then sharded over all of them with as many tokens a GPU."""
    session.describe(
        f"accelerate: a step under FSDP2 of accelerate {importlib.metadata.version('accelerate')} (each decoder layer "
        f"resharded after its forward, mixed_precision no), LlamaForCausalLM of transformers "
        f"{importlib.metadata.version('transformers')}, {MODEL}, 2 x 8192 random tokens a GPU, against the same loop "
        "on one GPU without accelerate, at the same time on each; as the tokens a GPU are the same, the ratio of the "
        "times is that of tokens/s to the ranks' times one GPU's. Each decoder layer under torch.compile, cuDNN's "
        "attention, torch's fused AdamW on bf16 parameters, no clipping, delayed with update_every='step', in all "
        f"alike. The head is in bf16. Median of {TIMED_STEPS} steps after {WARM_UP_STEPS}, each waited for."
    )
    variants, metric = Variants(session, "accelerate"), f"throughput over {session.mesh.world_size} x one GPU"
    for recipe in ("bf16", *session.recipes):
        alone = f"one GPU, {recipe}"
        variants.run(alone, lambda _, name=recipe: _build(session, name, False), "one GPU, bf16")  # type: ignore[misc]
        variants.run(f"FSDP2, {recipe}", lambda _, name=recipe: _build(session, name, True), alone, metric)  # type: ignore[misc]


def _build(session: TrainersSession, recipe: str, is_sharded: bool) -> Step:
    from octavo.integrations.huggingface import convert

    model = make_llama(session)
    if recipe != "bf16":
        convert(model, recipe_of_loops(recipe))
    compile_layers(session, model.train())
    ids = session.tokens(2, 8192, model.config.vocab_size, seed=1 + session.mesh.rank)
    if not is_sharded:
        return training_step(session, model, ids, torch.Tensor.backward, optimizer_update(make_optimizer(model)))
    accelerator = _make_accelerator(session)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    return training_step(session, model, ids, accelerator.backward, optimizer_update(optimizer))


def _make_accelerator(session: TrainersSession) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    on_cpu = session.kind == "cpu"
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=None if on_cpu else plugin, mixed_precision="no")
    if on_cpu:  # accelerate switches FSDP on for accelerators alone, but shards on a CPU all the same
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator
