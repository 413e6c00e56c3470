"""A policy small enough for a second a step: one layer, width 32."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models import Decoder, Tokenizer
from octavo.rl.config import RLConfig
from octavo.rl.loop import build_policy
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.trainer import RLResult

Policy = tuple[Decoder, Tokenizer]


def tiny_config(directory: Path, **sections: Any) -> RLConfig:
    """Three steps of four groups; sections update the defaults, key by key."""
    fields: dict[str, Any] = {
        "model": {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
        | {"hidden_size": 32},
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


def make_rollouts(response_lens: list[int], **fields: Any) -> Rollouts:
    """Responses to prompts of two tokens, all of one group, with logprobs and rewards of 0; fields go over them."""
    num, num_tokens = len(response_lens), sum(response_lens)
    made: dict[str, Any] = {
        "prompts": ["p"] * num,
        "completions": ["x"] * num,
        "sequences": [[1, 2, *range(n)] for n in response_lens],
        "prompt_lens": [2] * num,
        "response_lens": response_lens,
        "rollout_logprobs": torch.zeros(num_tokens),
        "rewards": torch.zeros(num),
        "group_ids": torch.zeros(num, dtype=torch.int64),
        "weight_versions": torch.zeros(num_tokens, dtype=torch.int64),
        "is_finished": torch.ones(num, dtype=torch.bool),
    }
    return Rollouts(**made | fields)


def nudge(model: Decoder, by: float = 0.05, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(by * torch.randn(param.shape, generator=generator))
    model.mark_weights_updated()


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    return tiny_config(tmp_path)


@pytest.fixture
def policy(config: RLConfig) -> Policy:
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
