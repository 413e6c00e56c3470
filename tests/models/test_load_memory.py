"""Memory while a checkpoint is loaded: quantizing it never takes more than loading it in bf16 does."""

import dataclasses
import gc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from octavo.errors import ConfigError, RecipeError
from octavo.models import Decoder, ModelConfig, load_model, save_model, sequence_logprobs
from octavo.models.checkpoint import read_ahead
from octavo.models.checkpoint.safetensors_io import Place, SafetensorsReader
from octavo.nn import Linear
from octavo.testing import assert_bitwise

TOKENS = [list(range(1, 90))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint whose layers are small beside all of it, as a real one's are."""
    config = ModelConfig("qwen3", 96, 256, 512, 8, 4, 2, 64, qk_norm=True, max_position_embeddings=128)
    path = tmp_path_factory.mktemp("memory") / "checkpoint"
    save_model(load_model(config), path)
    return path


class AtOnce:
    """In place of threads, whose memory the profiler does not see: all that may be ahead is read at once."""

    def __init__(self, num: int, thread_name_prefix: str) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self, *, cancel_futures: bool) -> None: ...


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", AtOnce)


def bf16_bytes(model: Decoder) -> int:
    return 2 * model.num_params


def peak_bytes(load: Callable[[], Decoder]) -> tuple[int, int, Decoder]:
    """(the most that tensors on the CPU held at a time while it ran, what is held at its end, the model)."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = load()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, held, model


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_loading_to_fp8_never_holds_more_than_loading_to_bf16(checkpoint: Path, recipe: str) -> None:
    bf16_peak, bf16_held, bf16 = peak_bytes(lambda: load_model(checkpoint))
    peak, held, model = peak_bytes(lambda: load_model(checkpoint, recipe=recipe, keep_codes_only=True))
    assert bf16_held == pytest.approx(bf16_bytes(bf16), rel=0.02), "the tracking sees the weights"
    assert peak <= bf16_peak
    assert held < 0.55 * bf16_held
    assert sum(linear.weight is not None for linear in linears(model)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_loading_to_fp8_on_a_gpu_stays_below_the_bf16_weights(checkpoint: Path, recipe: str) -> None:
    load_model(checkpoint, device="cuda", recipe=recipe, keep_codes_only=True)  # kernels, workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(checkpoint, device="cuda", recipe=recipe, keep_codes_only=True)
    assert torch.cuda.max_memory_allocated() - before < bf16_bytes(model)


def linears(model: Decoder) -> list[Linear]:
    return [m for name, m in model.named_modules() if isinstance(m, Linear) and name != "lm_head"]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise"])
def test_the_codes_are_those_of_the_kept_weights(checkpoint: Path, recipe: str) -> None:
    kept, alone = load_model(checkpoint, recipe=recipe), load_model(checkpoint, recipe=recipe, keep_codes_only=True)
    for mine, theirs in zip(linears(alone), linears(kept), strict=True):
        for q, expected in zip(mine.quantized_weight(), theirs.quantized_weight(), strict=True):
            assert_bitwise(q.qdata, expected.qdata)
            assert_bitwise(q.scale, expected.scale)
    with torch.no_grad():
        assert_bitwise(sequence_logprobs(alone, TOKENS)[0], sequence_logprobs(kept, TOKENS)[0])
    assert alone.conversion_report.fp8_names == kept.conversion_report.fp8_names
    assert not any(parameter.requires_grad for parameter in alone.parameters())


def test_experts_and_linears_left_out_are_loaded_as_before(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = ModelConfig("qwen3_moe", 96, 128, 256, 2, 4, 2, 32, qk_norm=True, max_position_embeddings=128, **experts)
    save_model(load_model(config), tmp_path / "moe")
    kept, alone = (load_model(tmp_path / "moe", recipe="blockwise", keep_codes_only=only) for only in (False, True))
    with torch.no_grad():
        assert_bitwise(sequence_logprobs(alone, TOKENS)[0], sequence_logprobs(kept, TOKENS)[0])
    assert [row.recipe for row in alone.conversion_report.rows] == [row.recipe for row in kept.conversion_report.rows]


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8"])
def test_other_recipes_keep_their_weights(checkpoint: Path, recipe: str) -> None:
    model = load_model(checkpoint, recipe=recipe, keep_codes_only=True)
    assert all(linear.weight is not None for linear in linears(model))


def test_a_model_of_codes_alone_cannot_be_trained_or_take_another_recipe(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="trainable needs every weight, keep_codes_only gives them up"):
        load_model(checkpoint, recipe="blockwise", trainable=True, keep_codes_only=True)
    model = load_model(checkpoint, recipe="blockwise", keep_codes_only=True)
    with pytest.raises(RecipeError):
        model.set_numerics(dataclasses.replace(model.numerics, recipe=load_model(model.config).numerics.recipe))


@pytest.mark.parametrize("is_kept", [True, False])
def test_weights_are_read_to_where_the_model_is(
    checkpoint: Path, is_kept: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU checks and quantizes them: no pass over them on the CPU."""
    found: list[torch.device] = []
    load = SafetensorsReader.load

    def loading(
        self: SafetensorsReader, name: str, device: torch.device | str = "cpu", place: Place | None = None
    ) -> torch.Tensor:
        found.append(torch.device(device))
        return load(self, name, device, place)

    monkeypatch.setattr(SafetensorsReader, "load", loading)
    model = load_model(checkpoint, device=device, recipe="blockwise", keep_codes_only=is_kept)
    assert {each.type for each in found} == {device.type}
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
