"""Hugging Face's tensor names against octavo's parameters; fused projections are split and merged here only.

`qkv_proj` holds q, k and v, `gate_up_proj` holds gate and up, `experts.*` one expert after the other, row after row.
They are fused in storage, never in meaning: each part keeps its own blocks and scales.
"""

import dataclasses
from collections.abc import Iterator

import torch

from octavo.models.config import ModelConfig
from octavo.numerics import QuantizedTensor

# Buffers that old checkpoints carry and no reader needs.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".attn.bias", ".attn.masked_bias")


@dataclasses.dataclass(frozen=True)
class ParameterNames:
    """One parameter of the decoder and the file's tensors that it is made of.

    Attributes:
        name: octavo's name in the decoder's state dict.
        parts: (Hugging Face's name, rows) of each, in order.
        shape: the parameter's shape; its rows are the parts' together.
        is_linear_weight: whether a recipe may quantize it (embeddings, lm_head, norms and biases stay as they are).
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    is_linear_weight: bool = False

    @property
    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's name -> shape."""
        return {name: (rows, *self.shape[1:]) for name, rows in self.parts}

    @property
    def part_rows(self) -> list[int]:
        return [rows for _, rows in self.parts]

    def overlaps(self, first: int, num: int) -> Iterator[tuple[str, int, slice]]:
        """Which rows of the file's tensors some of the parameter's rows are.

        Args:
            first: the first one's number.
            num: how many.
        Yields:
            (Hugging Face's name, first row there, which of the num rows).
        """
        begin_of_part = 0
        for name, num_rows in self.parts:
            begin, end = max(first, begin_of_part), min(first + num, begin_of_part + num_rows)
            if begin < end:
                yield name, begin - begin_of_part, slice(begin - first, end - first)
            begin_of_part += num_rows

    def split(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The file's tensors of a parameter: Hugging Face's name -> [rows, ...]."""
        return dict(zip((name for name, _ in self.parts), parameter.split(self.part_rows), strict=True))

    def merge(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The parameter from the file's tensors."""
        parts = [tensors[name] for name, _ in self.parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def split_codes(self, codes: list[QuantizedTensor]) -> dict[str, QuantizedTensor]:
        """The file's codes of a linear's weight: Hugging Face's name -> [rows, K].

        Args:
            codes: one QuantizedTensor a part, or one over all parts (whose rows are then multiples of the block).
        """
        if len(codes) == 1 and len(self.parts) > 1:
            codes = _split_rows(codes[0], self.part_rows)
        return dict(zip((name for name, _ in self.parts), codes, strict=True))


def _split_rows(codes: QuantizedTensor, part_rows: list[int]) -> list[QuantizedTensor]:
    block_rows = codes.scaling.block_size[0]
    pieces, start = [], 0
    for rows in part_rows:
        assert start % block_rows == 0, f"a part starts inside a block: rows {part_rows}, blocks of {block_rows}"
        scale = codes.scale[start // block_rows : -(-(start + rows) // block_rows)]
        pieces.append(QuantizedTensor(codes.qdata[start : start + rows], scale, codes.scaling))
        start += rows
    return pieces


def parameter_names(config: ModelConfig) -> list[ParameterNames]:
    """Every parameter of a decoder of this architecture, in the order in which checkpoints are written."""
    if config.is_parallel:
        return list(_gptj_names(config))
    hidden = config.hidden_size
    names = [_whole("embed_tokens.weight", "model.embed_tokens.weight", config.vocab_size, hidden)]
    for i in range(config.num_layers):
        names += _layer_names(config, i)
    names.append(_whole("norm.weight", "model.norm.weight", hidden))
    if not config.tie_word_embeddings:
        names.append(_whole("lm_head.weight", "lm_head.weight", config.vocab_size, hidden))
    return names


def never_quantized(config: ModelConfig) -> list[str]:
    """Hugging Face's names of the linears that no recipe reaches: lm_head and the routers."""
    routers = [f"model.layers.{i}.mlp.gate" for i in range(config.num_layers) if config.has_experts(i)]
    return ["lm_head", *routers]


def is_ignored(hf_name: str) -> bool:
    """Whether a file's tensor may go unused: buffers that follow from config.json."""
    return hf_name.endswith(_IGNORED_SUFFIXES)


def _layer_names(config: ModelConfig, index: int) -> Iterator[ParameterNames]:
    hidden, layer = config.hidden_size, f"layers.{index}"
    attn = f"{layer}.self_attn"
    yield _same(f"{layer}.input_layernorm.weight", hidden)
    yield from _linear(f"{attn}.qkv_proj", _qkv(config, attn), hidden, config.attention_bias)
    if config.qk_norm:
        yield _same(f"{attn}.q_norm.weight", config.head_dim)
        yield _same(f"{attn}.k_norm.weight", config.head_dim)
    yield from _linear(f"{attn}.o_proj", {f"{attn}.o_proj": hidden}, config.q_dim, config.out_bias)
    yield _same(f"{layer}.post_attention_layernorm.weight", hidden)
    yield from (_experts if config.has_experts(index) else _mlp)(config, f"{layer}.mlp")


def _mlp(config: ModelConfig, mlp: str) -> Iterator[ParameterNames]:
    hidden, width = config.hidden_size, config.intermediate_size
    yield from _linear(f"{mlp}.gate_up_proj", {f"{mlp}.gate_proj": width, f"{mlp}.up_proj": width}, hidden, False)
    yield from _linear(f"{mlp}.down_proj", {f"{mlp}.down_proj": hidden}, width, False)


def _experts(config: ModelConfig, mlp: str) -> Iterator[ParameterNames]:
    """The router, and every expert's projections one after the other in two parameters."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    yield _same(f"{mlp}.gate.weight", config.num_experts, hidden)
    experts = [f"{mlp}.experts.{i}" for i in range(config.num_experts)]
    gate_up = {f"{expert}.{part}": width for expert in experts for part in ("gate_proj", "up_proj")}
    yield from _linear(f"{mlp}.experts.gate_up_proj", gate_up, hidden, False)
    down = {f"{expert}.down_proj": hidden for expert in experts}
    yield from _linear(f"{mlp}.experts.down_proj", down, width, False)


def _gptj_names(config: ModelConfig) -> Iterator[ParameterNames]:
    hidden, width, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    yield _whole("embed_tokens.weight", "transformer.wte.weight", vocab, hidden)
    for i in range(config.num_layers):
        layer, theirs = f"layers.{i}", f"transformer.h.{i}"
        attn = f"{theirs}.attn"
        yield from _with_bias(f"{layer}.input_layernorm", f"{theirs}.ln_1", hidden)
        yield from _linear(f"{layer}.self_attn.qkv_proj", _qkv(config, attn), hidden, False, prefix="")
        yield from _linear(f"{layer}.self_attn.o_proj", {f"{attn}.out_proj": hidden}, config.q_dim, False, prefix="")
        yield from _linear(f"{layer}.mlp.fc_in", {f"{theirs}.mlp.fc_in": width}, hidden, True, prefix="")
        yield from _linear(f"{layer}.mlp.fc_out", {f"{theirs}.mlp.fc_out": hidden}, width, True, prefix="")
    yield from _with_bias("norm", "transformer.ln_f", hidden)
    yield _whole("lm_head.weight", "lm_head.weight", vocab, hidden)
    yield _whole("lm_head.bias", "lm_head.bias", vocab)


def _with_bias(name: str, hf_name: str, size: int) -> Iterator[ParameterNames]:
    """A LayerNorm's weight and bias."""
    for suffix in ("weight", "bias"):
        yield _whole(f"{name}.{suffix}", f"{hf_name}.{suffix}", size)


def _qkv(config: ModelConfig, attn: str) -> dict[str, int]:
    return {f"{attn}.q_proj": config.q_dim, f"{attn}.k_proj": config.kv_dim, f"{attn}.v_proj": config.kv_dim}


def _linear(
    name: str, parts: dict[str, int], in_features: int, bias: bool, *, prefix: str = "model."
) -> Iterator[ParameterNames]:
    out_features = sum(parts.values())
    for suffix, shape in (("weight", (out_features, in_features)), ("bias", (out_features,))):
        if suffix == "weight" or bias:
            files = tuple((f"{prefix}{part}.{suffix}", rows) for part, rows in parts.items())
            yield ParameterNames(f"{name}.{suffix}", files, shape, is_linear_weight=suffix == "weight")


def _same(name: str, *shape: int) -> ParameterNames:
    return _whole(name, f"model.{name}", *shape)


def _whole(name: str, hf_name: str, *shape: int) -> ParameterNames:
    return ParameterNames(name, ((hf_name, shape[0]),), shape)
