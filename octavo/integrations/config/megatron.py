"""Megatron-LM's flags on `octavo train`: those of megatron_flags.py one by one, and what a few of them mean together.

A flag that means something here sets the same thing as there; others of Megatron's are refused by name with the reason,
and none is taken and ignored. Megatron's own defaults apply where a group of flags is turned on, and only there:
--fp8-format alone is delayed scaling with a history of one step ("most_recent"), which is neither TransformerEngine's
default (1024, "max") nor octavo's. A size, a rate or an interval that no flag names stays as the config file has it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.integrations.config.megatron_flags import FLAGS, ONLY_ONE, REFUSED
from octavo.train.config import RecipeSection, TrainConfig

Given = Mapping[str, Any]  # flag -> value; a switch that is on has True
Changes = dict[str, Any]  # configuration key -> value; UNSET takes the file's away
UNSET = object()
_FORMAT_FLAGS = {"--fp8-format": "", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"}
_DELAYED_FLAGS = {"--fp8-margin": 0, "--fp8-amax-history-len": 1, "--fp8-amax-compute-algo": "most_recent"}
_DELAYED_KEYS = {flag: "precision." + flag.removeprefix("--fp8-").replace("-", "_") for flag in _DELAYED_FLAGS}
_LAYER_FLAGS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
_EXPERT_FLAGS = ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-grouped-gemm")
_ROUTER_FLAGS = ("--moe-aux-loss-coeff", "--moe-z-loss-coeff")
_STATE_FLAGS = ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")


def apply_flags(config: TrainConfig, given: Given) -> tuple[TrainConfig, list[str]]:
    """A configuration with Megatron's flags over it.

    Args:
        config: the config file's, with --set.
        given: the flags of FLAGS, REFUSED and ONLY_ONE that were written, and their values.
    Returns:
        (the configuration, "key = value" of everything that the flags set).
    Raises:
        ConfigError: a flag that is refused, or that would have no effect, named with the reason; a value that does
            not fit.
    """
    _refuse(given)
    changes: Changes = {}
    for flag in FLAGS:
        if flag.name in given and flag.key:
            changes[flag.key] = flag.value if flag.kind is bool else given[flag.name]
    for group in _GROUPS:
        group(config, given, changes)
    notes = [f"{key} = {value!r}" for key, value in changes.items() if value is not UNSET]
    return _changed(config, changes), notes


def _refuse(given: Given) -> None:
    for name in given:
        if name in REFUSED:
            raise ConfigError(f"{name} is refused: {REFUSED[name][1]}")
        if name in ONLY_ONE and given[name] != 1:
            raise ConfigError(f"{name} {given[name]} is refused: {ONLY_ONE[name]}; give 1 or leave it out")


def _changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    data = config.model_dump(exclude_unset=True)
    for key, value in changes.items():
        section, name = key.split(".")
        if value is UNSET:
            data.get(section, {}).pop(name, None)
        else:
            data.setdefault(section, {})[name] = value
    return TrainConfig(**data)


def _needs(given: Given, flags: tuple[str, ...], needed: str, because: str) -> None:
    """Refuse the first of some flags that is written without another one."""
    if lonely := next((flag for flag in flags if flag in given), None):
        raise ConfigError(f"{lonely} has no effect without {needed}: {because}")


def _fp8(config: TrainConfig, given: Given, changes: Changes) -> None:
    formats = {
        flag: given[flag] if flag == "--fp8-format" else name for flag, name in _FORMAT_FLAGS.items() if flag in given
    }
    if not formats:
        because = (
            "Megatron trains without FP8 then; add --fp8-format hybrid, or set precision.recipe in the config file"
        )
        _needs(given, ("--fp8-recipe", *_DELAYED_FLAGS, "--no-fp8-wgrad"), "--fp8-format", because)
        return
    if len(set(formats.values())) > 1:
        raise ConfigError(f"{' and '.join(formats)} name two formats; give --fp8-format alone")
    recipe = given.get("--fp8-recipe", "delayed")
    changes |= {"precision.recipe": recipe, "precision.fp8_format": next(iter(formats.values()))}
    for flag, default in _DELAYED_FLAGS.items():
        if recipe != "delayed" and flag in given:
            raise ConfigError(f"{flag} has no effect with --fp8-recipe {recipe}: it is delayed scaling's")
        changes[_DELAYED_KEYS[flag]] = given.get(flag, default) if recipe == "delayed" else UNSET
    if "--no-fp8-wgrad" in given:
        kept = config.precision.high_precision_gemms or ()
        changes["precision.high_precision_gemms"] = tuple(dict.fromkeys((*kept, "grad_weight")))


def _implementation(config: TrainConfig, given: Given, changes: Changes) -> None:
    if given.get("--transformer-impl") != "local":
        return
    if "precision.recipe" in changes:
        raise ConfigError(
            "--transformer-impl local has no FP8 (as in Megatron); use transformer_engine, or leave FP8 out"
        )
    changes |= {f"precision.{name}": UNSET for name in (*RecipeSection.model_fields, "modules")}
    changes["precision.recipe"] = "bf16"


def _layers_in_bf16(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--first-last-layers-bf16" not in given:
        _needs(given, _LAYER_FLAGS, "--first-last-layers-bf16", "Megatron counts layers only then")
        return
    recipe = changes.get("precision.recipe", config.precision.recipe)
    if recipe == "delayed":
        raise ConfigError(
            "--first-last-layers-bf16 does not go with delayed scaling (as in Megatron); name --fp8-recipe"
        )
    if recipe == "bf16":
        raise ConfigError("--first-last-layers-bf16 has no effect without FP8: add --fp8-format and --fp8-recipe")
    for flag in _LAYER_FLAGS:
        changes["precision." + flag.removeprefix("--").replace("-", "_")] = given.get(flag, 1)


def _optimizer(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--use-precision-aware-optimizer" not in given:
        _needs(given, _STATE_FLAGS, "--use-precision-aware-optimizer", "Megatron's states are fp32 then")
        return
    states = {given.get(flag, "fp32") for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    if len(states) > 1:
        raise ConfigError(
            f"--exp-avg-dtype and --exp-avg-sq-dtype must be the same here, got {', '.join(sorted(states))}"
        )
    for flag, remedy in (("--main-grads-dtype", "gradients are summed"), ("--main-params-dtype", "masters are kept")):
        if given.get(flag, "fp32") != "fp32":
            raise ConfigError(f"{flag} {given[flag]} is refused: {remedy} in fp32")
    state = states.pop()
    if state == "fp16":
        raise ConfigError("--exp-avg-dtype fp16 is refused: moments are kept in fp32, bf16 or fp8")
    changes |= {"optimizer.state_dtype": state, "optimizer.master_weights": "fp32"}


def _rates(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--min-lr" in given:
        lr, min_lr = changes.get("optimizer.lr", config.optimizer.lr), given["--min-lr"]
        if not 0.0 <= min_lr <= lr:
            raise ConfigError(f"--min-lr {min_lr} must be from 0 to the peak learning rate {lr}")
        changes["schedule.min_ratio"] = min_lr / lr


def _warmup(config: TrainConfig, given: Given, changes: Changes) -> None:
    if not given.keys() & {"--lr-warmup-iters", "--train-iters"}:
        return
    warmup = changes.get("schedule.warmup_steps", config.schedule.warmup_steps)
    steps = changes.get("run.steps", config.run.steps)
    if warmup >= steps > 0:
        raise ConfigError(
            f"a warm-up of {warmup} steps does not fit a run of {steps}: give --lr-warmup-iters below --train-iters, "
            "or raise --train-iters"
        )


def _sizes(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--group-query-attention" in given:
        changes.setdefault("model.num_key_value_heads", 1)
    path = changes.get("model.path", config.model.path)
    shapes = [
        flag.name
        for flag in FLAGS
        if flag.name in given and flag.key.startswith("model.") and flag.key != "model.path"
        if flag.name not in _ROUTER_FLAGS  # which have a say with a checkpoint too
    ]
    if path and shapes:
        raise ConfigError(
            f"{shapes[0]} has no effect on the checkpoint {path}, which brings its architecture; leave it out"
        )
    if "--eval-iters" in given:
        batch = changes.get("data.batch_size", config.data.batch_size)
        changes["metrics.eval_tokens"] = (
            given["--eval-iters"] * batch * changes.get("data.seq_len", config.data.seq_len)
        )


def _experts(config: TrainConfig, given: Given, changes: Changes) -> None:
    if "--num-experts" not in given:
        _needs(given, _EXPERT_FLAGS, "--num-experts", "Megatron's layers are dense then")
        if not (config.model.num_experts or changes.get("model.path", config.model.path)):
            _needs(given, _ROUTER_FLAGS, "--num-experts", "Megatron's layers are dense then")
        return
    if config.model.family not in ("qwen3", "qwen3_moe"):
        raise ConfigError(
            f"--num-experts needs model.family qwen3_moe, the config file says {config.model.family}; leave that out"
        )
    changes["model.family"] = "qwen3_moe"
    changes.setdefault("model.num_experts_per_tok", 2)
    width = changes.get("model.intermediate_size", config.model.intermediate_size)
    changes["model.moe_intermediate_size"] = given.get("--moe-ffn-hidden-size", width)
    if changes["model.num_experts_per_tok"] > given["--num-experts"]:
        raise ConfigError(
            f"--moe-router-topk {changes['model.num_experts_per_tok']} must be at most --num-experts "
            f"{given['--num-experts']}; Megatron's default is 2"
        )


def _places(config: TrainConfig, given: Given, changes: Changes) -> None:
    if given.get("--save", given.get("--load")) != given.get("--load", given.get("--save")):
        raise ConfigError(
            f"--load {given['--load']} and --save {given['--save']} must be one directory: a run goes on where it is; "
            "--pretrained-checkpoint starts a new run from a checkpoint's weights"
        )


def _recompute(config: TrainConfig, given: Given, changes: Changes) -> None:
    granularity = given.get("--recompute-granularity")
    if "--recompute-activations" in given:
        if granularity == "full":
            raise ConfigError(
                "--recompute-activations is selective, --recompute-granularity says full; give one of them"
            )
        granularity = "selective"
    if granularity != "full":
        _needs(
            given, ("--recompute-method", "--recompute-num-layers"), "--recompute-granularity full", "they describe it"
        )
        if granularity:
            changes["run.recompute"] = "none"
        return
    method, num_layers = given.get("--recompute-method"), given.get("--recompute-num-layers", 1)
    if method is None:
        raise ConfigError("--recompute-granularity full needs --recompute-method uniform or block (as in Megatron)")
    if method == "uniform" and num_layers != 1:
        raise ConfigError(
            f"--recompute-num-layers {num_layers} is refused with uniform: layers are recomputed one by one"
        )
    changes |= {"run.recompute": "full", "run.recompute_num_layers": num_layers if method == "block" else 0}


_GROUPS: tuple[Callable[[TrainConfig, Given, Changes], None], ...] = (
    _fp8,
    _implementation,
    _layers_in_bf16,
    _optimizer,
    _rates,
    _warmup,
    _sizes,
    _experts,
    _places,
    _recompute,
)
