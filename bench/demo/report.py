"""report.html: each part of a run as a section, with a sentence or two on what it means and what to look for."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.demo.compare import EXPORTED
from bench.demo.reinforce import CORRECTED, EXACT
from bench.demo.report_rl import correction_section, mismatch_section, reward_section
from bench.demo.results import DemoResults
from octavo.report.charts import Series, line_chart, smooth
from octavo.report.page import Section, figure, folded, over_steps, paragraph, render, table
from octavo.run.metrics import Row

_SMOOTHED_SHARE = 20  # the running mean spans a twentieth of the steps


def write_report(results: DemoResults, path: Path) -> None:
    """Write the page."""
    sections = [
        _loss_section(results),
        _perplexity_section(results),
        _weights_section(results),
        _samples_section(results),
        reward_section(results.reinforcement),
        mismatch_section(results.reinforcement),
        correction_section(results.reinforcement),
        _conversion_section(results),
        _timing_section(results),
    ]
    path.write_text(render("octavo demo", _lead(results), sections), encoding="utf-8")


def headline_rows(results: DemoResults) -> list[tuple[str, str]]:
    """The run in a few numbers: for the top of the report and for the terminal."""
    comparison, variants = results.comparison, results.reinforcement.variants
    base, *others = comparison.rows
    rows = [(f"perplexity, {base.name}", f"{base.perplexity:.3f}")]
    rows += [
        (f"perplexity, {row.name}", f"{row.perplexity:.3f} ({_percent(row.loss - base.loss, base.loss)} loss)")
        for row in others
    ]
    sizes = (_megabytes(comparison.num_bytes_bf16), _megabytes(comparison.num_bytes_fp8))
    rows.append(("weights on disk, bf16 and FP8", " and ".join(sizes)))
    rows += [
        (f"held-out accuracy, RL, {name}", f"{variant.accuracy_before:.3f} to {variant.accuracy_after:.3f}")
        for name, variant in variants.items()
    ]
    num_tokens = results.sampling.num_tokens + results.reinforcement.num_tokens(EXACT)
    exactly = f"{results.worst_exact_delta} over {num_tokens:,} tokens"
    rows.append(("max |trainer - sampler| logprob, exact", exactly))
    worst = max(row["mismatch/logprob_abs_diff_max"] for row in variants[CORRECTED].rows)
    rows.append((f"max |trainer - sampler| logprob, {CORRECTED}", f"{worst:.3g}"))
    return rows


def _lead(results: DemoResults) -> str:
    text = (
        f"One run of octavo demo on {results.machine['device']} ({results.machine['cores']} cores), seed "
        f"{results.seed}, {sum(results.stage_seconds.values()):.0f} s: one small model trained in bf16 and in FP8, "
        "exported, sampled with an FP8 KV cache, and a policy improved by reinforcement learning with FP8 rollouts. "
        "Every number below was measured in this run."
    )
    return paragraph(text) + table(["", "measured"], headline_rows(results))


def _loss_section(results: DemoResults) -> Section:
    pretraining = results.pretraining
    variants = pretraining.variants
    num_steps = len(next(iter(variants.values())).rows)
    window = max(1, num_steps // _SMOOTHED_SHARE)
    losses = {name: [(float(row.step), row.loss) for row in variant.rows] for name, variant in variants.items()}
    chart = line_chart(
        [Series(name, smooth(points, window), dashed=i > 0) for i, (name, points) in enumerate(losses.items())],
        title="training loss",
        x_label="step",
        y_label="loss, nats a token",
    )
    base_name, *others = losses
    gaps = [
        Series(f"{name} - {base_name}", smooth(_relative_gap(variants[name].rows, variants[base_name].rows), window))
        for name in others
    ]
    gap_chart = line_chart(
        [Series("no difference", [(p[0], 0.0) for p in gaps[0].points]), *gaps],
        title="loss relative to bf16",
        x_label="step",
        y_label="loss against bf16, %",
        from_zero=True,
    )
    data = pretraining.config.data
    variant = variants[EXPORTED]
    body = (
        paragraph(
            f"A decoder of {variant.num_params / 1e6:.2f}M parameters learns Python from this machine's own standard "
            f"library ({pretraining.num_train_tokens:,} training tokens, a tokenizer of {data.vocab_size} tokens "
            f"trained on the spot). Every variant has the same initial weights, the same {num_steps} batches of "
            f"{data.batch_size * data.seq_len:,} tokens in the same order, and the same optimizer; only the "
            "precision of its linears' three matrix products differs."
        )
        + figure(
            chart,
            f"Training loss, {over_steps(window)}. The lines should lie on each other: FP8 follows bf16 so "
            "closely that the eye cannot part them. A line that drifts upwards would mean that quantization hurts.",
        )
        + figure(
            gap_chart,
            "The same, as the difference to bf16 on the same batch in percent of the bf16 loss. Look for a band around "
            "0 that does not grow. It is noise of both signs: rounding sends each run down a slightly different path, "
            "as another seed would.",
        )
    )
    return Section("loss", "Training", body)


def _relative_gap(rows: list[Row], base: list[Row]) -> list[tuple[float, float]]:
    return [(float(a.step), 100.0 * (a.loss - b.loss) / b.loss) for a, b in zip(rows, base, strict=True)]


def _perplexity_section(results: DemoResults) -> Section:
    comparison = results.comparison
    base = comparison.rows[0]
    rows = [
        (
            row.name,
            row.linears,
            row.kv_cache,
            f"{row.loss:.5f}",
            f"{row.perplexity:.3f}",
            "" if row is base else _percent(row.loss - base.loss, base.loss),
        )
        for row in comparison.rows
    ]
    same = (
        "The export that was read back from disk gives the very bits of the model in memory."
        if comparison.is_bit_equal
        else "The export that was read back differs from the model in memory; on this device their products may run "
        "in another order."
    )
    body = (
        table(["evaluated", "linears", "KV cache", "loss", "perplexity", "loss against bf16"], rows)
        + paragraph(
            f"Validation text of {comparison.num_tokens:,} tokens that no variant has seen, the same for every row. "
            "Each run is evaluated in its own precision. Look for differences of well under one percent; single seeds "
            "of this size differ by as much among themselves."
        )
        + paragraph(
            f"The export holds the {EXPORTED} run's linears as E4M3 codes with one scale for each 128 x 128 block, "
            f"{_megabytes(comparison.num_bytes_fp8)} against {_megabytes(comparison.num_bytes_bf16)} in bf16 "
            f"(embeddings and norms stay in bf16 in both). {same} The last row also rounds keys and values to FP8, "
            "as the sampler's cache does."
        )
    )
    return Section("perplexity", "Perplexity", body)


def _weights_section(results: DemoResults) -> Section:
    rows = [
        (
            report.name,
            "x".join(map(str, report.shape)),
            f"{report.amax:.3g}",
            f"{report.sqnr_db:.1f}",
            f"{100 * report.underflow:.3f}",
            f"{100 * report.subnormal:.3f}",
            report.num_clipped,
            ", ".join(report.notes) or "ok",
        )
        for report in results.comparison.tensors
    ]
    body = table(
        ["weight", "shape", "amax", "SQNR dB", "underflow %", "subnormal %", "clipped", "note"], rows
    ) + paragraph(
        "What quantizing each trained weight in 128 x 128 blocks of E4M3 loses. SQNR is the signal-to-noise ratio "
        "of the codes: bell-shaped data gives about 31.5 dB. Underflow is the share of weights that became zero, "
        "subnormal the share that kept fewer mantissa bits. Look for a row that stands out from the others: that "
        "tensor is the one FP8 would hurt. The embedding is listed for comparison; it stays in bf16."
    )
    return Section("weights", "Trained weights in FP8", body)


def _samples_section(results: DemoResults) -> Section:
    sampling = results.sampling
    blocks = "".join(f"<pre><b>{escape(s.prompt)}</b>{escape(s.text)}</pre>" for s in sampling.samples)
    body = (
        paragraph(
            "Written by the FP8 export through the FP8 KV cache, prompts in colour. The model has seen Python for a "
            "minute or two: look for the shape of code, not for sense."
        )
        + blocks
        + paragraph(
            f"The engine ran in exact mode. The trainer's side then scored the same {sampling.num_tokens} tokens in "
            f"one packed batch: the largest difference of a logprob is {sampling.max_delta_exact}, bit for bit. "
            "Scoring them in bf16 instead, as a stack with two numerics would, differs by "
            f"{sampling.mean_delta_bf16:.2g} on average and by {sampling.max_delta_bf16:.2g} at most. A token's keys "
            f"and values take {sampling.kv_bytes_fp8} bytes in FP8, scales included, against "
            f"{sampling.kv_bytes_bf16} in bf16."
        )
    )
    return Section("samples", "Samples", body)


def _conversion_section(results: DemoResults) -> Section:
    rows = [(name, f"{100 * variant.fp8_flop_share:.1f} %") for name, variant in results.pretraining.variants.items()]
    body = (
        table(["run", "linear FLOPs in FP8"], rows)
        + paragraph(
            "Which layers ran in what is resolved before training into an explicit list. Look for linears that "
            "stayed in bf16 and the reason given; lm_head is not counted, and shares the embedding's weight here."
        )
        + "".join(
            folded(f"every linear of the {name} run", variant.conversion)
            for name, variant in results.pretraining.variants.items()
        )
    )
    return Section("conversion", "What ran in FP8", body)


def _timing_section(results: DemoResults) -> Section:
    stages = [(name, f"{seconds:.1f}") for name, seconds in results.stage_seconds.items()]
    stages.append(("all", f"{sum(results.stage_seconds.values()):.1f}"))
    variants = [
        (f"train, {name}", f"{variant.seconds:.1f}", f"{_mean_speed(variant.rows):,.0f}")
        for name, variant in results.pretraining.variants.items()
    ]
    variants += [
        (f"RL, {name}", f"{variant.seconds:.1f}", f"{_mean_speed(variant.rows):,.0f}")
        for name, variant in results.reinforcement.variants.items()
    ]
    body = (
        table(["stage", "seconds"], stages)
        + table(["variant", "seconds", "tokens/s"], variants)
        + paragraph(
            f"{results.seconds_asked:.0f} s were asked for. On a CPU, FP8 is emulated: it costs time there instead "
            "of saving it, and variants run side by side. Speed is no claim of this report; on an H200 the same "
            "recipes use its FP8 units."
        )
        + table(["machine", ""], list(results.machine.items()))
    )
    return Section("timing", "Time and machine", body)


def _mean_speed(rows: Sequence[Row]) -> float:
    return sum(row.tokens_per_s for row in rows) / len(rows)


def _percent(difference: float, base: float) -> str:
    return f"{100 * difference / base:+.3f} %"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
