"""verl's fully asynchronous mode, where octavo's means the same."""

from octavo.integrations.config.reader import Reader
from octavo.integrations.config.verl_keys import PARTIAL, STALENESS, SYNC
from octavo.integrations.config.verl_run import num_minibatches

_WHOLE = (
    "octavo bounds the updates between a token and its training, not the stale share of a batch; give 0, or 1 for "
    "batches that may be one update old"
)
_NO_WAITING = (
    "rollouts that an update meets go on under the new weights, or are sampled again (octavo's asynchronous."
    "partial_rollouts = 'drop'), and none is waited for; give true"
)


def read_asynchronous(reader: Reader) -> None:
    """A threshold of n lets the sampler be n batches ahead of an update: with whole numbers the bound is octavo's."""
    threshold = reader.take(STALENESS, float, None)
    is_partial = reader.take(PARTIAL, bool, True)
    every = reader.take(SYNC, int, None)
    if threshold is None:
        for name in (PARTIAL, SYNC):
            reader.refuse(name, f"it has no effect without {STALENESS}; give that too")
        return
    if threshold < 0 or not threshold.is_integer():
        reader.refuse(STALENESS, _WHOLE)
        return
    updates = num_minibatches(reader)
    if every is not None and every != updates:
        why = f"octavo hands weights over once a rollout step, after its {updates} updates; give {updates}"
        reader.refuse(SYNC, f"{why}, or another data.train_batch_size")
    reader.put("asynchronous.max_policy_lag", int(threshold), STALENESS)
    if threshold and not is_partial:
        reader.refuse(PARTIAL, _NO_WAITING)
    elif threshold:
        reader.put("asynchronous.partial_rollouts", "continue", PARTIAL)
