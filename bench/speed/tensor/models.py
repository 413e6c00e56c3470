"""Qwen3-8B's shape with random weights, whole or cut among the session's ranks."""

import dataclasses

from bench.serve.shapes import QWEN3_8B, build_model, make_toy
from bench.speed.scale.session import Session
from octavo.distributed.tensor_group import TensorGroup
from octavo.models import Decoder, ModelConfig
from octavo.nn.cut_linear import TensorMode
from octavo.numerics import Numerics, get_recipe
from octavo.parallel import parallelize


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model runs.

    Args:
        mode: of parallelize; None for one GPU.
        exact: numerics.
    """

    mode: TensorMode | None
    exact: bool

    @property
    def label(self) -> str:
        """As tables name it."""
        return f"{self.mode or 'one GPU alone'}{', exact' if self.exact else ''}"


ONE_GPU, ONE_GPU_EXACT = Layout(None, exact=False), Layout(None, exact=True)
REDUCE, GATHER, GATHER_EXACT = (
    Layout("reduce", exact=False),
    Layout("gather", exact=False),
    Layout("gather", exact=True),
)


def config_of(session: Session, num_layers: int | None = None) -> ModelConfig:
    """The shape, of so many layers or all."""
    config = make_toy(QWEN3_8B) if session.is_toy else QWEN3_8B
    if session.is_toy:  # parts of whole blocks on each of two ranks
        config = dataclasses.replace(config, head_dim=128, intermediate_size=512, hidden_size=256)
    return config if num_layers is None else dataclasses.replace(config, num_layers=num_layers)


def build(session: Session, config: ModelConfig, layout: Layout, recipe: str = "blockwise", kv: str = "fp8") -> Decoder:
    """The same weights under every layout."""
    model = build_model(config, Numerics(get_recipe(recipe), kv, layout.exact), session.device.type)
    if layout.mode is not None:
        session.say(f"  {parallelize(model, TensorGroup.of(), mode=layout.mode)}")
    return model
