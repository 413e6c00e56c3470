"""Transcripts as HTML: each token on a ground whose colour says how far the two sides' logprobs are apart."""

import math
from collections.abc import Sequence
from html import escape

from octavo.report.page import paragraph
from octavo.rl.transcripts import Token, Transcript

# |delta logprob| from which a token is coloured, and at which the colour is full: a ratio of 2, TIS's usual cap
LEAST, FULL = 1e-4, math.log(2.0)
_NUM_LEVELS = 10

_LEVELS = "".join(
    f".t .{side}{level}{{background:rgb({rgb} / {level * 0.07:.2f})}}\n"
    for side, rgb in (("up", "37 99 235"), ("down", "220 38 38"))
    for level in range(1, _NUM_LEVELS + 1)
)
TRANSCRIPT_CSS = (
    """
.t{background:var(--tint);border-radius:6px;padding:12px 14px;margin:8px 0 18px;overflow-wrap:anywhere;
white-space:pre-wrap;font:13px/1.7 ui-monospace,Menlo,Consolas,monospace}
.t .prompt{color:var(--soft)}.t .env{color:var(--soft);font-style:italic}.t span[title]{cursor:help}
.t .same{border-bottom:1px solid var(--good)}
"""
    + _LEVELS
)


def render_transcripts(transcripts: Sequence[Transcript]) -> str:
    """All of them, the newest step first, each after a line on what it is.

    Every text of prompts and responses is escaped: a policy may write any HTML.
    """
    lead = paragraph(
        "Prompts are grey. A token's ground is red where the trainer finds it less likely than the sampler did, blue "
        f"where more; the colour is full at a ratio of 2 and fades out, by the logarithm, at a |delta logprob| of "
        f"{LEAST:g}. Tokens whose two logprobs are equal in bits are underlined. Point at one for its numbers. What an "
        "environment wrote is in italics; it is in no loss."
    )
    # a run that went on from a checkpoint wrote some steps twice: the last one is what it learned from
    last_of_each = {(t.step, t.why): t for t in transcripts}
    newest = sorted(last_of_each.values(), key=lambda t: -t.step)
    return lead + legend() + "".join(map(render_transcript, newest))


def render_transcript(transcript: Transcript) -> str:
    """One response: its heading, prompt and tokens."""
    notes = [f"reward {transcript.reward:g}", f"max |delta logprob| {transcript.max_abs_delta:.3g}"]
    notes += [] if transcript.is_finished else ["cut by the length limit"]
    heading = f"step {transcript.step}: {transcript.why} ({', '.join(notes)})"
    tokens = "".join(map(render_token, transcript.tokens))
    more = f'<span class="env"> … {transcript.num_left_out} more tokens</span>' if transcript.num_left_out else ""
    prompt = f'<span class="prompt">{escape(transcript.prompt)}</span>'
    return f'<h3>{escape(heading)}</h3><div class="t">{prompt}{tokens}{more}</div>'


def render_token(token: Token) -> str:
    """One token as a span, its text escaped."""
    text = escape(token.text) or "·"  # a part of a character has no text of its own
    if token.trainer is None or token.rollout is None:
        return f'<span class="env">{text}</span>'
    delta = token.trainer - token.rollout
    title = (
        f"trainer {token.trainer:.6g} ({_percent(token.trainer)}), sampler {token.rollout:.6g} "
        f"({_percent(token.rollout)}), delta {delta:+.3g}, ratio {math.exp(max(-20.0, min(20.0, delta))):.4g}"
    )
    return f'<span class="{colour_class(delta)}" title="{escape(title, quote=True)}">{text}</span>'


def colour_class(delta: float) -> str:
    """The CSS class of a delta logprob (trainer less sampler): "same", "", "down1" to "down10", "up1" to "up10"."""
    if delta == 0.0:
        return "same"
    side = "up" if delta > 0 else "down"
    if not math.isfinite(delta):
        return f"{side}{_NUM_LEVELS}"
    if abs(delta) < LEAST:
        return ""
    place = math.log(abs(delta) / LEAST) / math.log(FULL / LEAST)
    return f"{side}{max(1, min(_NUM_LEVELS, math.ceil(place * _NUM_LEVELS)))}"


def legend() -> str:
    """The scale of colours, with the |delta logprob| of each."""
    bounds = [LEAST * (FULL / LEAST) ** (level / _NUM_LEVELS) for level in range(1, _NUM_LEVELS + 1)]
    down, up = (
        "".join(f'<span class="{side}{i}"> {bound:.1g} </span>' for i, bound in enumerate(bounds, start=1))
        for side in ("down", "up")
    )
    return f'<div class="t legend">trainer less likely {down}\ntrainer more likely {up}</div>'


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(min(logprob, 0.0)):.4g} %"
