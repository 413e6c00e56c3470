"""A policy small enough for a second a step: one layer, width 32."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.models import Decoder, Tokenizer
from octavo.rl.config import RLConfig
from octavo.rl.loop import build_policy
from octavo.rl.trainer import RLResult


def tiny_config(directory: Path, **sections: Any) -> RLConfig:
    """Three steps of four groups; sections update the defaults, key by key."""
    fields: dict[str, Any] = {
        "model": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "task": {"num_digits": 1, "heldout_share": 0.3},
        "warmup": {"steps": 0},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 4},
        "trainer": {"steps": 3, "minibatches": 1, "optimizer": {"lr": 1e-2, "weight_decay": 0.0}},
        "eval": {"num_prompts": 8},
        "run": {"dir": str(directory), "tensorboard": False, "save": False, "device": "cpu"},
    }
    for name, section in sections.items():
        fields[name] = {**fields[name], **section} if isinstance(section, dict) and name in fields else section
    return RLConfig(**fields)


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    return tiny_config(tmp_path)


@pytest.fixture
def policy(config: RLConfig) -> tuple[Decoder, Tokenizer]:
    return build_policy(config, config.task.build())


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, RLResult]]:
    """The four steps of one of test_resume's variants in one go, and where they lie: what others are compared with."""
    from tests.rl.test_resume import run, variant

    @functools.cache
    def run_whole(name: str) -> tuple[Path, RLResult]:
        directory = tmp_path_factory.mktemp(name)
        return directory, run(variant(directory, name, 4, checkpoint_every=100))

    return run_whole
