"""load_model with a cut: a rank reads its slices alone, and has the bits of the whole model that is cut afterwards."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.models import Decoder, ModelConfig, load_model, save_model
from octavo.models.checkpoint.parallel_read import ParallelReader
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.nn import PackedContext
from octavo.nn.live_weights import live_tensors
from octavo.parallel import parallelize
from octavo.testing import assert_bitwise
from tests.models.test_load_memory import peak_bytes

SIZES: dict[str, Any] = {
    "vocab_size": 96, "max_position_embeddings": 64, "num_heads": 4, "num_kv_heads": 4,
    "head_dim": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "attention_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "tie_word_embeddings": True, "num_kv_heads": 2},
    "small heads": {"family": "llama", "num_heads": 8, "head_dim": 64},  # four ranks cut a block of k
    "gptj": {"family": "gptj", "rotary_dim": 64},
    "odd": {"family": "llama", "vocab_size": 97},  # the head stays whole
}
# the checkpoint's recipe -> its dialect
DIALECTS = {
    "bf16": "bf16", "delayed": "bf16", "blockwise": "fp8-block", "rowwise": "compressed-tensors-channel",
    "tensorwise": "fp8-tensor-dynamic",
}  # fmt: skip
Case = tuple[str, str, str, str]  # model, the checkpoint's recipe, that of the loaded model, mode
CASES: list[Case] = [
    ("qwen3", "bf16", "bf16", "reduce"),
    ("llama", "bf16", "blockwise", "reduce"),
    ("qwen3", "bf16", "rowwise", "reduce"),
    ("qwen3", "blockwise", "auto", "reduce"),
    ("llama", "blockwise", "auto", "gather"),
    # from here on in the slow lane
    ("llama", "bf16", "bf16", "gather"),
    ("qwen3", "bf16", "blockwise", "gather"),
    ("llama", "bf16", "rowwise", "gather"),
    ("llama", "bf16", "tensorwise", "reduce"),
    ("gptj", "bf16", "rowwise", "reduce"),
    ("odd", "bf16", "blockwise", "gather"),
    ("llama", "delayed", "delayed", "reduce"),
    ("small heads", "blockwise", "bf16", "reduce"),
    ("llama", "blockwise", "rowwise", "reduce"),
    ("qwen3", "rowwise", "auto", "reduce"),
    ("llama", "rowwise", "tensorwise", "reduce"),
    ("llama", "tensorwise", "auto", "reduce"),
    ("qwen3", "tensorwise", "tensorwise", "gather"),
]
NUM_FAST = 5
RUNS = [(case, 2) for case in CASES[:NUM_FAST]]
RUNS += [pytest.param(case, 2, marks=pytest.mark.slow) for case in CASES[NUM_FAST:]]
RUNS += [pytest.param(case, 4, marks=pytest.mark.largest) for case in CASES]
# of weights whose scales several ranks share, and of blocks that are cut, a slice is read whole
READ_WHOLE = {
    ("qwen3", "bf16", "rowwise", "reduce"), ("gptj", "bf16", "rowwise", "reduce"),
    ("llama", "bf16", "tensorwise", "reduce"), ("llama", "blockwise", "rowwise", "reduce"),
    ("llama", "rowwise", "tensorwise", "reduce"), ("small heads", "blockwise", "bf16", "reduce"),
}  # fmt: skip
LINEARS = ("proj.weight", "fc_in.weight", "fc_out.weight")
pytestmark = pytest.mark.filterwarnings("ignore:.*FP8 weight.*decoded to")


def config_of(name: str, world: int, num_layers: int = 1) -> ModelConfig:
    width = 128 * world
    sizes = {**SIZES, "hidden_size": width, "intermediate_size": width, "num_layers": num_layers, **MODELS[name]}
    return ModelConfig(**sizes | ({"num_heads": world, "num_kv_heads": world} if name == "gptj" else {}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Path]:
    """checkpoint(model, recipe, ranks) -> its directory; each of the ranks gets whole blocks."""
    folder = tmp_path_factory.mktemp("slices")

    @functools.cache
    def make(name: str, recipe: str, world: int) -> Path:
        model = load_model(config_of(name, world), recipe=recipe)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():  # norms and biases differ from row to row too
                param += (torch.randn(param.shape, generator=noise) / 50).to(param.dtype)
        model.mark_weights_updated()
        path = folder / f"{name}-{recipe}-{world}"
        save_model(model, path, DIALECTS[recipe])
        return path

    return make


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of tensors."""
    counted: list[int] = []
    read = ParallelReader.read

    def counting(self: ParallelReader, file: Path, start: int, out: torch.Tensor, stride: int = 1) -> None:
        counted.append(out.numel())
        read(self, file, start, out, stride)

    monkeypatch.setattr(ParallelReader, "read", counting)
    return counted


def load(path: Path, recipe: str, cut: Any = None) -> Decoder:
    return load_model(path, recipe=recipe, keep_codes_only=True, cut=cut)


def differing(loaded: Decoder, expected: Decoder) -> list[str]:
    """Names of tensors that differ in a bit."""
    mine, theirs = ({n: t.contiguous().view(-1).view(torch.uint8) for n, t in live_tensors(m).items() if t.dim()}
                    for m in (loaded, expected))  # fmt: skip
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


def kept_bytes(model: Decoder, path: Path) -> int:
    """Of a checkpoint's files: what a rank keeps of the weights, and every scale."""
    entries, tensors = SafetensorsReader(path).entries, live_tensors(model)
    size = min(entry.dtype.itemsize for entry in entries.values())  # of an element of a linear in the layers
    values = sum(2 * p.numel() for name, p in model.named_parameters() if not name.endswith(LINEARS))
    linears = sum(tensors[name].numel() for name in tensors if name.endswith(LINEARS) or ".codes." in name)
    return values + size * linears + sum(entry.num_bytes for name, entry in entries.items() if "scale" in name)


@pytest.mark.parametrize(
    ("case", "world"), RUNS, ids=lambda given: given if isinstance(given, int) else " ".join(given)
)
def test_slices_have_the_bits_of_the_whole_model_cut(
    case: Case, world: int, checkpoint: Callable[[str, str, int], Path], num_read: list[int]
) -> None:
    name, stored, recipe, mode = case
    path = checkpoint(name, stored, world)
    whole = load(path, recipe)
    for rank in range(world):
        cut = functools.partial(parallelize, mesh=TensorGroup(None, rank, world), mode=mode)  # type: ignore[arg-type]
        expected = copy.deepcopy(whole)
        cut(expected)
        num_read.clear()
        loaded = load(path, recipe, cut)
        assert differing(loaded, expected) == []
        assert [type(module) for module in loaded.modules()] == [type(module) for module in expected.modules()]
        is_more = case in READ_WHOLE and not (name == "small heads" and (world == 2 or rank % 2 == 0))
        if stored != "delayed":  # its state is read too
            assert (sum(num_read) > kept_bytes(loaded, path)) == is_more
            assert sum(num_read) >= kept_bytes(loaded, path)


def test_loading_slices_takes_a_share_of_the_memory(tmp_path: Path) -> None:
    save_model(load_model(config_of("llama", 2, num_layers=6)), tmp_path / "m")
    whole, *_ = peak_bytes(lambda: load(tmp_path / "m", "bf16"))
    group = TensorGroup(None, 1, 2)
    peak, *_ = peak_bytes(lambda: load(tmp_path / "m", "bf16", lambda model: parallelize(model, group)))
    assert peak < 0.55 * whole


def test_a_recipe_with_state_begins_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    save_model(load_model(config_of("llama", 2)), tmp_path / "m")
    whole, cut = (load_model(tmp_path / "m", recipe="delayed", cut=each) for each in (None, lambda model: None))
    tokens = torch.arange(9)
    with torch.no_grad():
        found, expected = (model(tokens, PackedContext.from_lengths([9], model.numerics)) for model in (cut, whole))
    assert_bitwise(found, expected)
