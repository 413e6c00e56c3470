"""A policy whose linears are multiples of 128, so that all of it is sent as FP8 blocks, and where it is sent to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import save_model
from octavo.integrations.rollout.disk_session import DiskEngine
from octavo.integrations.rollout.sglang import SglangEngine
from octavo.integrations.rollout.vllm import VllmEngine
from octavo.numerics import Numerics, get_recipe
from octavo.rl.config import RLConfig
from octavo.rl.engines import EngineSection, SamplingSpec
from octavo.rl.loop import build_policy
from octavo.rl.refit import refit
from octavo.rl.tasks import Arithmetic
from tests.integrations.rollout.stand_in import SglangStandIn, StandIn, VllmStandIn
from tests.rl.conftest import Policy, nudge, tiny_config

TASK = Arithmetic(num_digits=1, heldout_share=0.3)
SPEC = SamplingSpec(samples_per_prompt=3, max_tokens=5, temperature=1.0, stop=TASK.end)
PROMPTS = ["1+1=", "2+3="]
BLOCKS = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
KINDS: dict[str, tuple[type[DiskEngine], type[StandIn]]] = {
    "vllm": (VllmEngine, VllmStandIn),
    "sglang": (SglangEngine, SglangStandIn),
}


def block_config(directory: Path, **sections: Any) -> RLConfig:
    gentle = {"lr": 1e-3, "weight_decay": 0.0}  # tiny_config's 1e-2 makes this width repeat a token for good
    sections["trainer"] = {"optimizer": gentle, **sections.get("trainer", {})}
    return tiny_config(directory, model=BLOCKS, **sections)


def make_policy(directory: Path, recipe: str = "blockwise", **model: int) -> Policy:
    model_section = {**BLOCKS, **model}
    decoder, tokenizer = build_policy(tiny_config(directory, model=model_section), TASK)
    decoder.set_numerics(Numerics(get_recipe(recipe), "fp8", exact=True))
    return decoder, tokenizer


@pytest.fixture
def blocks(tmp_path: Path) -> Policy:
    return make_policy(tmp_path)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the policy's architecture with other weights, which the server starts with."""
    path = tmp_path_factory.mktemp("start") / "model"
    model, tokenizer = make_policy(path.parent)
    nudge(model, by=1.0)
    save_model(model, path, tokenizer=tokenizer)
    return path


class Disk:
    """An engine that takes checkpoints, its stand-in, and the policy; the first weights are handed over."""

    def __init__(self, kind: str, policy: Policy, folder: Path, **section: Any) -> None:
        self.model, self.tokenizer = policy
        make_engine, make_server = KINDS[kind]
        self.server: Any = make_server(self.tokenizer)
        fields = {"timeout_s": 20.0, "update_timeout_s": 20.0, **section}
        self.folder = folder / "shared"
        self.section = EngineSection(name=kind, url=self.server.url, weights_dir=self.folder, **fields)  # type: ignore[arg-type]
        self.engine = make_engine(self.section, self.tokenizer, self.model.config)

    def refit(self) -> int:
        return refit(self.model, self.model, self.engine).weight_version


@pytest.fixture(params=["vllm", "sglang"])
def disk(request: pytest.FixtureRequest, blocks: Policy, tmp_path: Path) -> Iterator[Disk]:
    it = Disk(request.param, blocks, tmp_path)
    with it.server:
        it.refit()
        yield it
