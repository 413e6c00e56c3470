"""NeMo-RL's names around FP8 and its correction; what else a NeMo-RL file says is refused by name."""

from collections.abc import Iterable
from pathlib import Path

from octavo.integrations.config.document import read_document
from octavo.integrations.config.reader import Reader, former_drop_refused
from octavo.integrations.config.verl_run import KV_DTYPES
from octavo.numerics.recipe import FORMAT_RECIPES, get_recipe
from octavo.rl.config import RLConfig

VLLM = "policy.generation.vllm_cfg"
FP8 = "policy.megatron_cfg.fp8_cfg"
LOSS = "loss_fn"

KNOWN = (
    *(f"{VLLM}.{name}" for name in ("precision", "kv_cache_dtype", "use_deep_gemm", "is_mx")),
    *(f"{VLLM}.num_{end}_layers_in_bf16" for end in ("first", "last")),
    *(f"{VLLM}.pow2_{role}_scaling_factors" for role in ("weight", "activation")),
    f"{VLLM}.quantization_ignored_layer_kws",
    *(f"{FP8}.{name}" for name in ("enabled", "fp8", "fp8_recipe", "fp8_param")),
    f"{LOSS}.use_importance_sampling_correction",
    *(f"{LOSS}.truncated_importance_sampling_{end}" for end in ("type", "ratio", "ratio_min")),
)
_ALL_LAYERS = "octavo quantizes every linear but lm_head and routers on both sides; give the default, or leave it out"
REMEDIES = {
    f"{VLLM}.": "octavo reads NeMo-RL's FP8 and correction keys alone; look for the key in octavo's [rollout]",
    f"{VLLM}.num_": _ALL_LAYERS,
    f"{VLLM}.quantization_ignored_layer_kws": _ALL_LAYERS,
    f"{VLLM}.pow2_": "octavo's scales are fp32 on both sides, which is nearer to bf16 on Hopper; leave it out",
    f"{FP8}.fp8_param": "masters and bf16 weights stay, FP8 codes are derived from them; give false, or leave it out",
    f"{FP8}.": "octavo reads enabled, fp8 and fp8_recipe here; leave it out",
    "policy.": "octavo reads NeMo-RL's FP8 and correction keys alone; look for the key in octavo's own config",
    "grpo.": "look for the key in octavo's [rollout], [algorithm] and [trainer]",
    "loss_fn.": "look for the key in octavo's [algorithm] and [correction]",
    "": "octavo reads NeMo-RL's FP8 and correction keys alone; look for the key in octavo's own config",
}


def read_nemo(
    path: Path | None,
    overrides: Iterable[str],
    base: RLConfig | None = None,
    *,
    set_keys: RLConfig | None = None,
    ignore_unsupported: bool = False,
    drop_refused: bool | None = None,
) -> tuple[RLConfig, list[str]]:
    """An octavo config with NeMo-RL's keys over it; see read_verl. What no key names is as in octavo's config."""
    ignore_unsupported = former_drop_refused(drop_refused, ignore_unsupported)
    document = read_document(path, overrides)
    reader = Reader("NeMo-RL", document, base or set_keys or RLConfig(), has_base=True)
    for name, inert in (
        (f"{VLLM}.use_deep_gemm", (True, False)),  # which kernel computes the same product
        (f"{VLLM}.num_first_layers_in_bf16", (0,)),
        (f"{VLLM}.num_last_layers_in_bf16", (0,)),
        (f"{VLLM}.pow2_weight_scaling_factors", (False,)),
        (f"{VLLM}.pow2_activation_scaling_factors", (False,)),
        (f"{VLLM}.quantization_ignored_layer_kws", ([], None)),
        (f"{FP8}.fp8_param", (False,)),
        (FP8, (None,)),
    ):
        if reader.is_given(name) and document[name].value in inert:
            reader.skip(name)
    _precision(reader)
    _correction(reader)
    reader.refuse_rest(KNOWN, REMEDIES)
    return reader.finish(ignore_unsupported=ignore_unsupported), reader.notes


def _precision(reader: Reader) -> None:
    precision, is_mx, kv = (f"{VLLM}.{name}" for name in ("precision", "is_mx", "kv_cache_dtype"))
    enabled, form, recipe = (f"{FP8}.{name}" for name in ("enabled", "fp8", "fp8_recipe"))
    sampled = reader.take(precision, str, "bfloat16", ("bfloat16", "fp8"))
    has_mx = reader.take(is_mx, bool, False)
    if has_mx and sampled != "fp8":
        reader.refuse(is_mx, f"it has no effect without {precision}=fp8; give that too")
    is_trained = reader.take(enabled, bool, False)
    fp8_format = reader.take(form, str, "hybrid", ("hybrid", "e4m3"))
    trained = reader.take(recipe, str, "delayed", FORMAT_RECIPES)
    if reader.is_given(enabled):
        reader.put("trainer.recipe", trained if is_trained else "bf16", enabled, *((recipe,) if is_trained else ()))
        if is_trained:
            reader.put("trainer.fp8_format", fp8_format, form, enabled)
    elif reader.is_given(form, recipe):
        reader.refuse(form if reader.is_given(form) else recipe, f"it has no effect without {enabled}; give that too")
    if reader.is_given(kv):
        cache = KV_DTYPES[reader.take(kv, str, "auto", tuple(KV_DTYPES))]
        if cache == "fp8" and reader.is_given(precision) and sampled != "fp8":
            reader.refuse(
                kv, f"NeMo-RL has an FP8 cache with {precision}=fp8 alone; give that too, or octavo's own key"
            )
        reader.put("rollout.kv_cache_dtype", cache, kv)
    if not reader.is_given(precision, enabled):
        return
    trainer = reader.held("trainer.recipe")
    sampler = reader.base.rollout.recipe or reader.base.trainer.recipe
    if reader.is_given(precision):
        sampler = "bf16" if sampled != "fp8" else "mxfp8" if has_mx else "blockwise"
    is_exact = trainer == sampler and get_recipe(trainer).is_row_local
    reader.put("rollout.recipe", "" if is_exact else sampler, precision, enabled, *((is_mx,) if has_mx else ()))
    reader.put("exact", is_exact, precision, enabled)


def _correction(reader: Reader) -> None:
    use = f"{LOSS}.use_importance_sampling_correction"
    kind, high, low = (f"{LOSS}.truncated_importance_sampling_{end}" for end in ("type", "ratio", "ratio_min"))
    is_used = reader.take(use, bool, False)
    form = reader.take(kind, str, "tis", ("tis", "icepop"))
    cap, floor = reader.take(high, float, None), reader.take(low, float, None)
    if not is_used:
        if reader.is_given(use):
            reader.put("correction.kind", "none", use)
        elif reader.is_given(high):
            reader.refuse(high, f"it has no effect without {use}; give that too")
        return
    if cap is None:
        reader.refuse(use, f"octavo's weights have a cap; give {high}, 2.0 say")
        return
    reader.put("correction.kind", "token_tis" if form == "tis" else "icepop", use, kind)
    reader.put("correction.cap", cap, high)
    if form == "icepop" and floor is not None:
        reader.put("correction.low", floor, low)
    elif floor:
        reader.refuse(low, "octavo's token weights have no lower bound; give type icepop, or leave it out")
