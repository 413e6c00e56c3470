"""quantize_checkpoint: the written codes and scales beside those made by hand, the report, and what it refuses."""

import dataclasses
import json
import math
import string
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import CheckpointError, ConfigError, DataError, OctavoError, RecipeError
from octavo.models import (
    CalibrationText,
    Decoder,
    ModelConfig,
    QuantizationReport,
    char_tokenizer,
    load_model,
    load_tokenizer,
    perplexity,
    quantize_checkpoint,
    save_model,
    sequence_logprobs,
)
from octavo.models.checkpoint.inspect import inspect_checkpoint
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.models.quantize import QUANTIZED_DIALECTS
from octavo.models.text_windows import read_windows
from octavo.nn import Linear, PackedContext, plan_fusion

ALPHABET = string.ascii_lowercase + " .\n"
SEQ_LEN, SAMPLES, HELD_OUT = 32, 4, 3
E4M3_MAX = 448.0


@pytest.fixture
def checkpoint(tmp_path: Path, config: ModelConfig) -> Path:
    return write_checkpoint(tmp_path / "model", config)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text(tmp_path / "calibration.txt", SEQ_LEN * (SAMPLES + HELD_OUT) + 5)


@pytest.fixture
def text(text_file: Path) -> CalibrationText:
    return CalibrationText(text_file, None, SAMPLES, 8, SEQ_LEN)


def write_checkpoint(path: Path, config: ModelConfig) -> Path:
    save_model(load_model(config), path, tokenizer=char_tokenizer(ALPHABET))
    (path / "generation_config.json").write_text('{"temperature": 0.6}')
    return path


def write_text(path: Path, num_chars: int) -> Path:
    draws = torch.randint(len(ALPHABET), (num_chars,), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(ALPHABET[i] for i in draws))
    return path


def windows(checkpoint: Path, file: Path) -> list[list[int]]:
    tokens = load_tokenizer(checkpoint).encode(file.read_text())
    return [tokens[i : i + SEQ_LEN] for i in range(0, len(tokens) - SEQ_LEN + 1, SEQ_LEN)]


def divide(dividend: float, divisor: torch.Tensor) -> torch.Tensor:
    """Correctly rounded in fp32, which torch's number / tensor is not."""
    return torch.from_numpy(np.asarray(np.float32(dividend) / divisor.numpy()))


def linear_names(directory: Path) -> list[str]:
    return [name for name in SafetensorsReader(directory).entries if name.endswith("_proj.weight")]


# What is written


@pytest.mark.parametrize("dialect", ["fp8-tensor", "compressed-tensors", "fp8-block"])
def test_codes_and_scales_are_those_made_by_hand(checkpoint: Path, tmp_path: Path, dialect: str) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "out", dialect)
    source, written = SafetensorsReader(checkpoint), SafetensorsReader(tmp_path / "out")
    assert len(linear_names(checkpoint)) == 14
    for name in linear_names(checkpoint):
        weight = source.load(name).float()
        if dialect == "fp8-block":
            rows, cols = (size // 128 for size in weight.shape)
            amax = weight.view(rows, 128, cols, 128).abs().amax(dim=(1, 3))
        else:
            amax = weight.abs().amax(dim=1, keepdim=True) if dialect == "compressed-tensors" else weight.abs().amax()
        quant_scale = divide(E4M3_MAX, amax)
        scale = divide(1.0, quant_scale)
        if dialect == "fp8-block":
            quant_scale = quant_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (weight * quant_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        suffix = "_scale_inv" if dialect == "fp8-block" else "_scale"
        assert torch.equal(written.load(name).view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(written.load(f"{name}{suffix}"), scale), name
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(written.load(name), source.load(name))


def captured_inputs(model: Decoder, sequences: list[list[int]]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Largest input of every linear over sequences, and every qkv_proj's output, by hooks."""
    amaxes: dict[str, float] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or name == "lm_head":
            continue

        def note(_: object, args: tuple[torch.Tensor, ...], out: torch.Tensor, name: str = name) -> None:
            amaxes[name] = max(amaxes.get(name, 0.0), args[0].abs().max().item())
            outputs[name] = out

        module.register_forward_hook(note)
    plan_fusion(model)
    context = PackedContext.from_lengths([len(s) for s in sequences])
    with torch.no_grad():
        model(torch.tensor([token for s in sequences for token in s]), context)
    return amaxes, outputs


def kv_amaxes(model: Decoder, qkv: torch.Tensor, layer: int, num_sequences: int) -> tuple[float, float]:
    attention = model.layers[layer].self_attn
    _, k, v = qkv.split(attention.qkv_proj.parts, dim=-1)
    k = attention.k_norm(k.reshape(len(k), attention.num_kv_heads, -1))
    k = attention.rope(k, torch.arange(SEQ_LEN).repeat(num_sequences))
    return k.abs().max().item(), v.abs().max().item()


@pytest.mark.parametrize("dialect", ["fp8-tensor-static", "compressed-tensors-tensor"])
def test_static_scales_are_amax_over_448(
    checkpoint: Path, text_file: Path, text: CalibrationText, tmp_path: Path, dialect: str
) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "out", dialect, text=text, kv_scales=True)
    sequences = windows(checkpoint, text_file)[:SAMPLES]  # the held-out text leaves no trace in them
    model, written = load_model(checkpoint), SafetensorsReader(tmp_path / "out")
    amaxes, outputs = captured_inputs(model, sequences)
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for name in linear_names(checkpoint):
        module, _, last = name.removeprefix("model.").removesuffix(".weight").rpartition(".")
        expected = np.float32(amaxes[f"{module}.{fused.get(last, last)}"]) / np.float32(E4M3_MAX)
        assert written.load(name.replace("weight", "input_scale")).item() == expected.item(), name
    loaded = load_model(tmp_path / "out", recipe="auto")
    for layer in range(model.config.num_layers):
        k, v = kv_amaxes(model, outputs[f"layers.{layer}.self_attn.qkv_proj"], layer, SAMPLES)
        scales = loaded.kv_scales[layer]
        assert scales.k_scale.item() == np.float32(k) / np.float32(E4M3_MAX)
        assert scales.v_scale.item() == np.float32(v) / np.float32(E4M3_MAX)


@pytest.mark.parametrize("dialect", QUANTIZED_DIALECTS)
def test_every_dialect_is_written_whole(checkpoint: Path, text: CalibrationText, tmp_path: Path, dialect: str) -> None:
    report = quantize_checkpoint(checkpoint, tmp_path / "out", dialect, text=text, kv_scales=True)
    found = inspect_checkpoint(tmp_path / "out")
    assert found.problems == []
    assert found.dialect == report.dialect
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.6}'
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path, text: CalibrationText) -> None:
    config = ModelConfig(
        "qwen3_moe", 96, 128, 256, 2, 4, 4, 32, qk_norm=True, max_position_embeddings=128,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
    )  # fmt: skip
    source = write_checkpoint(tmp_path / "model", config)
    report = quantize_checkpoint(source, tmp_path / "out", "fp8-tensor", activation="static", text=text)
    written = SafetensorsReader(tmp_path / "out")
    assert "router" in report.kept["model.layers.1.mlp.gate"]
    assert written.entries["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert written.entries["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == torch.float8_e4m3fn
    scales = {written.load(f"model.layers.0.mlp.experts.{i}.up_proj.input_scale").item() for i in range(4)}
    assert len(scales) == 1


def test_an_fp32_checkpoint_is_used_as_bf16(tmp_path: Path, config: ModelConfig, stored_bytes) -> None:
    model = load_model(config, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        save_model(model.to(dtype), tmp_path / str(dtype))
        quantize_checkpoint(tmp_path / str(dtype), tmp_path / f"{dtype}-fp8", "fp8-block")
    assert stored_bytes(tmp_path / "torch.float32-fp8") == stored_bytes(tmp_path / "torch.bfloat16-fp8")


# What stays in bf16


def test_ignored_modules_stay_with_what_they_are_fused_with(checkpoint: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(
        checkpoint, tmp_path / "out", "fp8-tensor", ignore=["k_proj", "model.layers.1.mlp", "re:.*layers.0.*o_proj"]
    )
    layers = [f"model.layers.{i}" for i in (0, 1)]
    attention = {f"{layer}.self_attn.{p}_proj" for layer in layers for p in "qkv"}
    others = {f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up", "down")} | {"model.layers.0.self_attn.o_proj"}
    assert set(report.kept) == {*attention, *others, "lm_head", "model.embed_tokens"}
    assert "k_proj shares one GEMM" in report.kept["model.layers.0.self_attn.q_proj"]
    assert report.kept["model.layers.1.mlp.up_proj"] == "ignore 'model.layers.1.mlp'"
    source, written = SafetensorsReader(checkpoint), SafetensorsReader(tmp_path / "out")
    for name in report.kept:
        assert torch.equal(written.load(f"{name}.weight"), source.load(f"{name}.weight")), name
    assert all(written.entries[f"{name}.weight"].dtype == torch.float8_e4m3fn for name in report.quantized)
    listed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignored_layers"]
    assert set(listed) == set(report.kept) - {"model.embed_tokens"}
    high = {row.name for row in load_model(tmp_path / "out", recipe="auto").conversion_report.rows if not row.recipe}
    assert {"layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj"} <= high


def test_ragged_linears_stay_and_run_in_bf16(tmp_path: Path, ragged_config: ModelConfig) -> None:
    source = write_checkpoint(tmp_path / "model", ragged_config)
    report = quantize_checkpoint(source, tmp_path / "out", "fp8-block")
    assert report.kept["model.layers.0.mlp.down_proj"] == "128 x 344 does not divide into blocks of 128 x 128"
    assert report.quantized == tuple(f"model.layers.{i}.self_attn.o_proj" for i in (0, 1))
    fp8 = load_model(tmp_path / "out", recipe="auto").conversion_report.fp8_names
    assert fp8 == ("layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj")


# The report


def by_scoring(model: Decoder, sequences: list[list[int]]) -> float:
    with torch.no_grad():
        return math.exp(-torch.cat(sequence_logprobs(model, sequences)).double().mean().item())


@pytest.mark.parametrize("dialect", ["fp8-tensor-static", "fp8-block"])
def test_the_report_has_scorings_perplexities(
    checkpoint: Path, text_file: Path, text: CalibrationText, tmp_path: Path, dialect: str
) -> None:
    report = quantize_checkpoint(checkpoint, tmp_path / "out", dialect, text=text)
    num_calibrated = SAMPLES if dialect == "fp8-tensor-static" else 0
    held_out = windows(checkpoint, text_file)[num_calibrated:]
    before = by_scoring(load_model(checkpoint), held_out)
    after = by_scoring(load_model(tmp_path / "out", recipe="auto"), held_out)
    assert report.perplexity_before == pytest.approx(before, rel=1e-12)
    assert report.perplexity_after == pytest.approx(after, rel=1e-12)
    assert before != after
    assert report.perplexity_fp8_kv is None
    assert report.num_calibration_tokens == num_calibrated * SEQ_LEN
    assert report.num_eval_tokens == len(held_out) * (SEQ_LEN - 1)
    for num_bytes, directory in ((report.num_bytes_before, checkpoint), (report.num_bytes_after, tmp_path / "out")):
        tensors = SafetensorsReader(directory)
        assert num_bytes == sum(tensors.load(name).nbytes for name in tensors.entries)


def test_an_evaluation_text_takes_the_place_of_the_held_out_part(
    checkpoint: Path, text: CalibrationText, tmp_path: Path
) -> None:
    rows = [{"text": "a quick brown fox. " * 3}, {"text": "jumps over it. " * 3}]
    file = tmp_path / "eval.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    text = dataclasses.replace(text, evaluation=file)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", "fp8-tensor-static", text=text)
    tokenizer = load_tokenizer(checkpoint)
    tokens = [token for row in rows for token in (*tokenizer.encode(row["text"]), tokenizer.eos_id)]
    expected = [tokens[i : i + SEQ_LEN] for i in range(0, len(tokens) - SEQ_LEN + 1, SEQ_LEN)]
    assert len(expected) == 3
    assert read_windows(file, tokenizer, SEQ_LEN, 8) == expected
    assert report.perplexity_before == pytest.approx(by_scoring(load_model(checkpoint), expected), rel=1e-12)


def test_perplexity_with_kv_scales_shows_a_bad_scale(checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    text = CalibrationText(text_file, None, SAMPLES, 8, SEQ_LEN)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", "fp8-tensor", text=text, kv_scales=True)
    assert report.perplexity_fp8_kv not in (None, report.perplexity_after)
    assert report.perplexity_fp8_kv == pytest.approx(report.perplexity_after, rel=0.01)
    model, held_out = load_model(tmp_path / "out", recipe="auto"), windows(checkpoint, text_file)[SAMPLES:]
    good = perplexity(model, held_out, kv_scales=model.kv_scales)
    assert good == report.perplexity_fp8_kv
    clipped = [dataclasses.replace(s, k_scale=s.k_scale / 1e4, v_scale=s.v_scale / 1e4) for s in model.kv_scales]
    bad = perplexity(model, held_out, kv_scales=tuple(clipped))
    assert abs(bad - report.perplexity_after) > 10 * abs(good - report.perplexity_after)


def test_every_sequence_begins_with_the_bos_token_that_the_tokenizer_adds(tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    found = read_windows(write_text(tmp_path / "t.txt", 100), tokenizer, 8, 99)
    assert [window[0] for window in found] == [0] * (100 // 7)
    body = [token for window in found for token in window[1:]]
    assert body == tokenizer.encode((tmp_path / "t.txt").read_text())[: len(body)]


def test_conversations_are_read_by_the_chat_template(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}.{% endfor %}"
    row = {"messages": [{"role": "user", "content": "why"}, {"role": "bot", "content": "so"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row))
    document = [*tokenizer.encode("user why.bot so."), 0]
    assert read_windows(tmp_path / "chat.jsonl", tokenizer, 17, 9) == [document, document]


# What is refused


def refuse(
    error: type[OctavoError], match: str, source: Path, out: Path, dialect: str = "fp8-tensor", **fields: object
) -> None:
    beside = set(out.parent.iterdir())
    with pytest.raises(error, match=match):
        quantize_checkpoint(source, out, dialect, **fields)  # type: ignore[arg-type]
    assert set(out.parent.iterdir()) == beside


def test_options_that_do_not_fit_are_refused(checkpoint: Path, text: CalibrationText, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refuse(CheckpointError, "dialect must be one of fp8-block", checkpoint, out, "bf16")
    refuse(ConfigError, "has dynamic scales .* choose one of fp8-tensor-static", checkpoint, out, "fp8-block",
           activation="static", text=text)  # fmt: skip
    refuse(ConfigError, "activation must be static or dynamic", checkpoint, out, activation="token")
    refuse(ConfigError, "made from calibration text; name a file .--calibration", checkpoint, out, activation="static")
    refuse(ConfigError, "made from calibration text", checkpoint, out, kv_scales=True)
    refuse(ConfigError, "'kproj' names no linear.*; did you mean 'k_proj'", checkpoint, out, ignore=["kproj"])
    with pytest.warns(DeprecationWarning, match="use ignore"):
        refuse(ConfigError, "'kproj' names no linear", checkpoint, out, exclude=["kproj"])
    few = "'foo' names no linear of this model; the nearest names are '[^,]+', '[^,]+', '[^,]+'$"
    refuse(ConfigError, few, checkpoint, out, ignore=["foo"])
    refuse(RecipeError, r"ignore takes a list .* write ignore=\['lm_head'\]", checkpoint, out, ignore="lm_head")
    refuse(ConfigError, "nothing is left to quantize", checkpoint, out, ignore=["model.layers"])
    long = dataclasses.replace(text, max_seq_length=129)
    refuse(ConfigError, "max_seq_length=129 exceeds max_position_embeddings=128", checkpoint, out, text=long)


def test_too_little_or_unreadable_text_is_refused(checkpoint: Path, text: CalibrationText, tmp_path: Path) -> None:
    many = dataclasses.replace(text, num_calibration_samples=SAMPLES + HELD_OUT)
    refuse(DataError, r"8 sequences of 32 tokens .*7 for calibration and at least 1 for perplexity.* has 7", checkpoint,
           tmp_path / "out", activation="static", text=many)  # fmt: skip
    for name, content, match in (
        ("short.txt", "abc", r"1 sequences .*\(at least 1 for perplexity\), it has 0"),
        ("rows.jsonl", '{"text": "a"}\n{"body": "b"}', r"rows.jsonl:2: a row must be"),
        ("broken.jsonl", "{", r"broken.jsonl:1: not valid JSON"),
        ("text.csv", "a", r"\.txt and \.jsonl"),
        ("other.txt", "ABC", "alphabet"),
    ):
        (tmp_path / name).write_text(content)
        refuse(DataError, match, checkpoint, tmp_path / "out", text=CalibrationText(evaluation=tmp_path / name,
               max_seq_length=SEQ_LEN))  # fmt: skip
    refuse(DataError, "cannot be read", checkpoint, tmp_path / "out",
           text=CalibrationText(evaluation=tmp_path / "absent.txt", max_seq_length=SEQ_LEN))  # fmt: skip


def test_checkpoints_that_cannot_be_quantized_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint, tmp_path / "fp8", "fp8-block")
    refuse(CheckpointError, "quantized already .*fp8-block", tmp_path / "fp8", tmp_path / "out")
    refuse(CheckpointError, "exists already", checkpoint, tmp_path / "fp8")
    refuse(CheckpointError, "exists already", checkpoint, checkpoint)
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**fields, "model_type": "mystery"}))
    refuse(CheckpointError, "'mystery' is not an architecture", checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("model.layers.0.mlp.gate_proj.weight", 3e38, r"the input of layers.0.mlp.down_proj is not finite"),
        ("model.embed_tokens.weight", 0.0, "the inputs of all linears are zero"),
    ],
)
def test_values_without_a_scale_are_refused(
    checkpoint: Path, text: CalibrationText, tmp_path: Path, edit_tensors, name: str, value: float, match: str
) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors[name].fill_(value))
    refuse(DataError, match, checkpoint, tmp_path / "out", activation="static", text=text)


def test_a_linear_whose_input_is_zero_stays_in_bf16(
    checkpoint: Path, text: CalibrationText, tmp_path: Path, edit_tensors
) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].zero_())
    report = quantize_checkpoint(checkpoint, tmp_path / "out", "fp8-tensor", activation="static", text=text)
    assert report.kept["model.layers.1.mlp.down_proj"] == "its input is zero in all of the calibration text"
    assert inspect_checkpoint(tmp_path / "out").problems == []


@pytest.mark.parametrize("stage", ["calibrating", "writing", "perplexity in FP8"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failure_leaves_nothing_behind(
    checkpoint: Path, text: CalibrationText, tmp_path: Path, stage: str, error: type[BaseException]
) -> None:
    beside, reached = set(tmp_path.iterdir()), []

    def fail(name: str, done: int, total: int) -> None:
        reached.append(name)
        if name == stage:
            raise error

    with pytest.raises(error):
        quantize_checkpoint(checkpoint, tmp_path / "out", "fp8-tensor-static", text=text, on_progress=fail)
    assert reached[-1] == stage
    assert set(tmp_path.iterdir()) == beside
    report = quantize_checkpoint(checkpoint, tmp_path / "out", "fp8-tensor-static", text=text)
    assert isinstance(report, QuantizationReport)


def test_the_report_is_json_where_codes_are_the_weights(checkpoint: Path, tmp_path: Path, edit_tensors) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].zero_())
    report = quantize_checkpoint(checkpoint, tmp_path / "out", "fp8-tensor")
    assert report.weight_sqnr_db["model.layers.1.mlp.up_proj"] == 999.0
    assert "Infinity" not in (tmp_path / "out" / "octavo" / "quantization.json").read_text()
