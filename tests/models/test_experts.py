"""Checkpoints of models with experts: codes as files hold them, what is left out, and transformers' reading of them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.models import Decoder, ModelConfig, load_model, save_model
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.nn import GroupedLinear, PackedContext
from octavo.testing import assert_bitwise

TOKENS = torch.arange(40)


@pytest.fixture
def moe_config() -> ModelConfig:
    """Experts that divide into 128 x 128 blocks, in the second of two layers."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 2}
    return ModelConfig("qwen3_moe", 96, 128, 256, 2, 4, 4, 32, qk_norm=True, norm_topk_prob=True, **sizes)  # type: ignore[arg-type]


def logits(model: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, PackedContext.from_lengths([40], model.numerics)))


@pytest.mark.parametrize(
    ("dialect", "recipe", "read"),
    [
        ("fp8-block", "bf16", "blockwise"),
        ("fp8-block", "blockwise", "blockwise"),
        ("compressed-tensors-channel", "rowwise", "rowwise"),
        ("fp8-tensor-dynamic", "tensorwise", "tensorwise"),
    ],
)
def test_codes_there_and_back(moe_config: ModelConfig, tmp_path: Path, dialect: str, recipe: str, read: str) -> None:
    model = load_model(moe_config, recipe=recipe, seed=4)
    save_model(model, tmp_path / "m", dialect)
    names = SafetensorsReader(tmp_path / "m").entries
    assert names["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (128, 128)
    if dialect == "fp8-block":
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head", "model.layers.1.mlp.gate"]
        assert names["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"].shape == (1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_model(tmp_path / "m", recipe=read)
    experts = loaded.get_submodule("layers.1.mlp.experts.gate_up_proj")
    assert isinstance(experts, GroupedLinear) and experts.weight is None
    if recipe == "bf16":
        model.set_numerics(loaded.numerics)
    assert_bitwise(logits(loaded), logits(model))
    save_model(loaded, tmp_path / "again", dialect)
    files = [tmp_path / name / "model.safetensors" for name in ("m", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_transformers_reads_the_codes(moe_config: ModelConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_model(load_model(moe_config, seed=4), tmp_path / "m", "fp8-block")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decode = transformers.FineGrainedFP8Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", quantization_config=decode)
        model = model.float()
        with torch.no_grad():
            theirs = model(TOKENS[None]).logits[0]
        ours = logits(load_model(tmp_path / "m").float())  # decoded to bf16 first, as theirs
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_missing_expert_is_named(moe_config: ModelConfig, tmp_path: Path, edit_tensors: Callable[..., None]) -> None:
    save_model(load_model(moe_config), tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        load_model(tmp_path / "m")
