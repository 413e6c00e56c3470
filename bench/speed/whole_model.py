"""The whole model that `step` measures beside the layers alone: embedding, RoPE, last norm, head, loss, clipping.

octavo's variants are its Decoder and its loss; the others are the layers of bench.speed.stack, compiled with head and
loss or not, or Liger's kernels in them. B batch, S tokens a sequence, H hidden, D head_dim, V vocabulary.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.measure import TrainingStep
from bench.options import BenchOptions
from bench.speed import peers
from bench.speed.check import CALLS_BEFORE, CHECK_TOKENS, MIN_BF16_DB, MIN_FP8_DB
from bench.speed.stack import EPS, Norm, StackShape, draw_weights, llama_config, torch_norm, torch_rotate
from bench.speed.variants import (
    StackVariant,
    attention_backend,
    build_layers,
    build_optimizer,
    make_variants,
    runners,
    with_baselines,
)
from octavo.errors import BackendError
from octavo.models import Decoder
from octavo.nn import PackedContext
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.numerics import Numerics, get_recipe
from octavo.numerics.analysis import sqnr
from octavo.ops.attention.rope import rope_tables

MODEL = StackShape("Llama-3-8B", 4096, 14336, 32, 8, 128, layers=8, batch=5, seq_len=8192, vocab_size=128_256)
TOY_MODEL = StackShape("a toy", 128, 256, 2, 1, 64, layers=2, batch=1, seq_len=64, vocab_size=512)
PREFIX = "whole model, "  # of its cases
MAX_GRAD_NORM = 1.0
# Of first losses at full size. They lie near ln(V) + 0.5 whatever the layers do, so gradients are compared too.
MAX_FIRST_LOSS_DIFFERENCE = 0.01
_ROPE_THETA = 500_000.0
_CHECK_VOCABULARY = 512
# a DecoderLayer's linears -> the projections fused in each, in order of rows
_FUSED = {
    "self_attn.qkv_proj": ("q", "k", "v"),
    "self_attn.o_proj": ("o",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
}


def make_model_variants(options: BenchOptions) -> list[StackVariant]:
    """bf16: plain, compiled, Liger's where installed, octavo's; then octavo's recipes. torch's AdamW in all."""
    everything = make_variants(dataclasses.replace(options, filters=(), compiled=False), fp8_optimizer=False)
    return with_baselines([v for v in everything if v.family != "torchao"], options, PREFIX)


class ModelWorkload:
    """A StepWorkload: one batch of random tokens, mean cross-entropy, gradients clipped to MAX_GRAD_NORM."""

    def __init__(self, shape: StackShape, device: str) -> None:
        self.shape, self.device = shape, device
        self._first: tuple[str, float] | None = None  # the first bf16 variant's name and first loss

    def check(self, variant: StackVariant) -> dict[str, float]:
        """Compare gradients of one layer, embedding and head with those of plain bf16, a few tokens, not compiled.

        Returns:
            SQNR in dB of each.
        Raises:
            BackendError: where one is below the bound.
        """
        seq_len, vocab_size = min(CHECK_TOKENS, self.shape.seq_len), min(_CHECK_VOCABULARY, self.shape.vocab_size)
        small = dataclasses.replace(self.shape, layers=1, batch=1, seq_len=seq_len, vocab_size=vocab_size)
        wanted = _gradients(StackVariant("reference", "plain"), small, self.device)
        found = _gradients(dataclasses.replace(variant, compiled=False), small, self.device)
        least = MIN_BF16_DB if variant.recipe == "bf16" else MIN_FP8_DB
        ratios = {name: sqnr(wanted[name], found[name]) for name in wanted}
        for name, ratio in ratios.items():
            if not ratio >= least:
                raise BackendError(
                    f"{variant.name}: gradient of {name} has SQNR {ratio:.1f} dB, at least {least} expected"
                )
        return ratios

    def build(self, variant: StackVariant) -> TrainingStep:
        """See StepWorkload."""
        model = build_model(variant, self.shape, self.device)
        optimizer = build_optimizer(variant, list(model.parameters()), self.device)
        token_ids, targets = _draw_tokens(self.shape, self.device)
        return TrainingStep(lambda: model(token_ids, targets), optimizer, MAX_GRAD_NORM)

    def check_first(self, variant: StackVariant, loss: float, grad_norm: float | None) -> None:
        """The gradients are finite, and the loss is near that of the first bf16 variant that came so far.

        Raises:
            BackendError: else, or there was no bf16 variant.
        """
        assert grad_norm is not None, "this workload clips"
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise BackendError(f"{variant.name}: first loss {loss}, gradient norm {grad_norm}: both must be finite")
        if self._first is None and variant.recipe == "bf16":
            self._first = variant.name, loss
        if self._first is None:
            raise BackendError(f"{variant.name}: no bf16 variant ran before, so its first loss was compared with none")
        name, base = self._first
        if not abs(loss - base) <= MAX_FIRST_LOSS_DIFFERENCE * base:
            raise BackendError(
                f"{variant.name}: first loss {loss:.6g} differs from {name}'s {base:.6g} by more than "
                f"{MAX_FIRST_LOSS_DIFFERENCE:.0%}"
            )


def build_model(variant: StackVariant, shape: StackShape, device: str) -> "PlainModel | OctavoModel":
    """The variant's model in bf16; every variant has the same weights."""
    return (OctavoModel if variant.family == "octavo" else PlainModel)(variant, shape, device)


class PlainModel(nn.Module):
    """Embedding, the variant's layers with RoPE, and its head; each of them compiled where the variant is."""

    def __init__(self, variant: StackVariant, shape: StackShape, device: str) -> None:
        super().__init__()
        tables = rope_tables(shape.head_dim, shape.seq_len, _ROPE_THETA)  # [S, D/2]
        cos, sin = (torch.cat((x, x), dim=-1).to(device, torch.bfloat16) for x in tables)  # [S, D]
        rotate = (peers.liger_rotate if variant.family == "liger" else torch_rotate)(cos, sin)
        embedding, head = _draw_embedding_and_head(shape, device)
        self.shape = shape
        self.embedding = nn.Parameter(embedding)
        self.layers = nn.ModuleList(build_layers(variant, shape, device, rotate))
        self.head = _LigerHead(head, peers.liger_norm) if variant.family == "liger" else _TorchHead(head, torch_norm)
        self._calls = runners(variant, [*self.layers, self.head], device)

    def forward(self, token_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of targets [B, S] after token_ids [B, S]: fp32 scalar."""
        *layers, head = self._calls
        x = F.embedding(token_ids, self.embedding)  # [B, S, H]
        for layer in layers:
            x = layer(x)
        return head(x, targets)  # type: ignore[call-arg]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Of the first layer's projections, the embedding and the head."""
        found = {name: self.layers[0].get_parameter(f"{name}.weight").grad for name in self.shape.linear_sizes}
        return found | {"embedding": self.embedding.grad, "head": self.head.weight.grad}


class _TorchHead(nn.Module):
    """Last norm, logits and loss, as anyone writes them."""

    def __init__(self, weight: torch.Tensor, norm: Norm) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones_like(weight[0]))
        self.weight, self._norm = nn.Parameter(weight), norm

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """x [B, S, H], targets [B, S] -> fp32 scalar."""
        return self.loss(self._norm(x, self.norm).flatten(0, 1), targets.flatten())

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of hidden [B * S, H]."""
        return F.cross_entropy(F.linear(hidden, self.weight).float(), targets)


class _LigerHead(_TorchHead):
    """The same with Liger's norm and its loss without logits."""

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See _TorchHead.loss."""
        return peers.liger_cross_entropy(hidden, self.weight, targets)


class OctavoModel(nn.Module):
    """octavo's Decoder under the variant's recipe, and its loss without logits."""

    def __init__(self, variant: StackVariant, shape: StackShape, device: str) -> None:
        super().__init__()
        config = llama_config(shape, vocab_size=shape.vocab_size, rms_norm_eps=EPS, rope_theta=_ROPE_THETA)
        self.shape, self.decoder = shape, Decoder(config, device="meta")
        self.decoder.set_numerics(Numerics(get_recipe(variant.recipe)))
        self.decoder.to_empty(device=device)
        with torch.no_grad():
            for parameter in self.decoder.parameters():  # of which norms stay
                parameter.fill_(1.0)
            embedding, head = _draw_embedding_and_head(shape, device)
            self.decoder.embed_tokens.weight.copy_(embedding)
            self.decoder.head_weight.copy_(head)
            for seed, layer in enumerate(self.decoder.layers):
                weights = draw_weights(shape, seed, device)
                for name, parts in _FUSED.items():
                    layer.get_parameter(f"{name}.weight").copy_(torch.cat([weights[part] for part in parts]))
        self.decoder.mark_weights_updated()
        lengths = [shape.seq_len] * shape.batch
        self.context = PackedContext.from_lengths(lengths, self.decoder.numerics, device)

    def forward(self, token_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of targets [B, S] after token_ids [B, S]: fp32 scalar."""
        hidden = self.decoder(token_ids.flatten(), self.context)  # [B * S, H]
        return linear_cross_entropy(hidden, self.decoder.head_weight, targets.flatten())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """See PlainModel.gradients."""
        sizes, layer = self.shape.linear_sizes, self.decoder.layers[0]
        found = {"embedding": self.decoder.embed_tokens.weight.grad, "head": self.decoder.head_weight.grad}
        for name, parts in _FUSED.items():
            grad = layer.get_parameter(f"{name}.weight").grad
            assert grad is not None, f"{name} trains"
            found |= zip(parts, grad.split([sizes[part][0] for part in parts]), strict=True)
        return found


def _gradients(variant: StackVariant, shape: StackShape, device: str) -> dict[str, torch.Tensor]:
    model = build_model(variant, shape, device)
    batch = _draw_tokens(shape, device)
    with attention_backend(device):
        for _ in range(CALLS_BEFORE):
            if isinstance(model, OctavoModel):  # as after a step; delayed scaling's first scales are 1
                model.decoder.mark_weights_updated()
            model.zero_grad(set_to_none=True)
            model(*batch).backward()
    return {name: grad.float().cpu() for name, grad in model.gradients().items() if grad is not None}


def _draw_tokens(shape: StackShape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch that every step sees: random ids and the ones that follow, [B, S] int64 each."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (shape.batch, shape.seq_len + 1), generator=generator, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _draw_embedding_and_head(shape: StackShape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal, and so small that logits have a variance of one: [V, H] bf16 each."""
    generator, sizes = torch.Generator(device).manual_seed(1), (shape.vocab_size, shape.hidden_size)
    embedding, head = (torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
    return embedding, head.mul_(shape.hidden_size**-0.5)
