r"""torchtitan's debug model with octavo's FP8 linears, as a config for torchtitan's own launcher.

torchrun --standalone --nproc-per-node 8 -m torchtitan.train \
    --module examples.torchtitan.llama3_fp8 --config debugmodel_fp8
"""

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from octavo.integrations.torchtitan import OctavoCheckpointManager, OctavoConverter


def debugmodel_fp8(recipe: str = "blockwise") -> Trainer.Config:
    """torchtitan's llama3_debugmodel, but for what is octavo's."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=[OctavoConverter.Config(recipe=recipe)])
    config.training.disable_cuda_graphs = True
    # for delayed scaling alone: torchtitan's own checkpoints have no place for its state
    config.checkpoint = OctavoCheckpointManager.Config(enable=True, interval=10, last_save_model_only=False)
    return config


def debugmodel_delayed() -> Trainer.Config:
    """The same by a recipe that has state."""
    return debugmodel_fp8("delayed")
