"""A small GPT of Megatron-Core's with octavo's FP8 layers; run again after a kill, it goes on with the same bits.

    torchrun --standalone --nproc-per-node 2 examples/megatron/train.py --tensor 2 --recipe blockwise

What is octavo's has a comment. Megatron-LM's own script takes the same layers: docs/ecosystem/megatron.md.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from octavo.integrations.megatron import gpt_block_spec  # octavo's

VOCAB, HIDDEN, SEQ, BATCH = 64, 256, 64, 8


def build(args: argparse.Namespace) -> tuple[DistributedDataParallel, Any]:
    """The model and its optimizer."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor,
        sequence_parallel=args.tensor > 1,
        use_cpu_initialization=True,
    )
    spec = gpt_block_spec(config, args.recipe)  # octavo's, in place of get_gpt_decoder_block_spec(config, ...)
    model = GPTModel(config, spec, VOCAB, SEQ, parallel_output=False).to(torch.cuda.current_device())
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    return ddp, get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), [ddp])


def batch(step: int) -> torch.Tensor:
    """Token ids [BATCH, SEQ + 1] of a data-parallel rank: each token is the last one plus 1 or 2."""
    source = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    ids = torch.randint(1, 3, (BATCH, SEQ + 1), generator=source).cumsum(1) % VOCAB
    return ids.to(torch.cuda.current_device())


def state(ddp: DistributedDataParallel, optimizer: Any, step: int, *, is_loading: bool) -> dict[str, Any]:
    """What a distributed checkpoint has; delayed scaling's state is in the model's."""
    model = ddp.module.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading), "step": step}


def save(folder: Path, ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    """A new checkpoint, which replaces the last one when it is whole."""
    place = folder / f"step_{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
        place.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state(ddp, optimizer, step, is_loading=False), str(place))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest.tmp").write_text(place.name)
        (folder / "latest.tmp").replace(folder / "latest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--recipe", default="blockwise")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/megatron"))
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    if has_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(args.tensor)
    torch.manual_seed(0)
    if has_gpu:
        model_parallel_cuda_manual_seed(0)
    ddp, optimizer = build(args)
    step = 0
    if (args.folder / "latest").exists():
        place = args.folder / (args.folder / "latest").read_text()
        loaded = dist_checkpointing.load(state(ddp, optimizer, step, is_loading=True), str(place))
        ddp.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step = loaded["step"]
    while step < args.steps:
        ids = batch(step)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        logits = ddp(ids[:, :-1], torch.arange(SEQ, device=ids.device).expand(BATCH, SEQ), None)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            args.folder.mkdir(parents=True, exist_ok=True)
            with (args.folder / "losses.txt").open("a") as file:
                print(step, loss.item(), file=file)
        if step % args.save_every == 0 or step == args.steps:
            save(args.folder, ddp, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
