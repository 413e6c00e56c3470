"""A model and a text small enough that a whole run takes a fraction of a second."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.train.config import TrainConfig

MakeConfig = Callable[..., TrainConfig]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SECTIONS = {
    "model": SIZES | {"num_key_value_heads": 1},
    "data": {"vocab_size": 280, "seq_len": 32, "batch_size": 4, "micro_batch_size": 2, "validation_fraction": 0.1},
    "schedule": {"warmup_steps": 2},
    "checkpoint": {"every": 2},
    "metrics": {"eval_every": 2, "eval_tokens": 128, "tensorboard": False},
    "run": {"steps": 6, "device": "cpu"},
}


def write_corpus(path: Path) -> Path:
    """Two hundred short documents."""
    texts = [f"the {i % 7} cats of house {i} sat on {i * i} mats and purred {i % 3} times\n" * 3 for i in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def toml(sections: dict[str, dict[str, object]]) -> str:
    """Sections as a TOML file says them."""
    lines = []
    for name, section in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for key, v in section.items()]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


def build_config(corpus: Path, directory: Path, name: str = "run", **sections: dict[str, object]) -> TrainConfig:
    """A config in which `section={...}` changes some keys."""
    places = {"data": {"path": str(corpus), "cache_dir": corpus.parent / "cache"}, "run": {"dir": directory / name}}
    layers = (SECTIONS, places, sections)
    keys = {key for layer in layers for key in layer}
    return TrainConfig(**{key: {k: v for layer in layers for k, v in layer.get(key, {}).items()} for key in keys})


def written(path: Path, corpus: Path, **sections: dict[str, object]) -> Path:
    """A TOML file of SECTIONS, with the corpus and these sections."""
    data = {**SECTIONS["data"], "path": str(corpus), "cache_dir": str(corpus.parent / "cache")}
    path.write_text(toml({**SECTIONS, "data": data, **sections}))
    return path


@pytest.fixture
def make_config(corpus: Path, tmp_path: Path) -> MakeConfig:
    """make_config(name, section={...}): run directories of one test lie side by side."""
    return functools.partial(build_config, corpus, tmp_path)
