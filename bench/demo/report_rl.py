"""The report's sections on reinforcement learning: rewards, mismatch of the two sides, importance weights."""

from collections.abc import Callable

from bench.demo.reinforce import CORRECTED, EXACT, Reinforcement
from octavo.report.charts import Series, histogram, line_chart, smooth
from octavo.report.page import Section, figure, over_steps, paragraph, table
from octavo.rl import StepRow

_SMOOTHED_SHARE = 10


def reward_section(reinforcement: Reinforcement) -> Section:
    """Reward by step, held-out accuracy, answers."""
    variants = reinforcement.variants
    num_steps = len(variants[EXACT].rows)
    window = max(1, num_steps // _SMOOTHED_SHARE)
    rewards = line_chart(
        [Series(name, smooth(_points(variant.rows, "reward/mean"), window)) for name, variant in variants.items()],
        title="mean reward of the rollouts",
        x_label="step",
        y_label="mean reward",
        from_zero=True,
    )
    heldout = line_chart(
        [
            Series(name, [(0.0, variant.accuracy_before), *_points(variant.rows, "eval/reward")], dots=True)
            for name, variant in variants.items()
        ],
        title="held-out accuracy",
        x_label="step",
        y_label="held-out accuracy",
        from_zero=True,
    )
    sides = [
        (name, variant.trainer, variant.sampler, f"{variant.accuracy_before:.3f}", f"{variant.accuracy_after:.3f}")
        for name, variant in variants.items()
    ]
    answers = [(f"{a.prompt}{a.completion}", "right" if a.reward > 0 else "wrong") for a in variants[EXACT].answers]
    body = (
        paragraph(
            "A small policy learns to add, digits as characters, the answer's last digit first. A supervised warm "
            f"start of {reinforcement.num_warmup_steps} steps makes it right now and then; both variants begin from "
            "those same weights and learn by GRPO from their own samples. They differ in nothing but the precision "
            "of the two sides."
        )
        + table(["variant", "trainer", "sampler", "held-out before", "after"], sides)
        + figure(
            rewards,
            f"Mean reward of each step's rollouts at temperature 1 (the share of right answers), {over_steps(window)}. "
            "Both should rise; which is ahead at a given step is chance at this size.",
        )
        + figure(
            heldout,
            f"Accuracy on {reinforcement.num_heldout} problems that training never shows, greedy, by a bf16 engine "
            "for both variants. Look for a rise over step 0, the warm start.",
        )
        + table(["some answers of the exact variant's last step, right and wrong", ""], answers)
    )
    return Section("reward", "Reinforcement learning", body)


def mismatch_section(reinforcement: Reinforcement) -> Section:
    """How far trainer and sampler are apart at each step."""
    variants = reinforcement.variants
    charts = [
        (
            "mismatch/logprob_abs_diff_max",
            "max |delta logprob|",
            "The largest difference between a token's logprob by the trainer, under the weights that sampled it, and "
            "the one that the sampler reported, over all tokens of a step; the first minibatch of each step is "
            "compared on the very tensor that the loss back-propagates through. The exact variant lies on 0 at every "
            "step: not small, but equal in bits. The other variant shows what two numerics cost.",
        ),
        (
            "rollout_corr/k3_kl",
            "mismatch KL (k3)",
            "The same as a KL divergence of sampler and trainer. The exact variant lies on 0. In the other variant, "
            "look for growth over the steps.",
        ),
    ]
    figures = [
        figure(
            line_chart(
                [Series(name, _points(variant.rows, key)) for name, variant in variants.items()],
                title=label,
                x_label="step",
                y_label=label,
                log_y=True,
            ),
            caption,
        )
        for key, label, caption in charts
    ]
    summary = [
        (
            name,
            f"{_over(variant.rows, 'mismatch/logprob_abs_diff_max', max):.3g}",
            f"{_over(variant.rows, 'mismatch/logprob_abs_diff_mean', _mean):.3g}",
            f"{_over(variant.rows, 'rollout_corr/k3_kl', _mean):.3g}",
            f"{100 * _over(variant.rows, 'mismatch/tokens_differing_share', _mean):.1f} %",
            f"{_over(variant.rows, 'rollout_corr/rollout_is_eff_sample_size', min):.4f}",
        )
        for name, variant in variants.items()
    ]
    head = ["variant", "max |delta|", "mean |delta|", "mean KL", "tokens that differ", "least ESS"]
    return Section("mismatch", "Mismatch of trainer and sampler", table(head, summary) + "".join(figures))


def correction_section(reinforcement: Reinforcement) -> Section:
    """Importance weights on one set of rollouts, and what they change."""
    study = reinforcement.variants[CORRECTED].study
    exact = reinforcement.variants[EXACT].study
    chart = histogram(
        study.counts,
        study.edges,
        title="importance weights",
        x_label="log2(trainer / sampler probability)",
        y_label="tokens",
        log_y=True,
    )
    mismatch, effect = study.mismatch, study.effect
    weights = [
        ("tokens", f"{study.num_tokens:,}"),
        ("smallest, mean, largest weight", _three(mismatch, "min", "mean", "max")),
        ("tokens above the cap of 2", f"{100 * mismatch['rollout_corr/rollout_is_ratio_fraction_high']:.3f} %"),
        ("effective sample size", f"{mismatch['rollout_corr/rollout_is_eff_sample_size']:.6f}"),
        (
            "loss without and with weights",
            f"{effect['correction/loss_without']:.6f} and {effect['correction/loss_with']:.6f}",
        ),
        (
            "gradient norm without and with",
            f"{effect['correction/grad_norm_without']:.5f} and {effect['correction/grad_norm_with']:.5f}",
        ),
        ("change of the gradient, relative to its norm", f"{100 * effect['correction/grad_relative_change']:.3f} %"),
        ("cosine of the two gradients", f"{effect['correction/grad_cosine']:.7f}"),
    ]
    body = (
        paragraph(
            "The warm policy's rollouts, sampled once with FP8 linears and FP8 KV cache and scored by the bf16 "
            "trainer. Token-level truncated importance sampling (TIS) multiplies each token's loss by min(trainer / "
            "sampler probability, 2), so that tokens the sampler drew too often count less."
        )
        + figure(
            chart,
            "Weights of all tokens on a logarithmic scale: 0 means equal probabilities, 1 means that the trainer "
            "finds the token twice as likely. Look at the width: that is the off-policy error which the weights "
            f"correct. For the exact variant the same study gives {exact.num_tokens:,} weights from "
            f"{exact.mismatch['rollout_corr/rollout_is_min']} to {exact.mismatch['rollout_corr/rollout_is_max']}: "
            "there is nothing to correct.",
        )
        + table(["on the same rollouts", ""], weights)
    )
    return Section("correction", "What importance weights correct", body)


def _points(rows: list[StepRow], key: str) -> list[tuple[float, float]]:
    return [(float(row.step), row[key]) for row in rows if key in row.metrics]


def _over(rows: list[StepRow], key: str, reduce: Callable[[list[float]], float]) -> float:
    return reduce([row[key] for row in rows])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _three(mismatch: dict[str, float], *names: str) -> str:
    return ", ".join(f"{mismatch[f'rollout_corr/rollout_is_{name}']:.4f}" for name in names)
