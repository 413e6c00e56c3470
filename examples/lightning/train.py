"""A small model under Lightning's Trainer with octavo's FP8 linears; run again after a kill, it goes on.

    python examples/lightning/train.py --devices 2 --recipe blockwise

Without a GPU: --accelerator cpu. The one line that is octavo's has a comment.
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from octavo.integrations.lightning import OctavoPrecision

VOCAB, DIM = 64, 128


class NextToken(lightning.LightningModule):
    """ids [B, T] -> logits [B, T, VOCAB] of the token after each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.lm_head(hidden + self.layers(hidden))

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], *_: object) -> None:
        if self.global_rank == 0:
            with (self.folder / "losses.txt").open("a") as file:
                print(self.global_step, outputs["loss"].item(), file=file)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows(num: int) -> torch.Tensor:
    """Token ids [num, 9]: each token is the last one plus 1 or 2."""
    source = torch.Generator().manual_seed(0)
    first, steps = (torch.randint(*range_, generator=source) for range_ in ((0, VOCAB, (num, 1)), (1, 3, (num, 8))))
    return torch.cat([first, first + steps.cumsum(1)], 1) % VOCAB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="blockwise")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        plugins=[OctavoPrecision(args.recipe, precision="bf16-mixed")],  # octavo's: in place of precision="bf16-mixed"
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=DDPStrategy(broadcast_buffers=False) if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.folder / "checkpoints", save_last=True)],
        default_root_dir=args.folder,
        logger=False,
    )
    loader = DataLoader(rows(16 * args.devices), batch_size=4)  # four steps an epoch
    trainer.fit(NextToken(args.folder), loader, ckpt_path="last")
    trainer.save_checkpoint(args.folder / "model.ckpt", weights_only=True)


if __name__ == "__main__":
    main()
