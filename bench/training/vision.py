"""Does FP8 train a model that octavo knows nothing of? A small vision transformer of plain torch and octavo.convert.

Two tasks: ten kinds of shapes, drawn again for every image (size, turn, place, colours, noise), and scikit-learn's
handwritten digits where it is installed. Every variant has the same weights, images and order for a seed.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import octavo
from bench.processes import map_processes
from bench.program import Program
from bench.record import git_commit
from bench.report import format_record
from bench.training.convergence_results import vision_record
from bench.training.pretraining_run import describe_machine
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.config import ScheduleSection
from octavo.train.schedule import learning_rate

VARIANTS = ("bf16", "delayed", "tensorwise", "rowwise", "blockwise")
SKIPPED = ("patches", "head")  # the first and the last linear stay in bf16, as is usual
NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Setting:
    """The transformer and its training."""

    width: int = 256
    layers: int = 6
    heads: int = 4
    steps: int = 800
    batch: int = 256
    learning_rate: float = 1e-3
    num_train: int = 40_960
    num_test: int = 10_240


TOY = Setting(width=64, layers=1, heads=2, steps=3, batch=16, num_train=64, num_test=32)


@dataclasses.dataclass(frozen=True)
class Images:
    """A task: images [N, C, S, S] fp32 of zero mean or so, labels [N] int64, and the side of a patch."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    patch: int

    def to(self, device: torch.device) -> "Images":
        """On another device."""
        train, test = (tuple(x.to(device) for x in side) for side in (self.train, self.test))
        return Images(train, test, self.patch)  # type: ignore[arg-type]


class Block(nn.Module):
    """Attention and MLP with a norm before each, of plain nn.Linear."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, L, W] -> the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, L, D]
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches, learned positions, blocks, the mean of all tokens, a linear head."""

    def __init__(self, setting: Setting, images: Images) -> None:
        super().__init__()
        _, channels, side, _ = images.train[0].shape
        self.patch = images.patch
        self.patches = nn.Linear(channels * images.patch**2, setting.width)
        self.positions = nn.Parameter(0.02 * torch.randn((side // images.patch) ** 2, setting.width))
        self.blocks = nn.Sequential(*(Block(setting.width, setting.heads) for _ in range(setting.layers)))
        self.norm = nn.LayerNorm(setting.width)
        self.head = nn.Linear(setting.width, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images [B, C, S, S] -> logits [B, classes] fp32."""
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)  # [B, L, C * patch * patch]
        x = self.patches(patches.to(self.positions.dtype)) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(dim=1)).float()


def draw_shapes(count: int, seed: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [count, 3, side, side] and labels [count]: polygons, stars, a disc, a ring and a cross."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, 12, generator=generator)
    labels = torch.arange(count) % NUM_CLASSES
    grid = torch.linspace(-1, 1, side)
    center = 0.4 * (numbers[:, :2] - 0.5)
    x, y = grid[None, None, :] - center[:, :1, None], grid[None, :, None] - center[:, 1:2, None]
    radius, angle = torch.hypot(x, y), torch.atan2(y, x) + 2 * math.pi * numbers[:, 2, None, None]  # [N, S, S]
    size = 0.5 + 0.3 * numbers[:, 3, None, None]
    inside = torch.empty_like(radius, dtype=torch.bool)
    for label, shape in enumerate(SHAPES):
        rows = labels == label
        inside[rows] = shape(radius[rows] / size[rows], angle[rows])
    color, back = numbers[:, 4:7, None, None] + 0.2, numbers[:, 7:10, None, None] - 0.5
    noise = torch.randn(count, 3, side, side, generator=generator)
    image = back + torch.where(inside[:, None], color, 0.0)
    return image + 0.4 * numbers[:, 10, None, None, None] * noise, labels


def _polygon(corners: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def inside(radius: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        step = 2 * math.pi / corners
        return radius * torch.cos(torch.remainder(angle, step) - step / 2) < math.cos(step / 2)

    return inside


def _star(points: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda radius, angle: radius < 0.7 + 0.3 * torch.cos(points * angle)


SHAPES = (
    *(_polygon(corners) for corners in (3, 4, 5, 6)),
    *(_star(points) for points in (3, 4, 5)),
    lambda radius, angle: radius < 1.0,
    lambda radius, angle: (radius < 1.0) & (radius > 0.5),
    lambda radius, angle: (radius < 1.0) & (torch.minimum(torch.sin(angle).abs(), torch.cos(angle).abs()) < 0.35),
)


def make_shapes(setting: Setting, seed: int) -> Images:
    """The training shapes of a seed; the test images are the same for all."""
    return Images(draw_shapes(setting.num_train, seed), draw_shapes(setting.num_test, 10_000), patch=4)


def make_digits(setting: Setting, seed: int) -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 grey points, a fifth of them for the test."""
    from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]

    digits = load_digits()
    images = torch.tensor(digits.images / 8.0 - 1.0, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) // 5
    train, test = order[cut:], order[:cut]
    return Images((images[train], labels[train]), (images[test], labels[test]), patch=2)


TASKS: dict[str, Callable[[Setting, int], Images]] = {"shapes": make_shapes, "digits": make_digits}


def find_tasks() -> list[str]:
    """The tasks that this machine has."""
    return [name for name in TASKS if name != "digits" or importlib.util.find_spec("sklearn")]


def train_one(task: str, variant: str, seed: int, setting: Setting, device_name: str) -> dict[str, Any]:
    """Train and test one variant: accuracy and loss on the test images, in the variant's own numerics."""
    device = torch.device(device_name)
    images = TASKS[task](setting, seed).to(device)
    torch.manual_seed(seed)
    model = VisionTransformer(setting, images).to(device, torch.bfloat16)
    report = octavo.convert(model, variant, ignore=SKIPPED)
    optimizer = MasterAdamW(model, OptimizerSection(lr=setting.learning_rate, weight_decay=0.05))
    order = torch.Generator().manual_seed(seed)
    schedule = ScheduleSection(kind="cosine", warmup_steps=setting.steps // 10, min_ratio=0.0)
    began = time.monotonic()
    for step in range(setting.steps):
        picked = torch.randint(len(images.train[1]), (setting.batch,), generator=order).to(device, non_blocking=True)
        F.cross_entropy(model(images.train[0][picked]), images.train[1][picked]).backward()
        optimizer.accumulate_gradients()
        optimizer.clip_gradients(1.0)
        optimizer.step(lr=learning_rate(step, setting.steps, setting.learning_rate, schedule))
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in images.test[0].split(1024)])
    accuracy = (logits.argmax(dim=-1) == images.test[1]).float().mean()
    return {
        "task": task,
        "variant": variant,
        "seed": seed,
        "accuracy": float(accuracy),
        "loss": float(F.cross_entropy(logits, images.test[1])),
        "fp8_flop_share": report.fp8_flop_share,
        "num_params": sum(p.numel() for p in model.parameters()),
        "seconds": time.monotonic() - began,
        "num_test": len(images.test[1]),
        "setting": dataclasses.asdict(setting),
        **describe_machine(device),
    }


_FORMER = {"--arms": "--variants", "--recipes": "--variants"}  # names of options


def main(arguments: list[str] | None = None) -> int:
    """Train every variant on every task; a JSON line each."""
    options = _parse(arguments)
    setting = TOY if options.quick else Setting(steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    keys = itertools.product(find_tasks(), options.variants.split(","), range(options.seeds))
    cases = [(*key, setting, options.device) for key in keys]
    rows: list[dict[str, Any]] = []
    with (options.out / "vision.jsonl").open("w") as file:
        for row in map_processes(train_one, cases, options.jobs, 2, show=_show):
            file.write(json.dumps(row | {"commit": options.commit or git_commit()}) + "\n")
            file.flush()
            rows.append(row)
    print(format_record(vision_record(rows)))
    return 0


def _show(row: dict[str, Any]) -> str:
    return f"{row['task']} {row['variant']} seed {row['seed']}: {row['accuracy']:.4f}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Program("bench.training.vision", __doc__, out=Path("runs/vision"), former=_FORMER)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="recipes, with commas")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each variant")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="optimizer steps of each run")
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="toy sizes: does it run at all?")
    return parser.parse(arguments)


if __name__ == "__main__":
    sys.exit(main())
