"""The Hugging Face Hub: a checkpoint's model card (recipe, fidelity, evaluation), and its upload."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import BackendError, CheckpointError, ConfigError
from octavo.models.checkpoint import record
from octavo.models.checkpoint.dialects import HIGH_PRECISION, read_config, read_layout

CARD = "README.md"
_MARK = "<!-- octavo's model card -->"
_NOT_MEASURED = "Not measured."


def model_card(
    folder: str | Path,
    *,
    base_model: str = "",
    license: str = "",
    scores: str | Path | None = None,
) -> str:
    """The README.md of a checkpoint: which recipe its numbers are of, what FP8 costs, and how it scores.

    Args:
        folder: of a checkpoint, as octavo.load_model takes it.
        base_model: the Hub's name of the model that it was made from; "" to leave it out.
        license: the Hub's name of a license; "" to leave it out.
        scores: what `octavo eval --output` wrote; None where nothing was evaluated.
    Returns:
        Markdown with the Hub's metadata before it.
    Raises:
        CheckpointError: no checkpoint, or a damaged record.
        ConfigError: scores that cannot be understood.
    """
    folder = Path(folder)
    layout = read_layout(folder, read_config(folder))
    known, report = record.read(folder), record.read_report(folder)
    is_fp8 = layout.dialect != HIGH_PRECISION.dialect
    fields: dict[str, Any] = {"library_name": "transformers", "tags": ["octavo", *(["fp8"] if is_fp8 else [])]}
    fields |= {"base_model": base_model} if base_model else {}
    fields |= {"base_model_relation": "quantized"} if base_model and is_fp8 else {}
    fields |= {"license": license} if license else {}
    metadata = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]  # JSON is YAML
    try:
        told = {"Recipe": _recipe(layout.dialect, known, report), "Fidelity": _fidelity(report)}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: octavo/quantization.json is not a report of octavo's ({error!r})") from error
    sections = told | {
        "Evaluation": _NOT_MEASURED if scores is None else "\n".join(_scores(Path(scores))),
    }
    made_from = f", made from {base_model}" if base_model else ""
    body = [f"# {folder.resolve().name}", "", f"A checkpoint that octavo wrote{made_from}."]
    for title, text in sections.items():
        body += ["", f"## {title}", "", text]
    return "\n".join(["---", *metadata, "---", _MARK, *body, ""])


def write_card(folder: str | Path, card: str) -> Path:
    """Write README.md; one that octavo did not write stays.

    Raises:
        ConfigError: another README.md is there.
    """
    path = Path(folder) / CARD
    if path.exists() and _MARK not in path.read_text(encoding="utf-8"):
        raise ConfigError(f"{path} is not a card of octavo's and stays; give --no-card to upload it, or move it away")
    path.write_text(card, encoding="utf-8")
    return path


def upload(folder: str | Path, repo: str, *, private: bool = False, revision: str = "") -> str:
    """Upload a folder's files to a model repository of the Hub, which is made where it is missing.

    Whose repository it is and as whom, huggingface_hub's own settings say (HF_TOKEN, HF_ENDPOINT, `hf auth login`).

    Args:
        repo: "owner/name".
        private: of a repository that is made now.
        revision: a branch, which is made where it is missing; "" for main.
    Returns:
        The commit's address.
    Raises:
        BackendError: the Hub refused it, or cannot be reached.
        ConfigError: a name that no repository can have.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi(library_name="octavo")
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: as an organization has it
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision or None,
            commit_message="Upload a checkpoint by octavo",
            ignore_patterns=[".*", "**/.*"],
        )
    except HFValidationError as error:
        raise ConfigError(f"REPO must be owner/name as the Hub takes it, got {repo!r}: {error}") from error
    except Exception as error:  # of a network: which library of HTTP raises them depends on the Hub's version
        cause = error.__cause__ or error
        first_line, *_ = str(cause).strip().split("\n")
        raise BackendError(
            f"{repo} was not uploaded: {type(cause).__name__}: {first_line}; look at "
            "`hf auth whoami` and the network, then give the command again"
        ) from error
    return str(done.commit_url)


def _recipe(dialect: str, known: record.Record | None, report: dict[str, Any] | None) -> str:
    lines = [f"- weights: {dialect}"]
    if known is not None:
        lines.append(f"- recipe: {known.recipe}, numerics {known.numerics_fingerprint}")
        if known.high_precision:
            lines.append(f"- linears in high precision: {', '.join(f'`{name}`' for name in known.high_precision)}")
    if report is not None:
        kept = sorted(set(report["kept"].values()))
        lines.append(f"- {len(report['quantized'])} modules in FP8, {len(report['kept'])} not: {'; '.join(kept)}")
        lines.append(f"- bytes: {report['num_bytes_before']:,} before, {report['num_bytes_after']:,} after")
    return "\n".join(lines)


def _fidelity(report: dict[str, Any] | None) -> str:
    if report is None:
        return _NOT_MEASURED
    found: dict[str, float] = report["weight_sqnr_db"]
    worst = min(found, key=found.__getitem__)
    median = statistics.median(found.values())
    lines = [f"- SQNR of the weights against bf16: median {median:.1f} dB, least {found[worst]:.1f} dB (`{worst}`)"]
    before, after, with_kv = (report[f"perplexity_{name}"] for name in ("before", "after", "fp8_kv"))
    if before is None or after is None:
        return "\n".join([*lines, "- perplexity: not measured"])
    tokens = f"{report['num_eval_tokens']:,} tokens"
    lines.append(f"- perplexity over {tokens}: {before:.4f} in bf16, {after:.4f} in FP8 ({after / before - 1:+.2%})")
    if with_kv is not None:
        lines.append(f"- with the KV cache in FP8 too: {with_kv:.4f} ({with_kv / before - 1:+.2%})")
    return "\n".join(lines)


def _scores(path: Path) -> Iterator[str]:
    """A table, one column for each precision that was evaluated."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        columns: dict[str, list[dict[str, Any]]] = read["scores"]
        rows: dict[tuple[str, str], list[str]] = {}
        for scores in columns.values():
            for score in scores:
                error = "" if score["stderr"] is None else f" ± {score['stderr']:.4f}"
                rows.setdefault((score["task"], score["metric"]), []).append(f"{score['value']:.4f}{error}")
        limit = read["limit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what `octavo eval --output` writes ({error!r})") from error
    yield "By lm-evaluation-harness" + ("." if limit is None else f", {limit} documents a task at most.") + "\n"
    titles = ["this checkpoint" if name == "auto" else Path(name).name for name in columns]  # auto: its own recipe
    yield f"| task | metric | {' | '.join(titles)} |"
    yield "| --- " * (2 + len(columns)) + "|"
    for (task, metric), cells in rows.items():
        yield f"| {task} | {metric} | {' | '.join(cells)} |"
