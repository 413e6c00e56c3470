"""Qwen3-8B's shape, and others, with random weights, whole or cut among the session's ranks."""

import dataclasses
from collections.abc import Iterable

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
        sequence_parallel: of parallelize: between linears each rank has some of the tokens.
    """

    mode: TensorMode | None
    exact: bool = False
    sequence_parallel: bool = False

    @property
    def label(self) -> str:
        """As tables name it."""
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return f"{self.mode or 'one GPU alone'}{', exact' if self.exact else ''}{sequence}"

    def case(self, session: Session) -> str:
        """As cases name it, with the number of GPUs."""
        return self.label if self.mode is None else f"{session.mesh.world_size} GPUs, {self.label}"

    def cut(self, session: Session, model: Decoder) -> None:
        """Cut a model among the session's ranks and say so; one GPU's stays whole."""
        if self.mode is not None:
            options = {"mode": self.mode, "sequence_parallel": self.sequence_parallel}
            session.say(f"  {parallelize(model, TensorGroup.of(), **options)}")  # type: ignore[arg-type]


ONE_GPU, ONE_GPU_EXACT = Layout(None), Layout(None, exact=True)
REDUCE, GATHER, GATHER_EXACT = Layout("reduce"), Layout("gather"), Layout("gather", exact=True)
LAYOUTS = {"one": ONE_GPU, "reduce": REDUCE, "gather": GATHER, "gather-exact": GATHER_EXACT}  # as --layout names them


def wanted(session: Session, layouts: Iterable[Layout]) -> list[Layout]:
    """Those that --layout names; without it all."""
    asked = [LAYOUTS[name] for name in session.layouts]
    return [layout for layout in layouts if not asked or layout in asked]


def config_of(session: Session, num_layers: int | None = None, full: ModelConfig = QWEN3_8B) -> ModelConfig:
    """The shape, of so many layers or all."""
    config = make_toy(full) if session.is_toy else full
    if session.is_toy:  # parts of whole blocks on each rank
        ranks = session.mesh.world_size
        config = dataclasses.replace(
            config,
            head_dim=128,
            num_heads=max(4, ranks),
            num_kv_heads=max(2, ranks),
            hidden_size=128 * max(2, ranks),
            intermediate_size=128 * max(4, ranks),
        )
    return config if num_layers is None else dataclasses.replace(config, num_layers=num_layers)


def build(session: Session, config: ModelConfig, layout: Layout, recipe: str = "blockwise", kv: str = "fp8") -> Decoder:
    """The same weights under every layout."""
    model = build_model(config, Numerics(get_recipe(recipe), kv, layout.exact), session.device.type)
    layout.cut(session, model)
    return model
