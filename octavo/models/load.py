"""load_model: a Decoder from a checkpoint directory, or a new one from a ModelConfig, under given numerics."""

import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from octavo.deprecation import former_keywords
from octavo.errors import CheckpointError, ConfigError
from octavo.models.checkpoint import record
from octavo.models.checkpoint.dialects import newest_model, read_config, read_layout
from octavo.models.checkpoint.names import parameter_names
from octavo.models.checkpoint.stored import StoredWeights, read_stored
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.device import check_device
from octavo.models.fill import fill
from octavo.nn import load_fp8_state_dict
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.ops._runtime.recipe_support import require_recipe

AUTO_RECIPE = "auto"


@former_keywords(codes_only="keep_codes_only")
def load_model(
    path_or_config: str | Path | ModelConfig,
    *,
    device: torch.device | str = "cpu",
    recipe: Recipe | str = "bf16",
    kv_cache_dtype: str = "bf16",
    exact: bool = False,
    attention_dtype: str = "bf16",
    kv_scales: str = "per_token_head",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    trainable: bool = False,
    keep_codes_only: bool = False,
    allow_unused: Collection[str] = (),
    allow_missing: Collection[str] = (),
    cut: Callable[[Decoder], object] | None = None,
) -> Decoder:
    """Load a checkpoint, or make a new model.

    To keep the codes of an FP8 checkpoint, as octavo.LLM does, pass recipe="auto" (or the recipe that its dialect
    declares). They are then all that its linears hold: such a model samples and scores, and none of its parameters
    takes a gradient. Under a recipe with other scales, the default "bf16" too, or with trainable=True, the codes are
    decoded to dtype, with a warning. Linears that the checkpoint keeps in high precision stay so under an FP8 recipe.
    docs/checkpoints.md lists the dialects.

    Args:
        path_or_config: a local directory with config.json and safetensors files, that of a training run or step (its
            newest model, which the log names), or a ModelConfig for random weights.
        recipe: of the model's numerics (octavo.Numerics, the next four as well). "auto" is the checkpoint's own: bf16
            where nothing is quantized and for a ModelConfig.
        kv_cache_dtype: format of the KV cache.
        exact: trainer and sampler agree in every bit.
        attention_dtype: format of attention's products.
        kv_scales: of an FP8 cache.
        dtype: of parameters and activations, torch.bfloat16 or torch.float32; None for the checkpoint's own (fp16
            becomes bf16), bf16 for a new model.
        seed: of the weights of a new model, and of those that allow_missing lets a checkpoint lack.
        trainable: every parameter shall take a gradient.
        keep_codes_only: quantize high-precision weights of a checkpoint one by one on the device and keep the codes
            alone, so that loading to FP8 never takes more of the device's memory than loading to bf16. For sampling and
            scoring: no parameter takes a gradient. Recipes with state, emulated ones and those with GEMMs in high
            precision keep their weights, and so does a new model.
        allow_unused: Hugging Face names, with wildcards, of tensors and scales that may be left over in the files.
        allow_missing: those that may be lacking. A linear that lacks its input scale runs in high precision.
        cut: called with the model in its numerics, before a checkpoint's values are read: `lambda model:
            octavo.parallel.parallelize(model, mesh)`. Of the files no more is then read than this rank keeps, but for
            weights whose share alone does not have their bits, which are read whole, one at a time: those that are
            quantized now under scales that ranks share (tensorwise; rowwise, of what "reduce" cuts by columns), and
            codes in blocks that are cut where they are decoded.
    Returns:
        The model; its conversion_report says what runs in FP8 and why, kv_scales what the files say of the KV cache.
    Raises:
        CheckpointError: see octavo.models.checkpoint.stored.read_stored; a static recipe for a checkpoint without input
            scales.
        RecipeError: see octavo.Numerics.
        ConfigError: trainable and keep_codes_only together, or not a device's name.
        BackendError: this machine has no such device, or the device does not have the recipe.
    """
    if trainable and keep_codes_only:
        raise ConfigError("trainable needs every weight, keep_codes_only gives them up; ask for one of the two")
    check_device(device)
    if isinstance(path_or_config, ModelConfig):
        asked = get_recipe("bf16" if recipe == AUTO_RECIPE else recipe)
        numerics = Numerics(asked, kv_cache_dtype, exact, attention_dtype, kv_scales)
        require_recipe(asked, torch.device(device))
        model = Decoder(path_or_config, dtype=dtype or torch.bfloat16, device=device, seed=seed)
        model.set_numerics(numerics)
        if cut is not None:
            cut(model)
        return model
    path = newest_model(Path(path_or_config))
    asked = read_layout(path, read_config(path)).recipe if recipe == AUTO_RECIPE else get_recipe(recipe)
    numerics = Numerics(asked, kv_cache_dtype, exact, attention_dtype, kv_scales)  # refused before the files are read
    require_recipe(asked, torch.device(device))
    stored = read_stored(path, allow_unused=allow_unused, allow_missing=allow_missing)
    for remark in stored.layout.remarks:
        warnings.warn(f"{path}: {remark}", stacklevel=3)
    known = record.read(path)
    ignore = _high_precision_linears(stored, known, numerics.recipe) if numerics.recipe.is_fp8 else ()
    model = Decoder(stored.config, dtype=dtype or stored.dtype, device="meta")
    used = numerics.recipe
    needs_values = used.has_state or used.is_emulated or used.high_precision_gemms or not used.is_fp8
    keeps_codes = keep_codes_only and not needs_values
    if cut is not None:
        model.set_numerics(numerics, ignore=ignore)  # whose blocks are not cut
        cut(model)
    fill(model, stored, numerics.recipe, device, ignore=ignore, seed=seed, trainable=trainable, keeps_codes=keeps_codes)
    if numerics.recipe.has_state and (state := record.read_recipe_state(path)):  # else it begins
        load_fp8_state_dict(model, state)
    model.to(device)
    if cut is None:
        model.set_numerics(numerics, ignore=ignore)
    model.weight_version = known.weight_version if known else 0
    model.kv_scales = stored.kv_scales
    return model


def _high_precision_linears(stored: StoredWeights, known: record.Record | None, recipe: Recipe) -> tuple[str, ...]:
    """octavo's names of the linears that the checkpoint's author kept out of FP8."""
    weights = [p for p in parameter_names(stored.config) if p.is_linear_weight]
    linears = [p.name.removesuffix(".weight") for p in weights]
    if recipe.static_input:
        if not stored.input_scales:
            raise CheckpointError(
                f"recipe {recipe.name!r} has static input scales, and this {stored.layout.dialect} checkpoint holds "
                "none; load it with recipe='auto'"
            )
        return tuple(linear for linear in linears if linear not in stored.input_scales)
    # the record of a model in another recipe knows nothing of the blocks that a dialect leaves out
    if known is not None and (stored.layout.weight is None or known.recipe == stored.layout.recipe.name):
        return known.high_precision
    if stored.layout.weight is None:
        return ()
    return tuple(linear for linear, p in zip(linears, weights, strict=True) if not stored.is_quantized(p))
