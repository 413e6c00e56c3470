"""verl's keys of the loss, the advantages and the rollout correction, where several mean something together."""

import math

from octavo.integrations.config.reader import Reader
from octavo.integrations.config.verl_keys import ACTOR, CORRECTION, OVERLONG

# the kind of weights that an octavo config has, in verl's words
_HELD = {"none": None, "token_tis": "token", "icepop": "token", "sequence_tis": "sequence"}


def read_clipping(reader: Reader) -> None:
    both, low, high, dual = (f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high", "_c"))
    mode = f"{ACTOR}.policy_loss.loss_mode"
    loss = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}[
        reader.take(mode, str, "vanilla", ("vanilla", "gspo", "cispo"))
    ]
    ratio = reader.take(both, float, 0.2)
    if ratio != 0.2 and not (reader.is_given(low) and reader.is_given(high)):
        reader.refuse(both, "verl reads clip_ratio_low and clip_ratio_high in its place, 0.2 each; give these two")
    reader.put("algorithm.policy_loss", loss, mode)
    for name, key in ((low, "algorithm.clip_low"), (high, "algorithm.clip_high")):
        bound = reader.take(name, float, None)
        if bound is None and reader.is_given(name):  # null stands for clip_ratio
            reader.put(key, ratio, name, both)
        else:
            reader.put(key, 0.2 if bound is None else bound, name)
    dual_bound = reader.take(dual, float, 3.0)
    if reader.held("algorithm.policy_loss") != "ppo" and reader.is_active(mode):  # verl has no dual clip there
        reader.put("algorithm.clip_c", 0.0, mode)
        if loss == "gspo":  # whatever loss_agg_mode says
            reader.forget("algorithm.loss_aggregation")
            reader.put("algorithm.loss_aggregation", "seq-mean-token-mean", mode)
    else:
        reader.put("algorithm.clip_c", dual_bound, dual)


def read_reference(reader: Reader) -> None:
    use, coef, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    is_used = reader.take(use, bool, False)
    value = reader.take(coef, float, 0.001)
    form = reader.take(kind, str, "low_var_kl")
    if is_used and form not in ("low_var_kl", "k3"):
        reader.refuse(kind, "octavo has low_var_kl, which is k3; give one of these")
    if reader.is_given(use) or not reader.has_base:
        reader.put("algorithm.kl_coef", value if is_used else 0.0, use, *((coef,) if is_used else ()))
    elif reader.is_given(coef):
        reader.refuse(coef, f"it has no effect without {use}; give that too")
    in_reward = "algorithm.use_kl_in_reward"
    if reader.take(in_reward, bool, False):
        reader.refuse(in_reward, f"octavo puts the KL into the loss; give {use}=true and {coef}")
    for name in ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"):
        reader.skip(name)  # of the KL in the reward, which is off


def read_advantages(reader: Reader) -> None:
    name = "algorithm.adv_estimator"
    estimator = reader.take(name, str, None, ("grpo", "rloo"))
    if estimator is None:
        reader.refuse(name, "octavo has no critic; give grpo or rloo", "gae", "algorithm.name")
    else:
        reader.put("algorithm.name", estimator, name)
    metric, limit = "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"
    reader.take(metric, str, None, ("acc", "score"))
    batches = reader.take(limit, int, None)
    if batches is None or not reader.held("algorithm.filter_groups"):
        return
    if batches < 1:
        reader.refuse(limit, "octavo needs a limit; give 1 or more")
        return
    reader.put("algorithm.max_gen_batches", batches, limit)


def read_correction(reader: Reader) -> None:
    level, threshold, cap = (
        f"{CORRECTION}.rollout_is",
        f"{CORRECTION}.rollout_is_threshold",
        f"{ACTOR}.tis_imp_ratio_cap",
    )
    normalize, veto = f"{CORRECTION}.rollout_is_batch_normalize", f"{CORRECTION}.rollout_token_veto_threshold"
    kind = reader.take(level, str, None, ("token", "sequence"))
    bounds = _bounds(reader, threshold, "2.0")
    old = reader.take(cap, float, None)
    is_normalized = reader.take(normalize, bool, False)
    if old is not None and old > 0:  # verl's name before rollout_correction
        kind, bounds = "token", (None, old)
        reader.put("correction.kind", "token_tis", cap)
        reader.put("correction.cap", old, cap)
    low, high = bounds
    if old is None and kind is None and not reader.is_given(level):
        kind = _HELD[reader.held("correction.kind")] if reader.has_base else None
    if kind is None and reader.is_given(threshold) and (low, high) != (None, 2.0):
        reader.refuse(threshold, f"it has no effect without {level}; give that too")
    if kind == "sequence" and low is not None:
        reader.refuse(threshold, "two bounds go with rollout_is=token alone (IcePop); give one number")
    elif old is None:
        kinds = {None: "none", "token": "token_tis" if low is None else "icepop", "sequence": "sequence_tis"}
        reader.put("correction.kind", kinds[kind], level, *((threshold,) if kind == "token" else ()))
        if kind is not None:
            reader.put("correction.cap", high, threshold, level)
        if low is not None and kind == "token":
            reader.put("correction.low", low, threshold)
    if is_normalized and kind is None:
        reader.refuse(normalize, f"it has no weights to divide; give {level}")
    else:
        reader.put("correction.batch_normalize", is_normalized, normalize)
    reader.put("correction.veto", reader.take(veto, float, None) or 0.0, veto)
    _rejection(reader)


def _rejection(reader: Reader) -> None:
    name, threshold = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    lower = f"{CORRECTION}.rollout_rs_threshold_lower"
    kinds = {"token_k1": "token", "token_k2": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    kinds |= {"seq_mean_k3": "k3"}
    old = {"token": "token", "sequence": "sequence", "geometric": "geometric"}  # names before the divergences
    option = reader.take(name, str, None, (*kinds, *old))
    given_low = reader.take(lower, float, None)
    low, high = _bounds(reader, threshold, None)
    if option is None:
        reader.put("correction.reject", "none", name)
        if reader.is_given(threshold) and high is not None:
            reader.refuse(threshold, f"it has no effect without {name}; give that too")
        return
    if high is None:
        reader.refuse(name, f"it needs {threshold}")
        return
    low = given_low if given_low is not None else low
    if option in ("token_k2", "seq_mean_k3") and low is not None:
        reader.refuse(threshold, f"{option} has one bound; give one number")
        return
    if option == "token_k2":  # half the square of the log ratio
        low, high = math.exp(-math.sqrt(2.0 * high)), math.exp(math.sqrt(2.0 * high))
    elif option in kinds and option.endswith("k1"):  # verl bounds -log ratio there: the ratio's inverse
        low = 1.0 / high if low is None else low
        low, high = 1.0 / high, 1.0 / low
    elif option in old and low is None:
        low = 1.0 / high
    reader.put("correction.reject", {**kinds, **old}[option], name)
    if low is not None:
        reader.put("correction.reject_low", low, threshold, *((lower,) if given_low is not None else ()))
    reader.put("correction.reject_high", high, threshold)


def _bounds(reader: Reader, name: str, default: str | None) -> tuple[float | None, float | None]:
    """(low, high) of "2.0" or "0.5_2.0"."""
    text = reader.take(name, str, default)
    if text is None:
        return None, None
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or any(not number > 0 or math.isinf(number) for number in numbers):
        reader.refuse(name, "it must be one positive number, or two joined as 0.5_2.0")
        return None, None
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def read_overlong(reader: Reader) -> None:
    for prefix in OVERLONG:
        use, length, factor = f"{prefix}.enable", f"{prefix}.len", f"{prefix}.penalty_factor"
        is_used = reader.take(use, bool, False)
        tokens = reader.take(length, int, 0)
        penalty = reader.take(factor, float, 1.0)
        if reader.is_given(use):
            reader.put("algorithm.overlong_buffer", tokens if is_used else 0, use, *((length,) if is_used else ()))
            if is_used:
                reader.put("algorithm.overlong_penalty", penalty, factor, use)
