"""What `octavo doctor mismatch MODEL` compares: a checkpoint, the policy of an `octavo rl` file, or a random one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.config import load_config
from octavo.doctor.model_under_test import check_one_recipe, small_model
from octavo.doctor.sides import Side
from octavo.errors import ConfigError, DataError
from octavo.models import Decoder, load_model
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.rl.config import RLConfig
from octavo.rl.policy import build_policy
from octavo.rl.prompts import drop_long_prompts
from octavo.rl.tasks import encode_prompts
from octavo.serve import LLM, SamplingParams
from octavo.weights.refit import share_weights

DEFAULT_RECIPE = "blockwise"
_RANDOM_PROMPT_LEN = 16
_RANDOM_CONTEXT = 1024


@dataclasses.dataclass(frozen=True)
class Policies:
    """Two sides of one policy, and what the sampler is asked.

    Attributes:
        name: for the report.
        prompts: texts, or token ids.
        note: what the reader should know of the source; empty for nothing.
    """

    name: str
    trainer: Side
    sampler: Side
    prompts: list[str] | list[list[int]]
    tokenizer: Tokenizer | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """How the sampler differs from the trainer; None leaves what the source says.

    Args:
        recipe: of its linears.
        kv_cache_dtype: see octavo.Numerics.
        kv_scales: see octavo.Numerics.
        attention_dtype: see octavo.Numerics.
        weights: a checkpoint whose weights it has, such as one of some steps before.
        head_recipe: by which a remote engine quantizes its head.
        router_recipe: by which a remote engine quantizes its routers.
        kv_scale: one known scale for all of its K and V.
    """

    recipe: str | None = None
    kv_cache_dtype: str | None = None
    kv_scales: str | None = None
    attention_dtype: str | None = None
    weights: Path | None = None
    head_recipe: Recipe | None = None
    router_recipe: Recipe | None = None
    kv_scale: float | None = None

    def numerics(self, own: Numerics) -> Numerics:
        """Of the sampler, whose own would be `own`; bf16 KV takes no kind of scales."""
        recipe = own.recipe if self.recipe is None else get_recipe(self.recipe)
        kv = self.kv_cache_dtype or own.kv_cache_dtype
        attention = self.attention_dtype or (own.attention_dtype if kv == "fp8" else "bf16")
        scales = self.kv_scales or (own.kv_scales if kv == "fp8" else "per_token_head")
        is_own = (recipe, kv, attention, scales) == (
            own.recipe, own.kv_cache_dtype, own.attention_dtype, own.kv_scales,
        )  # fmt: skip
        return own if is_own else Numerics(recipe, kv, False, attention, scales)


def open_policies(
    source: str,
    device: torch.device,
    options: SamplerOptions,
    *,
    trainer_recipe: str | None = None,
    temperature: float | None = None,
    prompts: Sequence[str] = (),
    num_prompts: int = 16,
    overrides: Sequence[str] = (),
    seed: int = 0,
) -> Policies:
    """Open the model that a source names.

    Args:
        source: a checkpoint's directory, a TOML file of `octavo rl`, or the name of the recipe that a small random
            policy is sampled in.
        trainer_recipe: the trainer's linears; None for the file's own, else bf16.
        temperature: None for the file's own, else 1.
        prompts: texts; none takes the file's task, or random tokens.
        overrides: of a TOML file's keys, "section.key=value".
    Raises:
        ConfigError: it is none of these, or an option goes with another one.
        DataError: texts for a model without a tokenizer.
        CheckpointError: see octavo.load_model.
        RecipeError: see octavo.load_model.
    """
    path = Path(source)
    if overrides and (source in RECIPE_NAMES or path.suffix != ".toml"):
        raise ConfigError(f"--set sets keys of a TOML file of octavo rl, and {source} is none; leave it out")
    check_one_recipe(source, options.recipe)
    if source in RECIPE_NAMES:
        model = small_model(_RANDOM_CONTEXT, device, seed)
        options = dataclasses.replace(options, recipe=source)
        found = Policies(
            f"a small random model under {source}", Side(model), Side(model), [], None,
            "its weights are random: logits are flat, and a trained policy of this shape has another mismatch",
        )  # fmt: skip
    elif path.suffix == ".toml":
        found = _from_config(path, device, overrides, num_prompts, seed)
    elif path.is_dir():
        model = load_model(path, device=device, trainable=True)
        tokenizer = load_tokenizer(path) if (path / "tokenizer.json").is_file() else None
        found = Policies(str(path), Side(model), Side(model), [], tokenizer)
    else:
        raise ConfigError(
            f"{source!r} is no checkpoint directory, no TOML file of octavo rl and no recipe; recipes: "
            f"{', '.join(RECIPE_NAMES)}"
        )
    return _with_options(found, options, trainer_recipe, temperature, prompts, num_prompts, seed)


def draw(
    policies: Policies, *, samples: int, max_tokens: int, seed: int
) -> tuple[list[list[int]], list[int], torch.Tensor]:
    """What the sampler's engine draws for the prompts, and reports: sequences, prompt lengths, logprobs [tokens].

    Args:
        samples: completions of each prompt.
        max_tokens: of each completion.
    """
    side = policies.sampler
    params = SamplingParams(
        n=samples,
        max_tokens=max_tokens,
        temperature=side.temperature,
        logprobs=0,
        ignore_eos=policies.tokenizer is None,
    )
    llm = LLM(side.model, tokenizer=policies.tokenizer, seed=seed, warm_up=False)
    sequences, lens, logprobs = list[list[int]](), list[int](), list[float]()
    for output in llm.generate(policies.prompts, params):
        for completion in output.outputs:
            sequences.append([*output.prompt_token_ids, *completion.token_ids])
            lens.append(len(output.prompt_token_ids))
            assert completion.logprobs is not None, "they were asked for"
            logprobs += completion.logprobs.sampled
    return sequences, lens, torch.tensor(logprobs, dtype=torch.float32)


def _from_config(path: Path, device: torch.device, overrides: Sequence[str], num_prompts: int, seed: int) -> Policies:
    config = load_config(RLConfig, path, (*overrides, f"run.device={device}"))
    task = config.task.build()
    model, tokenizer = build_policy(config, task)
    drop_long_prompts(task, lambda: tokenizer)
    note = "" if config.model.path else "its weights are random: give model.path, for mismatch is a trained policy's"
    model.set_numerics(config.trainer_numerics)
    sampler = model if config.exact else share_weights(model, config.rollout_numerics)
    prompts = encode_prompts(task, task.prompts("train", num_prompts, seed), tokenizer)
    temperature = config.rollout.temperature
    return Policies(str(path), Side(model, temperature), Side(sampler, temperature), prompts, tokenizer, note)


def _with_options(
    found: Policies,
    options: SamplerOptions,
    trainer_recipe: str | None,
    temperature: float | None,
    prompts: Sequence[str],
    num_prompts: int,
    seed: int,
) -> Policies:
    model = found.trainer.model
    is_plain = found.sampler.model is model and not model.numerics.recipe.is_fp8 and not model.numerics.exact
    own = Numerics(get_recipe(DEFAULT_RECIPE), "fp8") if is_plain else found.sampler.model.numerics
    if trainer_recipe is not None:
        model.set_numerics(dataclasses.replace(model.numerics, recipe=get_recipe(trainer_recipe)))
    numerics = options.numerics(own)
    if options.router_recipe is not None and not model.config.num_experts:
        raise ConfigError("router_recipe is of a model with experts, and this one has none; leave it out")
    sampler = found.sampler.model
    if options.weights is not None:
        sampler = load_model(options.weights, device=model.device, dtype=model.dtype, trainable=True)
        sampler.set_numerics(numerics)
    elif numerics != sampler.numerics:
        sampler = share_weights(model, numerics)
    chosen = found.trainer.temperature if temperature is None else temperature
    side = Side(
        sampler,
        chosen,
        decodes=True,
        head_recipe=options.head_recipe,
        router_recipe=options.router_recipe,
        kv_scale=options.kv_scale,
    )
    return dataclasses.replace(
        found, trainer=Side(model, chosen), sampler=side, prompts=_prompts(found, model, prompts, num_prompts, seed)
    )


def _prompts(
    found: Policies, model: Decoder, prompts: Sequence[str], num_prompts: int, seed: int
) -> list[str] | list[list[int]]:
    if prompts and found.tokenizer is None:
        raise DataError(f"{found.name} has no tokenizer to read prompts with; leave them out for random tokens")
    if prompts or found.prompts:
        return list(prompts) or found.prompts
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (num_prompts, _RANDOM_PROMPT_LEN), generator=generator)
    rows: list[list[int]] = ids.tolist()
    return rows
