"""Checkpoints of other tools' FP8 dialects, made by hand: their names, dtypes, rounding and config files."""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from octavo.models import Decoder, ModelConfig, load_model, save_model

FP8 = torch.float8_e4m3fn
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def load_quietly(path: Path, **fields: Any) -> Decoder:
    """load_model without the warnings of what it decodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(path, **fields)


def per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a scalar fp32 scale."""
    scale = weight.float().abs().max() / 448
    return encode(weight, scale), scale


def per_tensor_of_one(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and a bf16 scale [1]: compressed-tensors rounds it, then divides by it in bf16."""
    scale = (weight.float().abs().max() / 448).bfloat16()
    return (weight / scale).clamp(-448, 448).to(FP8), scale.reshape(1)


def per_channel_bf16(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and bf16 scales [N, 1], made as per_tensor_of_one makes them."""
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    return (weight / scale).clamp(-448, 448).to(FP8), scale


def per_channel_flat(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales [N]."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
    return encode(weight, scale), scale.flatten()


def per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales [N, 1]."""
    codes, scale = per_channel_flat(weight)
    return codes, scale[:, None]


def per_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales [N/128, K/128]."""
    blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))  # [N/128, 128, K/128, 128]
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    return encode(blocks, scale[:, None, :, None]).view(torch.uint8).reshape(weight.shape).view(FP8), scale


def per_block_bf16(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and bf16 scales, a little off the exact ones."""
    codes, scale = per_block(weight)
    return codes, scale.bfloat16()


def per_block_4d(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales [N/128, 1, K/128, 1]."""
    codes, scale = per_block(weight)
    return codes, scale[:, None, :, None]


def per_block_e8m0(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one byte a block, the exponent."""
    _, scale = per_block(weight)
    power = torch.exp2(scale.log2().ceil())
    blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    codes = encode(blocks, power[:, None, :, None]).view(torch.uint8).reshape(weight.shape).view(FP8)
    return codes, power.to(torch.float8_e8m0fnu)


def encode(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Division, clamp, round to nearest even."""
    return (weight.float() / scale).clamp(-448, 448).to(FP8)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """One dialect as another tool writes it.

    Attributes:
        config: config.json's quantization_config. file: hf_quant_config.json, where there is one.
        quantize: a weight -> codes, scale as stored. scale, input_scale: last parts of the names.
        kv: names of the KV scales in a layer, {r} for k or v.
        dialect, kind, recipe: what octavo shall say of it: dialect, weight scaling, recipe auto.
    """

    config: dict[str, Any] | None
    quantize: Quantize
    dialect: str
    kind: str
    recipe: str
    scale: str = "weight_scale"
    input_scale: str | None = None
    kv: str | None = None
    file: dict[str, Any] | None = None


def compressed(strategy: str, inputs: dict[str, Any], kv: bool = False, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' quantization_config."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "actorder": None, "observer": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**fp8, "strategy": strategy, "dynamic": False, "block_structure": None, **weights},
                "input_activations": {**fp8, **inputs},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": {**fp8, "strategy": "tensor", "dynamic": False} if kv else None,
        "sparsity_config": {},
        "transform_config": {},
    }


TOKEN, STATIC = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
DYNAMIC_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT_KV = {"dynamic": False, "num_bits": 8, "type": "float"}


def modelopt(algorithm: str, kv: str | None = None) -> dict[str, Any]:
    """hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": kv, "exclude_modules": ["lm_head", "*embed*"]}
    return {"producer": {"name": "modelopt", "version": "0.30"}, "quantization": quantization}


def modelopt_config(algorithm: str, **fields: Any) -> dict[str, Any]:
    """config.json's quantization_config."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **fields}


FOREIGN: dict[str, Foreign] = {
    "block": Foreign(
        {**DYNAMIC_FP8, "weight_block_size": [128, 128], "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]},
        per_block, "fp8-block", "block_128x128", "blockwise", scale="weight_scale_inv",
    ),
    "block-e8m0": Foreign(
        {**DYNAMIC_FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        per_block_e8m0, "fp8-block", "block_128x128", "blockwise", scale="weight_scale_inv",
    ),
    "tensor-dynamic": Foreign(
        {**DYNAMIC_FP8, "ignored_layers": ["lm_head"]}, per_tensor, "fp8-tensor-dynamic", "per_tensor", "rowwise",
        kv="self_attn.{r}_proj.output_scale",
    ),
    "tensor-static": Foreign(
        {**STATIC_FP8, "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"},
        per_tensor, "fp8-tensor-static", "per_tensor", "tensorwise",
        input_scale="input_scale", kv="self_attn.attn.{r}_scale",
    ),
    "transformers-tensor-dynamic": Foreign(
        {**DYNAMIC_FP8, "weight_block_size": None}, per_tensor, "fp8-tensor-dynamic", "per_tensor", "rowwise",
        scale="weight_scale_inv",
    ),
    "transformers-tensor-static": Foreign(
        {**STATIC_FP8, "weight_block_size": None}, per_tensor, "fp8-tensor-static", "per_tensor", "tensorwise",
        scale="weight_scale_inv", input_scale="activation_scale",
    ),
    "compressed-channel": Foreign(
        compressed("channel", TOKEN, kv=True), per_channel_bf16, "compressed-tensors-channel", "per_row", "rowwise",
        kv="self_attn.{r}_scale",
    ),
    "compressed-tensor": Foreign(
        compressed("tensor", STATIC), per_tensor_of_one, "compressed-tensors-tensor", "per_tensor", "tensorwise",
        input_scale="input_scale",
    ),
    "compressed-tensor-token": Foreign(
        compressed("tensor", TOKEN), per_tensor_of_one, "compressed-tensors-tensor", "per_tensor", "rowwise",
    ),
    "compressed-block": Foreign(
        compressed("block", GROUP, block_structure=[128, 128]), per_block_bf16, "compressed-tensors-block",
        "block_128x128", "blockwise",
    ),
    "modelopt": Foreign(
        modelopt_config("FP8", kv_cache_scheme=MODELOPT_KV), per_tensor, "modelopt-tensor", "per_tensor", "tensorwise",
        input_scale="input_scale", kv="self_attn.{r}_proj.{r}_scale", file=modelopt("FP8", "FP8"),
    ),
    "modelopt-file-alone": Foreign(
        None, per_tensor, "modelopt-tensor", "per_tensor", "tensorwise", input_scale="input_scale",
        file=modelopt("FP8"),
    ),
    "modelopt-channel": Foreign(
        modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"), per_channel_flat, "modelopt-channel", "per_row", "rowwise",
        file=modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "modelopt-block": Foreign(
        {"quant_method": "modelopt", **modelopt("fp8_pb_wo")},
        per_block_4d, "modelopt-block", "block_128x128", "bf16", file=modelopt("FP8_PB_WO"),
    ),
    "fbgemm": Foreign(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, per_channel, "fbgemm", "per_row",
        "rowwise",
    ),
}  # fmt: skip


def linear_weights(config: ModelConfig) -> list[str]:
    """Hugging Face's names of the linears' weights."""
    return [
        f"model.layers.{i}.{block}.{part}_proj.weight"
        for i in range(config.num_layers)
        for block, parts in (("self_attn", ATTENTION), ("mlp", MLP))
        for part in parts
    ]


def input_scale_of(name: str) -> float:
    """A made-up input scale, of another value for each linear but for those that see one input."""
    layer = int(name.split(".")[2])
    part = name.split(".")[-2].removesuffix("_proj")
    return 0.01 + 0.003 * layer + {"o": 0.001, "gate": 0.004, "up": 0.004, "down": 0.002}.get(part, 0.0)


def write_foreign(path: Path, config: ModelConfig, how: Foreign, keep: tuple[str, ...] = ()) -> Path:
    """Write a checkpoint in a foreign dialect.

    Args:
        keep: modules, by Hugging Face's names, that stay in bf16 and join the config's list.
    """
    save_model(load_model(config, seed=3), path)
    shutil.rmtree(path / "octavo")
    tensors = load_file(path / "model.safetensors")
    for name in linear_weights(config):
        module = name.removesuffix(".weight")
        if module in keep:
            continue
        tensors[name], tensors[f"{module}.{how.scale}"] = how.quantize(tensors[name])
        if how.input_scale:
            scale = torch.tensor(input_scale_of(name))
            is_compressed = how.dialect.startswith("compressed")
            tensors[f"{module}.{how.input_scale}"] = scale.bfloat16().reshape(1) if is_compressed else scale
    for i in range(config.num_layers if how.kv else 0):
        for r, value in (("k", 0.25 + i), ("v", 0.5 + i)):
            tensors[f"model.layers.{i}.{str(how.kv).format(r=r)}"] = torch.tensor(value)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text())
    if how.config is not None:
        lists = {k: [*v, *keep] for k, v in how.config.items() if k in ("ignore", "ignored_layers")}
        fields["quantization_config"] = {**how.config, **lists}
    (path / "config.json").write_text(json.dumps(fields))
    if how.file is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(how.file))
    return path
