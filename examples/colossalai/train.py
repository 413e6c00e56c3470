"""A small model under ColossalAI's booster in octavo's FP8; run again after a kill, it goes on with the same bits.

    torchrun --standalone --nproc-per-node 2 examples/colossalai/train.py --recipe blockwise --bf16-from 15

The lines that are octavo's have a comment.
"""

import argparse
import json
from pathlib import Path

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from torch import nn

from octavo.integrations.colossalai import OctavoMixedPrecision

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


def batch(step: int, rank: int, size: int = 8) -> torch.Tensor:
    """Token ids [size, 9]: each token is the last one plus 1 or 2."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    first, steps = (torch.randint(*range_, generator=source) for range_ in ((0, VOCAB, (size, 1)), (1, 3, (size, 8))))
    return torch.cat([first, first + steps.cumsum(1)], 1) % VOCAB


def train(args: argparse.Namespace) -> None:
    """All of a run; what holds the process group ends with it."""
    rank, device = torch.distributed.get_rank(), colossalai.utils.get_current_device()
    torch.manual_seed(0)
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # octavo's: in place of mixed_precision="bf16"
    precision = OctavoMixedPrecision("O1", recipe=args.recipe, schedule=[(0, "O1"), (args.bf16_from, "O2")])
    booster = Booster(mixed_precision=precision, plugin=TorchDDPPlugin(broadcast_buffers=False))
    model, optimizer, *_ = booster.boost(model, optimizer)

    step, latest = 0, args.folder / "latest"
    if latest.exists():
        saved = args.folder / latest.read_text()
        booster.load_model(model, str(saved / "model"))
        booster.load_optimizer(optimizer, str(saved / "optimizer.bin"))
        state = json.loads((saved / "octavo.json").read_text())
        precision.load_state_dict(state)  # octavo's
        step = state["num_steps"]
    while step < args.steps:
        ids = batch(step, rank).to(device)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        booster.backward(loss, optimizer)
        level = precision.handle.level  # octavo's; the next step's may differ
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with (args.folder / "losses.txt").open("a") as file:
                print(step, loss.item(), level, file=file)
        if step % args.save_every == 0 or step == args.steps:
            state = precision.state_dict()  # octavo's, on every rank
            folder = args.folder / f"step-{step}"
            folder.mkdir(exist_ok=True)
            booster.save_model(model, str(folder / "model"), shard=True, use_safetensors=True)
            booster.save_optimizer(optimizer, str(folder / "optimizer.bin"))
            if rank == 0:
                (folder / "octavo.json").write_text(json.dumps(state))
                latest.with_suffix(".new").write_text(folder.name)
                latest.with_suffix(".new").replace(latest)  # whole, or as it was


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="blockwise")
    parser.add_argument("--bf16-from", type=int, default=15, help="the step from which linears compute in bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/colossalai"))
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    colossalai.launch_from_torch(verbose=False)
    train(args)
    torch.distributed.barrier()  # a rank that leaves first takes the connections of the others down
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
