"""Is exact mode exact? Sampled logprobs against sequence_logprobs of the same model, while all that must not matter
happens: batches of every size, chunks, prefix hits, preemption, CUDA graphs, every size that a GEMM distinguishes.

What must have happened is counted; a run in which something of it did not is a complaint, as a nonzero delta is.
"""

import dataclasses
import random
import time
from collections.abc import Iterator

import torch

from bench.record import Record
from bench.serve.checked_models import CheckedModel
from bench.serve.exactness_findings import Finding, Tally, add_rows, find_complaints
from bench.serve.exactness_plan import FULL, TOY, ExactnessPlan
from bench.serve.measure import OutOfTimeError
from bench.serve.row_watch import RowWatch
from bench.serve.workloads import EngineVariant
from octavo.models import Decoder, sequence_logprobs
from octavo.ops.attention import PAGE_SIZE
from octavo.serve import LLM, RequestOutput, SamplingParams
from octavo.serve.engine import EngineStats

# Prompts around the ends of pages; the first, scored alone, fits the small tile.
_EDGES = (40, 1, PAGE_SIZE + 1, PAGE_SIZE, PAGE_SIZE - 1, 2 * PAGE_SIZE + 1)
_SCORED_TOKENS = 40_960  # of one call, so that activations fit
_MOST_PROMPT = 1500  # of a bucket: past the first split of attention's softmax
_BUCKET_TOKENS = 4  # generated
_LONG_EVERY = 8  # prompts of a batch
_NEAR_END = 10  # tokens of a page


def measure_exactness(
    record: Record,
    case: str,
    checked: CheckedModel,
    variant: EngineVariant,
    recipe: str,
    deadline: float,
    *,
    quick: bool,
) -> tuple[str, list[str]]:
    """Compare one model's sampler and trainer, add the rows.

    Args:
        recipe: of FP8 linears.
        deadline: time.perf_counter() at which to give up.
        quick: toy sizes.
    Returns:
        (what to print, complaints).
    Raises:
        OutOfTimeError: at the deadline.
    """
    model = checked.model
    plan = (TOY if quick else FULL).for_variant(variant, model.config)
    model.set_numerics(variant.numerics(recipe))
    finding = _run(checked, plan, deadline)
    add_rows(record, case, checked, finding)
    return str(finding), [f"{case}: {complaint}" for complaint in find_complaints(finding, model)]


def _run(checked: CheckedModel, plan: ExactnessPlan, deadline: float) -> Finding:
    tally, model = Tally(), checked.model
    rng = random.Random(0)
    buckets = [
        (f"step of up to {size} tokens", _bucket_prompts(checked, size, rng), _BUCKET_TOKENS) for size in plan.buckets
    ]
    batches = [
        (f"batch of {num}{again}", prompts, plan.num_tokens)
        for i, num in enumerate(plan.batches)
        for prompts in [_ragged(checked, plan, num, rng, has_long=i % 2 == 1)]
        for again in (("", ", again") if num in plan.repeated else ("",))
    ]
    with RowWatch(model) as watch:
        roomy = _make_roomy(model, plan, [prompts for _, prompts, _ in (*buckets, *batches)])
        watch.watch(roomy.engine)
        for what, prompts, num_tokens in (*buckets, *batches):
            _compare(tally, what, roomy, prompts, num_tokens, 1.0, deadline)
        tight, prompts = _make_tight(checked, plan, rng)
        watch.watch(tight.engine)
        for is_caching in (True, False):  # without a prefix cache a preemption costs everything
            tight.engine.page_manager.enable_prefix_caching = is_caching
            what = f"{len(prompts)} sequences in {tight.stats.num_kv_pages} pages"
            _compare(tally, what, tight, prompts, plan.tight_tokens, 0.7, deadline)
            tight.engine.check_integrity()
    graphs = (roomy.engine.model_runner.graphs, tight.engine.model_runner.graphs)
    obstacle = next((g.obstacle for g in graphs if g is not None and g.obstacle), None)
    names = [field.name for field in dataclasses.fields(EngineStats)]
    stats = EngineStats(**{name: getattr(roomy.stats, name) + getattr(tight.stats, name) for name in names})
    return Finding(tally, stats, watch, plan, obstacle)


def _compare(
    tally: Tally,
    what: str,
    llm: LLM,
    prompts: list[list[int]],
    num_tokens: int,
    temperature: float,
    deadline: float,
) -> None:
    """Generate, then score without gradients and, as training does, with them."""
    if time.perf_counter() >= deadline:
        raise OutOfTimeError
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, params)
    assert all(len(o.outputs[0].token_ids) == num_tokens for o in outputs), f"{what}: a sequence is short of tokens"
    for part in _in_parts(outputs):
        sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in part]
        with torch.no_grad():
            evaluated = sequence_logprobs(llm.model, sequences, temperature)
        trained = sequence_logprobs(llm.model, sequences, temperature)
        assert all(row.requires_grad for row in trained), "the trainer's pass has a gradient"
        tally.add(what, part, evaluated, [row.detach() for row in trained])


def _in_parts(outputs: list[RequestOutput]) -> Iterator[list[RequestOutput]]:
    part: list[RequestOutput] = []
    num_tokens = 0
    for output in outputs:
        length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        if part and num_tokens + length > _SCORED_TOKENS:
            yield part
            part, num_tokens = [], 0
        part.append(output)
        num_tokens += length
    yield part


# What is run


def _ragged(
    checked: CheckedModel, plan: ExactnessPlan, num: int, rng: random.Random, *, has_long: bool
) -> list[list[int]]:
    """Prompts of any length up to short; where long ones are among them, the first stand around the ends of pages."""
    lengths = []
    for i in range(num):
        if i == 0 or (has_long and i < len(_EDGES)):
            lengths.append(_EDGES[i])
        elif has_long and i % _LONG_EVERY == 1:
            lengths.append(rng.randint(plan.long * 3 // 4, plan.long))
        else:
            lengths.append(rng.randint(1, plan.short))
    return [checked.draw(length, rng) for length in lengths]


def _bucket_prompts(checked: CheckedModel, size: int, rng: random.Random) -> list[list[int]]:
    """Prompts of which M is padded to this size, in the step that takes them and where they are scored with output."""
    longest = min(_MOST_PROMPT, checked.model.config.max_position_embeddings - PAGE_SIZE)
    num = -(-size // longest)
    total = size - num * _BUCKET_TOKENS - rng.randint(1, 5)
    lengths = [total // num + (i < total % num) for i in range(num)]
    return [checked.draw(length, rng) for length in lengths]


def _make_roomy(model: Decoder, plan: ExactnessPlan, lists: list[list[list[int]]]) -> LLM:
    """An engine in which each of these lists runs at once."""
    most_tokens = max(plan.num_tokens, _BUCKET_TOKENS)
    num_pages = max(sum(_pages(len(prompt) + most_tokens) for prompt in prompts) for prompts in lists)
    return LLM(
        model,
        max_num_seqs=max(map(len, lists)),
        max_num_batched_tokens=plan.budget,
        max_model_len=max(len(prompt) for prompts in lists for prompt in prompts) + most_tokens,
        num_kv_pages=num_pages,
        warm_up=False,
    )


def _make_tight(checked: CheckedModel, plan: ExactnessPlan, rng: random.Random) -> tuple[LLM, list[list[int]]]:
    """An engine whose cache holds six tenths of what its sequences need, and their prompts.

    Each ends shortly before a page does, so that the sequences need another when there is none. Half of them share a
    prefix of more than a page.
    """
    common = checked.draw(PAGE_SIZE + 6, rng)
    prompts = []
    for i in range(plan.num_tight):
        length = PAGE_SIZE * rng.randrange(i % 2, plan.tight_pages) + rng.randrange(PAGE_SIZE - _NEAR_END, PAGE_SIZE)
        own = checked.draw(length, rng)
        prompts.append((common + own)[:length] if i % 2 else own)
    needs = [_pages(len(prompt) + plan.tight_tokens) for prompt in prompts]
    num_pages = max(*needs, int(0.6 * plan.tight_seqs * sum(needs) / len(needs)))
    llm = LLM(
        checked.model,
        max_num_seqs=plan.tight_seqs,
        max_num_batched_tokens=plan.tight_budget,
        max_model_len=max(map(len, prompts)) + plan.tight_tokens,
        num_kv_pages=num_pages,
        plan_known_lengths=False,  # which would begin none that loses its pages
        warm_up=False,
    )
    return llm, prompts


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
