"""Megatron-Core's GPT over tensor-parallel ranks: octavo's spec against Megatron's own local one in bf16."""

import importlib.metadata
import os
from typing import Any

import torch
from torch.nn import functional

from bench.speed.trainers.variants import MODEL, SIZES, TIMED_STEPS, TOY, WARM_UP_STEPS, Step, TrainersSession, Variants
from bench.speed.variants import attention_backend


def megatron(session: TrainersSession) -> None:
    """bf16, then each recipe."""
    from megatron.core import parallel_state

    num_ranks, queues = session.mesh.world_size, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    session.describe(
        f"megatron: a step of GPTModel of Megatron-Core {importlib.metadata.version('megatron-core')} (RMSNorm, "
        f"SwiGLU, RoPE, GQA 32:8, untied head), {MODEL}, 2 x 8192 random tokens in all, {num_ranks} tensor-parallel "
        f"ranks with sequence parallelism, CUDA_DEVICE_MAX_CONNECTIONS {queues}, Megatron's DDP with fp32 gradients "
        "and its own optimizer (torch's AdamW on fp32 masters), no clipping. bf16 is Megatron's local spec with two of "
        "octavo's modules, as all variants have: attention by torch's kernels (cuDNN's), where its own makes the "
        "whole of the scores, and norms, where its own refuse sequence parallelism. The others are octavo's "
        "gpt_block_spec. No torch.compile but Megatron's own, of SwiGLU and of bias and dropout. The head is in bf16. "
        f"Median of {TIMED_STEPS} steps after {WARM_UP_STEPS}, each waited for."
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks)
    variants = Variants(session, "megatron")
    for recipe in ("bf16", *session.recipes):
        variants.run(recipe, lambda _, name=recipe: _build(session, name))  # type: ignore[misc]
    parallel_state.destroy_model_parallel()


def _build(session: TrainersSession, recipe: str) -> Step:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    from octavo.integrations.megatron import gpt_block_spec

    sizes, config = TOY if session.is_toy else SIZES, _config(session)
    spec = _local_spec(config) if recipe == "bf16" else gpt_block_spec(config, recipe)
    torch.manual_seed(0)  # of weights on a CPU
    model_parallel_cuda_manual_seed(0)  # on GPUs
    model = GPTModel(
        config,
        spec,
        sizes["vocab_size"],
        sizes["max_position_embeddings"],
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    model = model.to(session.device)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, options, Float16Module(config, model))
    given = OptimizerConfig(lr=1e-5, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0)
    optimizer = get_megatron_optimizer(given, [ddp])
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    ids = session.tokens(2, 8192, sizes["vocab_size"])
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def step() -> torch.Tensor:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        with attention_backend(session.kind):
            loss: torch.Tensor = ddp(ids, positions, None, labels=ids.roll(-1, 1)).float().mean()
            loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        return loss.detach()

    return step


def _config(session: TrainersSession) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes, on_cpu = TOY if session.is_toy else SIZES, session.kind == "cpu"
    return TransformerConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["hidden_size"] // sizes["num_attention_heads"],
        normalization="RMSNorm",
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=not on_cpu,
        bias_dropout_fusion=not on_cpu,
        tensor_model_parallel_size=session.mesh.world_size,
        sequence_parallel=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=on_cpu,
    )


def _local_spec(config: Any) -> Any:
    """Megatron's own layers and linears, with octavo's attention and norms."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from octavo.integrations.megatron import OctavoDotProductAttention, OctavoNorm

    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = OctavoNorm
    parts.self_attention.submodules.core_attention = OctavoDotProductAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=OctavoNorm)
