"""What a measurement of exactness found: differing logprobs, what happened on the way, and what should have."""

import dataclasses
import math

import torch

from bench.record import Record
from bench.serve.checked_models import CheckedModel
from bench.serve.exactness_plan import ExactnessPlan
from bench.serve.row_watch import RowWatch
from octavo.models import Decoder
from octavo.ops.gemm.scaled_mm.exact import bucket_of
from octavo.serve import RequestOutput
from octavo.serve.engine import EngineStats

DELTA = "max |delta logprob|"
SMALL_TILE_ROWS = 64  # hp_mm takes another tile above
LARGE_GROUP_ROWS = 128  # grouped_mm takes another tile where experts get as many on average


@dataclasses.dataclass
class Tally:
    """Tokens compared so far, of which `num_off` differ; `first` says which was the first."""

    num_tokens: int = 0
    num_off: int = 0
    delta: float = 0.0
    total: float = 0.0
    first: str = ""

    def add(self, what: str, outputs: list[RequestOutput], *scored: list[torch.Tensor]) -> None:
        """Compare sampled tokens' logprobs with those of the whole sequences [len - 1], which were scored in some ways.

        Args:
            what: the batch, for people.
        """
        for index, output in enumerate(outputs):
            sample, prompt_len = output.outputs[0], len(output.prompt_token_ids)
            assert sample.logprobs is not None, "they were asked for"
            sampled = torch.tensor(sample.logprobs.sampled)
            expected = torch.stack([rows[index][prompt_len - 1 :].cpu() for rows in scored])  # [ways, tokens]
            is_off = (expected != sampled).any(dim=0)  # NaN too
            self.num_tokens += len(sampled)
            self.total += sampled.double().sum().item()
            if not is_off.any():
                continue
            self.num_off += int(is_off.sum())
            self.delta = max(self.delta, (expected - sampled).abs().nan_to_num(nan=math.inf).max().item())
            place = int(is_off.nonzero()[0])
            self.first = self.first or (
                f"{what}, sequence {index} of {prompt_len} prompt tokens, sampled token {place}: "
                f"{sampled[place].item()!r} sampled, {expected[:, place].tolist()} by sequence_logprobs"
            )


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one model under one variant; obstacle: why there was no CUDA graph, where one should be."""

    tally: Tally
    stats: EngineStats
    watch: RowWatch
    plan: ExactnessPlan
    obstacle: str | None

    def __str__(self) -> str:
        sizes = [sorted({bucket_of(m) for m in side.rows}) for side in (self.watch.engine, self.watch.trainer)]
        return (
            f"{DELTA} {self.tally.delta:.3g} over {self.tally.num_tokens:,} tokens; sequences that a step sampled for "
            f"{_spans(self.watch.sampled)}; M padded to {sizes[0]} in the engine, {sizes[1]} in the trainer; M of "
            f"lm_head {_spans(self.watch.engine.head_rows)} and {_spans(self.watch.trainer.head_rows)}"
        )


def find_complaints(finding: Finding, model: Decoder) -> list[str]:
    """What differs, and what was to happen and did not."""
    tally, stats, watch, plan = finding.tally, finding.stats, finding.watch, finding.plan
    found = []
    if tally.num_off:
        found.append(
            f"{DELTA} is {tally.delta:.4g} nats, {tally.num_off} of {tally.num_tokens} tokens differ; first: "
            f"{tally.first}"
        )
    counts = {
        "sequence was preempted": stats.num_preemptions,
        "token was computed again after a preemption": stats.num_recomputed_tokens,
        "token came from the prefix cache": stats.num_prefix_hit_tokens,
        "prompt came in chunks": stats.num_multi_chunk_prompts,
    }
    if model.device.type == "cuda":
        counts[f"step ran as a CUDA graph ({finding.obstacle or 'no obstacle is known'})"] = watch.num_replays
    found += [f"no {what}" for what, count in counts.items() if not count]
    if missing := sorted({*plan.batches} - watch.sampled):
        found.append(f"no step sampled for {missing} sequences")
    for name, side in (("engine", watch.engine), ("trainer", watch.trainer)):
        if missing := sorted({*plan.buckets} - {bucket_of(rows) for rows in side.rows}):
            found.append(f"the {name} padded no M to {missing}")
        if len({rows <= SMALL_TILE_ROWS for rows in side.head_rows}) < 2:
            found.append(f"the {name}'s lm_head ran in one tile alone, M being {_spans(side.head_rows)}")
        if model.config.num_experts:
            if side.most_expert_rows < plan.expert_rows:
                found.append(f"no expert got {plan.expert_rows} rows in the {name}, but {side.most_expert_rows}")
            large = LARGE_GROUP_ROWS * model.config.num_experts / model.config.num_experts_per_tok
            if len({rows >= large for rows in side.rows}) < 2:
                found.append(f"the {name}'s experts ran in one tile alone")
    return found


def add_rows(record: Record, case: str, checked: CheckedModel, finding: Finding) -> None:
    """Rows of one model under one variant."""
    tally, stats, watch = finding.tally, finding.stats, finding.watch
    sides = (watch.engine, watch.trainer)
    record.add(case, DELTA, "nats", tally.delta)
    record.add(case, "tokens compared", "tokens", tally.num_tokens)
    record.add(case, "mean logprob", "nats", tally.total / tally.num_tokens)
    if checked.losses is not None:
        for when, loss in zip(("first", "last"), checked.losses, strict=True):
            record.add(case, f"training loss, {when} step", "nats", loss)
    record.add(case, "preemptions", "sequences", stats.num_preemptions)
    record.add(case, "tokens computed again", "tokens", stats.num_recomputed_tokens)
    record.add(case, "prefix-cache hit tokens", "tokens", stats.num_prefix_hit_tokens)
    record.add(case, "chunked prompts", "prompts", stats.num_multi_chunk_prompts)
    record.add(case, "steps by CUDA graph", "steps", watch.num_replays)
    record.add(case, "most sequences of a step", "sequences", max(watch.sampled))
    record.add(case, "sizes of M", "sizes", min(len({bucket_of(m) for m in side.rows}) for side in sides))
    record.add(case, "largest M", "rows", min(max(side.rows) for side in sides))
    if checked.model.config.num_experts:
        record.add(case, "largest rows of an expert", "rows", min(side.most_expert_rows for side in sides))


def _spans(numbers: set[int]) -> str:
    """Whole numbers, neighbours joined: 1-3, 8."""
    ordered = sorted(numbers)
    starts = [n for n in ordered if n - 1 not in numbers]
    ends = [n for n in ordered if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
