"""Decoders in Qwen3-8B's shapes, alone or sharded: each rank draws whole weights one by one and keeps its rows."""

import dataclasses
from typing import Any

import torch

from bench.serve.shapes import QWEN3_8B, draw, make_toy
from bench.speed.scale.session import Session
from octavo.distributed.shards import cut, local
from octavo.models import Decoder, ModelConfig
from octavo.models.checkpoint.names import parameter_names
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.parallel import ShardReport, shard
from octavo.train.data import Batch, make_batch

SEQ_LEN, TOY_SEQ_LEN = 8192, 64


def seq_len(session: Session) -> int:
    """Tokens of a sequence."""
    return TOY_SEQ_LEN if session.is_toy else SEQ_LEN


def shape(session: Session, num_layers: int) -> ModelConfig:
    """Qwen3-8B with so many layers; a toy has two."""
    full = dataclasses.replace(QWEN3_8B, num_layers=num_layers)
    sized = make_toy(full) if session.is_toy else full
    return dataclasses.replace(sized, max_position_embeddings=seq_len(session))


def build(
    session: Session, config: ModelConfig, recipe: str | Recipe, *, dtype: torch.dtype = torch.bfloat16, **sharding: Any
) -> tuple[Decoder, ShardReport | None]:
    """A model to train: alone on each rank without `sharding`, else over all ranks, with the same values.

    Args:
        sharding: of octavo.parallel.shard, whose report comes second.
    """
    model = Decoder(config, dtype=dtype, device="meta")
    model.set_numerics(Numerics(get_recipe(recipe)))
    report = shard(model, session.mesh, **sharding) if sharding else None
    return materialize(model, session.device), report


def gathered_share(model: Decoder, report: ShardReport) -> float:
    """Bytes of the linears in one all-gather over those of bf16; lm_head is never quantized, and left out."""
    rows = [row for row in report.gathers if row.name != "lm_head"]
    weights = [model.get_parameter(f"{row.name}.weight") for row in rows]
    return sum(row.num_bytes for row in rows) / sum(2 * weight.numel() for weight in weights)


@torch.no_grad()
def materialize(model: Decoder, device: torch.device) -> Decoder:
    """Give a model on "meta" its values; of a sharded one each rank keeps its rows."""
    model.to_empty(device=device)
    for index, parameter in enumerate(parameter_names(model.config)):
        generator = torch.Generator(device).manual_seed(index)
        target = model.get_parameter(parameter.name)
        local(target).copy_(cut(draw(parameter, model.config.num_layers, generator, str(device)), target))
    model.mark_weights_updated()
    return model


def make_tokens(config: ModelConfig, num_seqs: int, length: int, seed: int) -> Batch:
    """Random sequences, every token but the first a target."""
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(config.vocab_size, (num_seqs, length + 1), generator=generator)
    return make_batch(list(windows.numpy()), None)
