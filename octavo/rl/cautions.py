"""What a config asks for that a person should think again about: legal, and said at the start, quiet runs included."""

from octavo.rl.config import RLConfig


def cautions(config: RLConfig) -> list[str]:
    """One line for each, with the remedies."""
    section, rollout = config.correction, config.rollout_numerics
    kinds = {"kind": section.kind, "reject": section.reject}
    given = [f"correction.{key} = {value!r}" for key, value in kinds.items() if value != "none"]
    given += [f"correction.veto = {section.veto:g}"] if section.veto else []
    if config.exact and given:
        return [
            f"{', '.join(given)} has no effect beside exact = true: both sides' logprobs are equal, so every weight is "
            "1 and nothing is rejected; leave it out, or set exact = false"
        ]
    if config.exact or given or rollout == config.trainer_numerics:
        return []
    parts = [f"linears in {rollout.recipe.name}"] if rollout.recipe.is_fp8 else []
    parts += ["FP8 KV cache"] if rollout.kv_cache_dtype == "fp8" else []
    parts += ["FP8 attention"] if rollout.attention_dtype == "fp8" else []
    return [
        f"the sampler's numerics ({', '.join(parts) or rollout.recipe.name}) are not the trainer's, and nothing weighs "
        "the difference (exact = false, correction.kind = 'none'); set correction.kind = 'token_tis', or exact = true, "
        "which leaves none, or one precision on both sides"
    ]
