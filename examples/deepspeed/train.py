"""A small model under DeepSpeed with octavo's FP8 linears; run again after a kill, it goes on with the same bits.

    deepspeed --num_gpus 2 examples/deepspeed/train.py --config examples/deepspeed/zero3.json --recipe blockwise

Without a GPU: DS_ACCELERATOR=cpu before it. The two lines that are octavo's have a comment.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn

import octavo
from octavo.integrations import deepspeed as octavo_deepspeed

VOCAB, DIM = 64, 128


class NextToken(nn.Module):
    """ids [B, T] -> logits [B, T, VOCAB] of the token after each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.lm_head(hidden + self.layers(hidden))


def batch(step: int, rank: int, size: int) -> torch.Tensor:
    """Token ids [size, 9] of one micro-batch: each token is the last one plus 1 or 2."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    first, steps = (torch.randint(*range_, generator=source) for range_ in ((0, VOCAB, (size, 1)), (1, 3, (size, 8))))
    return torch.cat([first, first + steps.cumsum(1)], 1) % VOCAB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(Path(__file__).with_name("zero3.json")), help="DeepSpeed's")
    parser.add_argument("--recipe", default="blockwise")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/deepspeed"))
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = NextToken()
    octavo.convert(model, args.recipe)  # octavo's: before initialize
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # octavo's: deepspeed.initialize by another name
    engine, *_ = octavo_deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)

    checkpoints = args.folder / "checkpoints"
    if (checkpoints / "latest").exists():
        octavo_deepspeed.load_checkpoint(engine, checkpoints)
    micro_batches = engine.gradient_accumulation_steps()
    while engine.global_steps < args.steps:
        losses = []
        for _ in range(micro_batches):
            number = engine.global_steps * micro_batches + len(losses)
            ids = batch(number, rank, engine.train_micro_batch_size_per_gpu()).to(engine.device)
            loss = nn.functional.cross_entropy(engine(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if rank == 0:
            with (args.folder / "losses.txt").open("a") as file:
                print(engine.global_steps, sum(losses) / micro_batches, file=file)
        if engine.global_steps % args.save_every == 0 or engine.global_steps == args.steps:
            octavo_deepspeed.save_checkpoint(engine, checkpoints)
    engine.save_16bit_model(str(args.folder), "model.bin")
    torch.distributed.barrier()  # a rank that leaves first takes the connections of the others down
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
