"""Training: one configuration tree, one loop, checkpoints that survive anything."""

from octavo.train.config import TrainConfig
from octavo.train.loop import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "train"]
