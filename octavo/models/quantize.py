"""quantize_checkpoint: a high-precision checkpoint in FP8, calibrated, written, read back and measured."""

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from octavo.deprecation import former_keywords
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.models.calibration import Amaxes, OnProgress, calibrate
from octavo.models.checkpoint import compressed_tensors, fp8_block, fp8_tensor, record
from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.checkpoint.dialects import DIALECTS, HIGH_PRECISION, WRITABLE, read_config, read_layout
from octavo.models.checkpoint.inspect import inspect_checkpoint
from octavo.models.checkpoint.layout import Layout, matches
from octavo.models.checkpoint.names import ParameterNames, never_quantized, parameter_names
from octavo.models.checkpoint.storage import check_writable
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.load import AUTO_RECIPE, load_model
from octavo.models.perplexity import perplexity
from octavo.models.save import save_model, written_codes
from octavo.models.text_windows import read_windows
from octavo.models.tokenizer import load_tokenizer
from octavo.nn import Linear
from octavo.nn.overrides import checked_names, name_nearest
from octavo.numerics import Numerics, sqnr

# A dialect without its kind -> where inputs are scaled -> the kind.
_SHORT_NAMES = {
    "fp8-tensor": {"dynamic": fp8_tensor.DYNAMIC, "static": fp8_tensor.STATIC},
    "compressed-tensors": {"dynamic": compressed_tensors.CHANNEL, "static": compressed_tensors.TENSOR},
}
QUANTIZED_DIALECTS = (*(name for name in DIALECTS if name != HIGH_PRECISION.dialect), *_SHORT_NAMES)
# Files beside the weights that other readers want and octavo does not change.
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_HEAD_REASON = "the head: rounding logits shows in every probability"
_ROUTER_REASON = "a router: rounding its logits would send tokens to other experts"
_EQUAL_DB = 999.0  # JSON has no infinity
_EMBEDDING_REASON = "an embedding: rows are looked up, not multiplied"


@former_keywords(num_samples="num_calibration_samples", seq_len="max_seq_length")
@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """What calibration and the measurement of accuracy read.

    Attributes:
        calibration: a .txt or .jsonl file (see read_windows); its first num_calibration_samples sequences calibrate,
            those behind them are held out for perplexity. None where nothing is calibrated.
        evaluation: a file for perplexity instead of the held-out part.
        num_calibration_samples: sequences to calibrate with.
        num_eval_samples: sequences to measure perplexity with, at most.
        max_seq_length: tokens of a sequence.
    """

    calibration: Path | None = None
    evaluation: Path | None = None
    num_calibration_samples: int = 256
    num_eval_samples: int = 32
    max_seq_length: int = 512

    def __post_init__(self) -> None:
        for name in ("num_calibration_samples", "num_eval_samples", "max_seq_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """What quantize_checkpoint did.

    Attributes:
        dialect: that was written.
        quantized: Hugging Face's names of the modules that hold codes.
        kept: Hugging Face's names of the others with a weight matrix -> why.
        num_bytes_before: of all tensors.
        num_bytes_after: of all tensors.
        num_calibration_tokens: read for scales; 0 for none.
        num_eval_tokens: read for each perplexity; 0 for none.
        perplexity_before: of the model in bf16; None without text.
        perplexity_after: of the written checkpoint as recipe "auto" computes it.
        perplexity_fp8_kv: the same with K and V under the written scales; None where there are none.
        weight_sqnr_db: of each module's decoded codes against its weight in bf16, by Hugging Face's names; dB, 999
            where they are equal.
    """

    dialect: str
    quantized: tuple[str, ...]
    kept: dict[str, str]
    num_bytes_before: int
    num_bytes_after: int
    num_calibration_tokens: int
    num_eval_tokens: int
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_fp8_kv: float | None
    weight_sqnr_db: dict[str, float]


@former_keywords(exclude="ignore")
def quantize_checkpoint(
    path: str | Path,
    out: str | Path,
    dialect: str,
    *,
    activation: str | None = None,
    text: CalibrationText | None = None,
    kv_scales: bool = False,
    ignore: Sequence[str] = (),
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> QuantizationReport:
    """Quantize a checkpoint's linears to E4M3; head, embeddings and routers stay in bf16.

    The directory `out` appears whole, with the tokenizer's files, after it was read back and measured, or not at all.

    Args:
        path: a checkpoint in bf16, fp16 or fp32; it is used as bf16.
        dialect: one of QUANTIZED_DIALECTS; docs/checkpoints.md lists them.
        activation: "static" or "dynamic" scales of the inputs; None for what the dialect has.
        text: needed for static inputs and for kv_scales; else only perplexity is measured with it.
        kv_scales: write static scales of the KV cache, amax / 448 of K and of V a layer.
        ignore: modules to keep in bf16, as patterns over Hugging Face's names: full names, modules above, last parts,
            wildcards, or "re:" and a regular expression.
        on_progress: called with what is being done, how much of it is done and how much there is.
    Raises:
        CheckpointError: an unknown architecture or dialect, a checkpoint that is quantized already, an `out` that is
            taken.
        StorageError: an `out` that cannot be written.
        ConfigError: options that do not fit together, a pattern without a module.
        DataError: too little text, or values that are not finite.
        BackendError: a device without the FP8 recipe.
    """
    layout = _find_layout(dialect, activation)
    source, target, text = Path(path), Path(out), text or CalibrationText()
    say = on_progress or (lambda *_: None)
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointError(f"{target} exists already and is not replaced; choose another path or remove it")
    check_writable(target, "OUT")
    config = _read_architecture(source)
    kept = _kept_linears(parameter_names(config), layout, ignore)
    calibrated = kv_scales or layout.input == "static"
    samples, held_out = _read_text(source, config, text, calibrated)
    say("loading", 0, 1)
    model = load_model(source, device=device, dtype=torch.bfloat16)
    amaxes = calibrate(model, samples, on_progress) if calibrated else Amaxes()
    _apply_scales(model, layout, amaxes, kept, kv_scales)
    before = perplexity(model, held_out, on_progress=on_progress, stage="perplexity in bf16") if held_out else None
    model.set_numerics(Numerics(layout.recipe), ignore=tuple(kept))
    scales = model.kv_scales
    after = with_kv = None
    with atomic_directory(target, may_replace=lambda _: False) as staging:
        say("writing", 0, 1)
        save_model(model, staging, layout.dialect)
        for name in _BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, staging / name)
        fidelity = _weight_sqnr_db(model, layout, kept)
        del model  # its memory is the quantized one's
        quantized = load_model(staging, device=device, recipe=AUTO_RECIPE)
        if held_out:
            after = perplexity(quantized, held_out, on_progress=on_progress, stage="perplexity in FP8")
        if held_out and scales:
            stage = "perplexity in FP8 with the KV cache"
            with_kv = perplexity(quantized, held_out, kv_scales=scales, on_progress=on_progress, stage=stage)
        report = QuantizationReport(
            dialect=layout.dialect,
            quantized=tuple(fidelity),
            kept=_reasons(config, kept),
            num_bytes_before=inspect_checkpoint(source).num_bytes,
            num_bytes_after=inspect_checkpoint(staging).num_bytes,
            num_calibration_tokens=sum(map(len, samples)),
            num_eval_tokens=sum(len(sequence) - 1 for sequence in held_out),
            perplexity_before=before,
            perplexity_after=after,
            perplexity_fp8_kv=with_kv,
            weight_sqnr_db=fidelity,
        )
        record.write_report(staging, dataclasses.asdict(report))
    return report


# Before the model is loaded


def _find_layout(dialect: str, activation: str | None) -> Layout:
    if dialect not in QUANTIZED_DIALECTS:
        raise CheckpointError(f"dialect must be one of {', '.join(QUANTIZED_DIALECTS)}, got {dialect!r}")
    if activation not in (None, "static", "dynamic"):
        raise ConfigError(f"activation must be static or dynamic, got {activation!r}")
    if dialect in _SHORT_NAMES:
        return _SHORT_NAMES[dialect][activation or "dynamic"]
    layout = WRITABLE[dialect]
    if activation not in (None, layout.input):
        others = [name for name in QUANTIZED_DIALECTS if name in WRITABLE and WRITABLE[name].input == activation]
        raise ConfigError(
            f"dialect {dialect!r} has {layout.input} scales of inputs, activation={activation!r} was asked for; "
            f"choose one of {', '.join(others)}"
        )
    return layout


def _read_architecture(source: Path) -> ModelConfig:
    fields = read_config(source)
    layout = read_layout(source, fields)
    if layout.dialect != HIGH_PRECISION.dialect:
        raise CheckpointError(
            f"{source} is quantized already (dialect {layout.dialect}); its codes would be rounded twice: give the "
            "checkpoint in bf16 that it was made from"
        )
    return ModelConfig.from_hf(fields)


def _kept_linears(parameters: list[ParameterNames], layout: Layout, ignore: Sequence[str]) -> dict[str, str]:
    """octavo's names of the linears that stay in bf16 -> why."""
    linears = [p for p in parameters if p.is_linear_weight]
    names = [*_modules(linears), "lm_head", *_modules(p for p in parameters if p.name.endswith(".mlp.gate.weight"))]
    checked_names(ignore, "ignore")
    for pattern in ignore:
        if not any(matches(pattern, name) for name in names):
            hint = name_nearest(pattern, (*names, *(name.rpartition(".")[2] for name in names)))
            raise ConfigError(f"ignore pattern {pattern!r} names no linear of this model{hint}")
    is_block = layout.weight is not None and layout.weight.kind == "block_128x128"
    kept: dict[str, str] = {}
    for parameter in linears:
        reason = _why_ignored(parameter, ignore)
        if reason is not None:
            kept[_linear_name(parameter)] = reason
        elif is_block and not fp8_block.can_quantize(parameter.part_shapes.values()):
            rows, cols = next(s for s in parameter.part_shapes.values() if not fp8_block.can_quantize([s]))
            kept[_linear_name(parameter)] = f"{rows} x {cols} does not divide into blocks of 128 x 128"
    if len(kept) == len(linears):
        way_out = "; dialects without blocks take any shape: compressed-tensors-channel, fp8-tensor" if is_block else ""
        raise ConfigError(f"nothing is left to quantize: {'; '.join(sorted(set(kept.values())))}{way_out}")
    return kept


def _why_ignored(parameter: ParameterNames, ignore: Sequence[str]) -> str | None:
    """Why ignore keeps a linear, None where it does not; one part keeps all that are fused with it."""
    modules = _modules([parameter])
    named = {name: pattern for pattern in ignore for name in modules if matches(pattern, name)}
    if not named:
        return None
    first, pattern = next(iter(named.items()))
    beside = f"; {first.rpartition('.')[2]} shares one GEMM with its neighbours" if len(named) < len(modules) else ""
    return f"ignore {pattern!r}{beside}"


def _read_text(
    source: Path, config: ModelConfig, text: CalibrationText, calibrated: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """The sequences for calibration and those for perplexity, which are others."""
    if calibrated and text.calibration is None:
        raise ConfigError(
            "static scales of inputs or of the KV cache are made from calibration text; name a file "
            "(--calibration FILE, or CalibrationText(calibration=...))"
        )
    if text.calibration is None and text.evaluation is None:
        return [], []
    if text.max_seq_length > config.max_position_embeddings:
        raise ConfigError(
            f"max_seq_length={text.max_seq_length} exceeds max_position_embeddings={config.max_position_embeddings}"
        )
    tokenizer = load_tokenizer(source)
    num_samples = text.num_calibration_samples if calibrated else 0
    samples: list[list[int]] = []
    held_out: list[list[int]] = []
    if text.calibration is not None:
        num_held_out = text.num_eval_samples if text.evaluation is None else 0
        windows = read_windows(text.calibration, tokenizer, text.max_seq_length, num_samples + num_held_out)
        _check_enough(text.calibration, text.max_seq_length, len(windows), num_samples, is_evaluated=num_held_out > 0)
        samples, held_out = windows[:num_samples], windows[num_samples:]
    if text.evaluation is not None:
        held_out = read_windows(text.evaluation, tokenizer, text.max_seq_length, text.num_eval_samples)
        _check_enough(text.evaluation, text.max_seq_length, len(held_out), 0, is_evaluated=True)
    return samples, held_out


def _check_enough(file: Path, seq_len: int, num_found: int, num_samples: int, *, is_evaluated: bool) -> None:
    if num_found < num_samples + is_evaluated:
        purpose = f"{num_samples} for calibration" if num_samples else ""
        purpose += " and " * (is_evaluated and num_samples > 0) + "at least 1 for perplexity" * is_evaluated
        raise DataError(
            f"{file} has too little text: {num_samples + is_evaluated} sequences of {seq_len} tokens are needed "
            f"({purpose}), it has {num_found}; give more text, or lower num_calibration_samples or "
            "max_seq_length"
        )


# The model


def _apply_scales(model: Decoder, layout: Layout, amaxes: Amaxes, kept: dict[str, str], with_kv_scales: bool) -> None:
    """Give the model what was measured; linears without a scale join those that are kept."""
    if with_kv_scales:
        model.kv_scales = amaxes.kv_scales()
    if layout.input != "static":
        return
    scales = amaxes.input_scales()
    for name in amaxes.inputs:
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear), name
        if name in scales:
            linear.set_input_scale(scales[name])
        else:
            kept.setdefault(name, "its input is zero in all of the calibration text")
    if not set(scales) - set(kept):
        raise DataError("the inputs of all linears are zero in all of the calibration text; no scale can be made")


# The report


def _weight_sqnr_db(model: Decoder, layout: Layout, kept: dict[str, str]) -> dict[str, float]:
    """Of every module that the checkpoint has in codes."""
    found: dict[str, float] = {}
    for parameter in parameter_names(model.config):
        name = _linear_name(parameter)
        if parameter.is_linear_weight and name not in kept:
            linear = model.get_submodule(name)
            assert isinstance(linear, Linear) and linear.weight is not None and layout.weight is not None, name
            codes = written_codes(name, linear, parameter, layout.weight)
            for part, weight in parameter.split(linear.weight.detach()).items():
                decoded = codes[part].dequantize(torch.float32)
                found[part.removesuffix(".weight")] = min(sqnr(weight, decoded), _EQUAL_DB)
    return found


def _linear_name(parameter: ParameterNames) -> str:
    return parameter.name.removesuffix(".weight")


def _modules(parameters: Iterable[ParameterNames]) -> tuple[str, ...]:
    """Hugging Face's names of the modules that parameters are made of."""
    return tuple(name.removesuffix(".weight") for parameter in parameters for name, _ in parameter.parts)


def _reasons(config: ModelConfig, kept: dict[str, str]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for parameter in parameter_names(config):
        if parameter.name == "embed_tokens.weight":
            reasons |= dict.fromkeys(_modules([parameter]), _EMBEDDING_REASON)
        elif _linear_name(parameter) in kept:
            reasons |= dict.fromkeys(_modules([parameter]), kept[_linear_name(parameter)])
    for name in never_quantized(config):
        is_head = name == "lm_head"
        if not (is_head and config.tie_word_embeddings):
            reasons[name] = _HEAD_REASON if is_head else _ROUTER_REASON
    return reasons
