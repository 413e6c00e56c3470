"""Which model an LLM is of and how it computes: a checkpoint that is loaded as asked, or a Decoder that must agree."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError, ConfigError, RecipeError
from octavo.models import Decoder, ModelConfig, load_model
from octavo.models.checkpoint.dialects import read_config, read_layout
from octavo.models.device import check_device
from octavo.models.load import AUTO_RECIPE
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.ops._runtime.kernel_cache import use_checked_cache
from octavo.ops.attention import PAGE_SIZE
from octavo.serve.engine import EngineConfig
from octavo.serve.engine.kv_cache import check_pages_exist

Device = torch.device | str

# quantization="fp8" of a checkpoint in high precision (docs/adr/0029); one that is FP8 keeps its own
FP8_RECIPE = "rowwise"
# what `dtype` may be; None is the checkpoint's own
_DTYPES: dict[str | torch.dtype | None, torch.dtype | None] = {
    "auto": None,
    None: None,
    **dict.fromkeys(("bfloat16", "bf16", torch.bfloat16), torch.bfloat16),
    **dict.fromkeys(("float32", "float", "fp32", torch.float32), torch.float32),
}
# what vLLM's quantization may be beside "fp8": formats of checkpoints
_FORMATS = (
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "bitsandbytes",
    "gguf",
    "compressed-tensors",
    "modelopt",
    "fbgemm_fp8",
)
# names of vLLM's
_KV_CACHE_DTYPES = {"bfloat16": "bf16", "fp8_e4m3": "fp8"}


def named_kv_cache_dtype(name: str) -> str:
    """LLM's `kv_cache_dtype`, also by vLLM's name."""
    return _KV_CACHE_DTYPES.get(name, name)


def check_checkpoint(
    path: str | Path,
    quantization: str | None,
    kv_cache_dtype: str,
    attention_dtype: str = "auto",
    *,
    exact: bool = False,
    device: Device | None = None,
    kv_scales: str = "per_token_head",
    limits: EngineConfig | None = None,
) -> None:
    """Refuse what no checkpoint could be served under, and what is no checkpoint, by config.json alone.

    Args:
        limits: of the engine that the checkpoint is for. The rest as LLM has it.
    Raises:
        ConfigError: a name or limits that it could not be served under.
        RecipeError: an unknown recipe, or numerics that do not go together.
        CheckpointError: it is no checkpoint that octavo loads.
        BackendError: this machine has no such device, or too little memory.
    """
    if kv_cache_dtype not in ("auto", "bf16", "fp8"):
        raise ConfigError(f"kv_cache_dtype must be auto, bf16 or fp8, got {kv_cache_dtype!r}")
    check_device(device)
    Numerics(kv_cache_dtype=_or_bf16(kv_cache_dtype), attention_dtype=_or_bf16(attention_dtype), kv_scales=kv_scales)
    Numerics(_recipe_asked(path, quantization), exact=exact)
    if limits is not None:
        cache_len = None if limits.num_kv_pages is None else limits.num_kv_pages * PAGE_SIZE
        config = ModelConfig.from_hf(read_config(path))
        limits.resolve_max_model_len(config.max_position_embeddings, cache_len)
        if limits.num_kv_pages is not None:
            check_pages_exist(limits.num_kv_pages, config, kv_cache_dtype, device)


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """LLM's `dtype` as torch's; None for the checkpoint's own.

    Raises:
        ConfigError: it is none of these.
    """
    if not isinstance(dtype, str | torch.dtype | None) or dtype not in _DTYPES:
        raise ConfigError(
            f"dtype must be 'auto', 'bfloat16' or 'float32', got {dtype!r}; an fp16 checkpoint runs in bfloat16, and "
            "FP8 is asked for by quantization='fp8'"
        )
    return _DTYPES[dtype]


def eos_ids_of_generation(path: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of a checkpoint's generation_config.json, which may be more than config.json's.

    Raises:
        CheckpointError: it is no JSON, or has other ids than integers.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a JSON object: {error}; correct it or remove it") from None
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(i) is int and i >= 0 for i in several):
        raise CheckpointError(f"{file}: eos_token_id must be token ids, got {ids!r:.80}; correct it or remove it")
    return tuple(several)


def _recipe_asked(path: str | Path, quantization: str | None) -> Recipe:
    """The recipe that a checkpoint is asked for under; its own where nothing else is said."""
    if quantization in _FORMATS:
        raise RecipeError(
            f"quantization must be 'fp8' or a recipe's name, got {quantization!r}; leave it out: a checkpoint's own "
            "format is read from its config.json (FP8 and high precision alone, see docs/checkpoints.md)"
        )
    asked = get_recipe(quantization) if quantization and quantization not in ("fp8", AUTO_RECIPE) else None
    own = read_layout(path, read_config(path)).recipe
    if asked is None:
        asked = get_recipe(FP8_RECIPE) if quantization == "fp8" and not own.is_fp8 else own
    return asked


def numerics_asked(path: str | Path, asked: Mapping[str, Any]) -> Numerics:
    """The numerics of a model that load_for_inference loads, by the config files alone. Errors as octavo.Numerics.

    Args:
        asked: load_for_inference's arguments; device and dtype change none.
    """
    kv_scales = "per_token_head" if asked["kv_scales"] == "auto" else asked["kv_scales"]
    kv_cache_dtype, attention_dtype = _or_bf16(asked["kv_cache_dtype"]), _or_bf16(asked["attention_dtype"])
    return Numerics(
        _recipe_asked(path, asked["quantization"]), kv_cache_dtype, bool(asked["exact"]), attention_dtype, kv_scales
    )


def load_for_inference(
    path: str | Path,
    quantization: str | None,
    kv_cache_dtype: str,
    exact: bool | None,
    device: Device | None,
    attention_dtype: str,
    dtype: torch.dtype | None,
    kv_scales: str,
    *,
    cut: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """Load a checkpoint for inference under the numerics asked for; cut is load_model's."""
    device = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    use_checked_cache(device)
    return load_model(
        path,
        device=device,
        recipe=_recipe_asked(path, quantization),
        kv_cache_dtype=_or_bf16(kv_cache_dtype),
        exact=False if exact is None else exact,
        attention_dtype=_or_bf16(attention_dtype),
        kv_scales="per_token_head" if kv_scales == "auto" else kv_scales,
        dtype=dtype,
        keep_codes_only=True,
        cut=cut,
    )


def _or_bf16(dtype: str) -> str:
    """What "auto" means for a checkpoint."""
    return "bf16" if dtype == "auto" else dtype


def check_numerics(
    model: Decoder,
    quantization: str | None,
    kv_cache_dtype: str,
    exact: bool | None,
    device: Device | None,
    attention_dtype: str,
    dtype: torch.dtype | None,
    kv_scales: str,
) -> None:
    """Refuse what the given model is not.

    Raises:
        ConfigError: it is not; names the argument.
    """
    numerics, own_dtype = model.numerics, next(model.parameters()).dtype
    is_kv_dtype = kv_cache_dtype in ("auto", numerics.kv_cache_dtype)
    names = (None, AUTO_RECIPE, numerics.recipe.name)
    is_recipe = quantization in names or (quantization == "fp8" and numerics.recipe.is_fp8)
    checks = [
        ("quantization", quantization, numerics.recipe.name, is_recipe),
        ("kv_cache_dtype", kv_cache_dtype, numerics.kv_cache_dtype, is_kv_dtype),
        ("exact", exact, numerics.exact, exact in (None, numerics.exact)),
        (
            "attention_dtype",
            attention_dtype,
            numerics.attention_dtype,
            attention_dtype in ("auto", numerics.attention_dtype),
        ),
        ("device", device, model.device, device is None or torch.device(device).type == model.device.type),
        ("dtype", dtype, own_dtype, dtype in (None, own_dtype)),
        ("kv_scales", kv_scales, numerics.kv_scales, kv_scales in ("auto", numerics.kv_scales)),
    ]
    for name, asked, held, agrees in checks:
        if not agrees:
            raise ConfigError(
                f"{name}={asked!r} is not the given model's, which is {held!r}; leave {name} out, or change the model "
                "first (model.set_numerics)"
            )
