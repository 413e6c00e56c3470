"""What an engine itself says of its weights, before and after an update: a tensor that should have changed and did not.

Engines fuse projections, so their names are matched to the checkpoint's: `qkv_proj`, `gate_up_proj`, and of experts
`w13_weight` and `w2_weight`. A prefix (a rank, say) may stand before a name.
"""

import re
from collections.abc import Mapping

from octavo.weights.errors import WeightAuditError

_FUSED = (
    (r"\.(q|k|v)_proj\.(weight|bias)$", r".qkv_proj.\2"),
    (r"\.experts\.\d+\.(gate|up)_proj\.weight$", ".experts.w13_weight"),
    (r"\.experts\.\d+\.down_proj\.weight$", ".experts.w2_weight"),
    (r"\.(gate|up)_proj\.(weight|bias)$", r".gate_up_proj.\2"),
)


def engine_name(name: str) -> str:
    """The name under which vLLM and SGLang hold a checkpoint's tensor, where they fuse it with others."""
    for pattern, replacement in _FUSED:
        fused, count = re.subn(pattern, replacement, name)
        if count:
            return fused
    return name


def check_updated(
    theirs_before: Mapping[str, str],
    theirs_after: Mapping[str, str],
    ours_before: Mapping[str, str],
    ours_after: Mapping[str, str],
) -> int:
    """Refuse an update that left a tensor as it was.

    Args:
        theirs_before: the engine's names -> its checksums, before the update.
        theirs_after: the engine's names -> its checksums.
        ours_before: the checkpoint's names -> ours, of the version before.
        ours_after: the checkpoint's names -> ours, of this one.
    Returns:
        The number of the engine's tensors that were checked.
    Raises:
        WeightAuditError: every part of a tensor changed on our side, and the engine's kept its checksum.
    """
    changed = {name for name, checksum in ours_after.items() if ours_before.get(name) not in (None, checksum)}
    parts: dict[str, list[str]] = {}
    for name in ours_after:
        parts.setdefault(engine_name(name), []).append(name)
    num_checked = 0
    for held, checksum in theirs_after.items():
        known = next((fused for fused in parts if re.search(rf"(^|\W){re.escape(fused)}$", held)), None)
        if known is None or held not in theirs_before or not changed.issuperset(parts[known]):
            continue
        num_checked += 1
        if theirs_before[held] == checksum:
            raise WeightAuditError(
                "un-updated tensor",
                held,
                f"the engine's checksum is what it was before the update, and {parts[known][0]} changed; the engine "
                "did not take it over",
            )
    return num_checked
