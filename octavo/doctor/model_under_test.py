"""What `octavo doctor MODEL` examines: a checkpoint, a training run's TOML file, or a recipe on a small model."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.config import load_config
from octavo.errors import ConfigError, DataError
from octavo.models import Decoder, ModelConfig, load_model
from octavo.models.tokenizer import load_tokenizer
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from octavo.train.data import Batch, make_batch
from octavo.train.dataset import load_dataset
from octavo.train.step import summed_loss

DEFAULT_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class ModelUnderTest:
    """A model and the batch that it is run on.

    Attributes:
        name: for the report.
        recipe: what to compare bf16 with; None for the recipes that the model's linears have.
        notes: what loading the model warned of.
    """

    name: str
    model: Decoder
    batch: Batch
    recipe: str | None
    notes: tuple[str, ...] = ()

    def run(self, model: Decoder) -> torch.Tensor:
        """Mean loss of the batch in nats: what find_departure runs."""
        return summed_loss(model, self.batch) / max(self.batch.num_targets, 1)


def open_model_under_test(
    source: str,
    device: torch.device,
    *,
    recipe: str | None = None,
    text: str | None = None,
    num_tokens: int = DEFAULT_TOKENS,
    overrides: Sequence[str] = (),
    seed: int = 0,
) -> ModelUnderTest:
    """Open the model that a source names.

    Args:
        source: a checkpoint's directory, a TOML file of `octavo train`, or a recipe's name, which is then tried on a
            small model with random weights.
        recipe: the FP8 recipe; None takes the TOML file's own (or else "blockwise").
        text: what a checkpoint's model reads, by its own tokenizer; None gives it random tokens. A TOML file's model
            reads the run's first batch.
        num_tokens: how many tokens, at most, of a text.
        overrides: of a TOML file's keys, "section.key=value".
    Raises:
        ConfigError: it is none of these, or an option is of another one.
        DataError: a text of fewer than two tokens, or one for a model without a tokenizer.
    """
    path = Path(source)
    of_config = source not in RECIPE_NAMES and path.suffix == ".toml"
    if overrides and not of_config:
        raise ConfigError(f"--set sets keys of a TOML file of octavo train, and {source} is none; leave it out")
    if text is not None and (of_config or source in RECIPE_NAMES):
        raise ConfigError(f"--text goes with a checkpoint, and {source} is none; leave it out")
    if "bf16" in (source, recipe):
        raise ConfigError(f"bf16 is what FP8 is compared with; name one of {', '.join(RECIPE_NAMES[1:])}, got bf16")
    check_one_recipe(source, recipe)
    if source in RECIPE_NAMES:
        model = small_model(num_tokens, device, seed)
        return ModelUnderTest(f"a small random model under {source}", model, _tokens(model, num_tokens, seed), source)
    if of_config:
        return _from_config(path, device, recipe, overrides)
    if not path.is_dir():
        raise ConfigError(
            f"{source!r} is no checkpoint directory, no TOML file and no recipe; recipes: {', '.join(RECIPE_NAMES)}"
        )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = load_model(path, device=device, trainable=True)
    num_tokens = min(num_tokens, model.config.max_position_embeddings)
    batch = _tokens(model, num_tokens, seed) if text is None else _read_text(path, text, num_tokens)
    notes = tuple(str(warning.message) for warning in warned)
    return ModelUnderTest(str(path), model, batch.to(device), recipe or "blockwise", notes)


def check_one_recipe(source: str, recipe: str | None) -> None:
    """Refuse a recipe beside a source that is one.

    Raises:
        ConfigError: the two differ.
    """
    if source in RECIPE_NAMES and recipe not in (None, source):
        raise ConfigError(f"{source} is a recipe already, and --recipe {recipe} another; leave out one of the two")


def small_model(num_tokens: int, device: torch.device, seed: int) -> Decoder:
    """Two random layers, for what needs a model and was given none; its context is num_tokens."""
    config = ModelConfig(
        family="qwen3",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=num_tokens,
    )
    return Decoder(config, device=device, seed=seed)


def _from_config(path: Path, device: torch.device, recipe: str | None, overrides: Sequence[str]) -> ModelUnderTest:
    config = load_config(TrainConfig, path, overrides)
    dataset = load_dataset(config)
    model = build_model(config, dataset.tokenizer.vocab_size, dataset.tokenizer.eos_id, device)
    own = config.precision.make_recipe().is_fp8
    return ModelUnderTest(str(path), model, dataset.batches(0)[0].to(device), recipe or (None if own else "blockwise"))


def _tokens(model: Decoder, num_tokens: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (num_tokens + 1,), generator=generator)
    return make_batch([ids.numpy()], None).to(model.device)


def _read_text(path: Path, text: str, num_tokens: int) -> Batch:
    ids = load_tokenizer(path).encode(text)[: num_tokens + 1]
    if len(ids) < 2:
        raise DataError(f"the text has {len(ids)} tokens, and a loss needs two; give a longer --text")
    return make_batch([torch.tensor(ids).numpy()], None)
