"""Runs given sequences as a mixture of two sides: some parts as the sampler computes them, the rest as the trainer.

A linear whose weight and input are both one side's is that side's own, FP8 GEMM and all. Where only one of the two is,
operands are quantized, decoded again and multiplied in high precision.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from octavo.doctor.departure import emulated_operand
from octavo.doctor.sides import PARTS, Side, linear_recipes, linears_of
from octavo.nn import Linear, PackedContext, token_logprobs
from octavo.nn.functional.linear import quantize_input
from octavo.nn.moe import Router
from octavo.numerics import Numerics, Recipe, Scaling
from octavo.ops import logprob
from octavo.ops.attention import PAGE_SIZE, PackedLengths, PagedKVLayer, allocate_kv_layer
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.quantize import quantize
from octavo.serve.engine.paged_context import PagedContext
from octavo.weights.refit import share_weights

MAX_PACKED_TOKENS = 16384  # in one forward pass of whole sequences
MAX_DECODED = 256  # sequences that are decoded side by side

Parts = frozenset[str]
# puts a value in the place of a module's parameter or child until the mixture ends
_Put = Callable[[nn.Module, str, torch.Tensor | nn.Module], None]


class Replay:
    """The two sides of a policy, over the same sequences.

    Args:
        trainer: not changed; must hold its weights in high precision.
        sampler: of the trainer's architecture; not changed.
        stale: names of the weights in which they differ (octavo.doctor.sides.stale_weights).
        sequences: token ids, prompt and response.
        prompt_lens: of each.
    """

    def __init__(
        self,
        trainer: Side,
        sampler: Side,
        stale: tuple[str, ...],
        sequences: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
    ) -> None:
        self.trainer, self.sampler, self.stale = trainer, sampler, frozenset(stale)
        self.sequences, self.prompt_lens = [list(s) for s in sequences], list(prompt_lens)
        self.view = share_weights(trainer.model, Numerics(exact=trainer.model.numerics.exact))

    @torch.no_grad()
    def logprobs(self, parts: Parts) -> torch.Tensor:
        """Of the response tokens, packed: [tokens] fp32 on the CPU.

        Args:
            parts: of octavo.doctor.sides.PARTS: those that are the sampler's.
        """
        decodes = self._pick("attention", parts).decodes
        with self._mixed(parts):
            pieces = [
                (self._decoded if decodes else self._packed)(batch, parts) for batch in self._batches(by_count=decodes)
            ]
        return torch.cat(pieces).cpu()

    @torch.no_grad()
    def routing(self) -> tuple[float, torch.Tensor | None] | None:
        """How far apart the two sides' choices of experts are; None without experts.

        Returns:
            (share of (token, layer) pairs in which they differ; the trainer's logprobs of the response tokens under
            the sampler's choices, [tokens] fp32 on the CPU, or None where probabilities are not normalized over the
            chosen experts, so that a choice cannot be replayed alone).
        """
        routers = [module for module in self.view.modules() if isinstance(module, Router)]
        if not routers:
            return None
        trainer, sampler = frozenset[str](), frozenset(PARTS) - {"attention", "head"}
        (_, ours), (_, theirs) = self._observed(routers, trainer), self._observed(routers, sampler)
        flips = torch.cat([(a != b).any(dim=1) for a, b in zip(ours, theirs, strict=True)])
        replayed = None
        if self.view.config.norm_topk_prob:
            replayed, _ = self._observed(routers, trainer, iter(theirs))
        return float(flips.double().mean()), None if replayed is None else replayed.cpu()

    def _pick(self, part: str, parts: Parts) -> Side:
        return self.sampler if part in parts else self.trainer

    def _batches(self, *, by_count: bool) -> list[list[int]]:
        """Indices of the sequences that run together, in order."""
        batches: list[list[int]] = [[]]
        num_tokens = 0
        for i, sequence in enumerate(self.sequences):
            is_full = len(batches[-1]) == MAX_DECODED if by_count else num_tokens + len(sequence) > MAX_PACKED_TOKENS
            if is_full and batches[-1]:
                batches.append([])
                num_tokens = 0
            batches[-1].append(i)
            num_tokens += len(sequence)
        return batches

    # the forward passes

    def _packed(self, batch: list[int], parts: Parts) -> torch.Tensor:
        """Whole sequences in one pass, as the trainer scores them."""
        numerics, kv = self._pick("attention", parts).model.numerics, self._kv(parts)
        lengths = [len(self.sequences[i]) - 1 for i in batch]
        context = PackedContext(
            PackedLengths.from_lengths(lengths, self.view.device),
            kv_cache_dtype=kv.kv_cache_dtype,
            exact=numerics.exact,
            attention_dtype=numerics.attention_dtype,
            kv_table=kv.make_kv_table(),
        )
        inputs = [token for i in batch for token in self.sequences[i][:-1]]
        targets = [token for i in batch for token in self.sequences[i][1:]]
        hidden = self.view(self._tensor(inputs), context)
        is_response = torch.cat(
            [torch.arange(n) >= self.prompt_lens[i] - 1 for n, i in zip(lengths, batch, strict=True)]
        ).to(hidden.device)
        if not is_response.any():
            return torch.zeros(0, device=hidden.device)
        return self._head(hidden, self._tensor(targets), parts)[is_response]

    def _decoded(self, batch: list[int], parts: Parts) -> torch.Tensor:
        """Prompts in one pass, then one token of each sequence a pass, over pages: as the sampler met them."""
        numerics = self._pick("attention", parts).model.numerics
        num_pages = [-(-len(self.sequences[i]) // PAGE_SIZE) for i in batch]
        starts = [sum(num_pages[:k]) for k in range(len(batch))]
        tables = [list(range(start, start + n)) for start, n in zip(starts, num_pages, strict=True)]
        layers = self._allocate(sum(num_pages), parts)
        found: list[list[torch.Tensor]] = [[] for _ in batch]
        ends = [self.prompt_lens[i] for i in batch]
        running = [k for k, i in enumerate(batch) if len(self.sequences[i]) > ends[k]]
        first = True
        while running:
            spans = [(0 if first else ends[k] - 1, ends[k]) for k in running]
            context = PagedContext.build(spans, [tables[k] for k in running], layers, numerics.exact, self.view.device)
            tokens = [t for k, (a, b) in zip(running, spans, strict=True) for t in self.sequences[batch[k]][a:b]]
            hidden = self.view(self._tensor(tokens), context)
            last = torch.tensor([b - a for a, b in spans], device=hidden.device).cumsum(0) - 1
            targets = self._tensor([self.sequences[batch[k]][ends[k]] for k in running])
            for k, value in zip(running, self._head(hidden[last], targets, parts).unbind(), strict=True):
                found[k].append(value)
                ends[k] += 1
            running = [k for k in running if ends[k] < len(self.sequences[batch[k]])]
            first = False
        values = [value for each in found for value in each]
        return torch.stack(values) if values else torch.zeros(0, device=self.view.device)

    def _head(self, hidden: torch.Tensor, targets: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Logprobs of the targets, by the head of the side that is picked: [T] fp32."""
        side, view = self._pick("head", parts), self.view
        weight, bias = view.head_weight, view.head_bias
        if side.head_recipe is not None:
            hidden, weight = rounded(hidden, side.head_recipe.input), rounded(weight, side.head_recipe.weight)
        exact = side.model.numerics.exact
        if not side.decodes:
            fields = {"temperature": side.temperature, "exact": exact, "with_entropy": False, "head_bias": bias}
            return token_logprobs(hidden, weight, targets, **fields)[0]  # type: ignore[arg-type]
        logits = hp_mm(hidden, weight, bias=bias, out_dtype=torch.float32, exact=exact)
        return logprob.token_logprobs(logits, targets, side.temperature)

    def _kv(self, parts: Parts) -> Side:
        """Whose keys and values: attention in FP8 multiplies codes, so it brings those of its side along."""
        attention = self._pick("attention", parts)
        return attention if attention.model.numerics.attention_dtype == "fp8" else self._pick("kv_cache", parts)

    def _allocate(self, num_pages: int, parts: Parts) -> list[PagedKVLayer]:
        """An empty cache as the picked side's."""
        config, kv, view = self.view.config, self._kv(parts), self.view
        attention_dtype, table = self._pick("attention", parts).model.numerics.attention_dtype, kv.make_kv_table()
        layers = []
        for i in range(config.num_layers):
            known = None if table is None else table.layer(i)
            fell_back = table is not None and known is None
            dtypes = ("bf16", "bf16") if fell_back else (kv.kv_cache_dtype, attention_dtype)
            sizes = (num_pages, config.num_kv_heads, config.head_dim)
            layers.append(allocate_kv_layer(*sizes, dtypes[0], view.dtype, view.device, dtypes[1], known))
        return layers

    def _observed(
        self, routers: list[Router], parts: Parts, forced: Iterator[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Packed logprobs, and each router's choices, call by call: [tokens, experts] bool, True for the chosen.

        Args:
            forced: choices to take in the place of the routers' own, in the order of calls.
        """
        top_k, chosen = self.view.config.num_experts_per_tok, list[torch.Tensor]()

        def note(_: nn.Module, __: object, logits: torch.Tensor) -> torch.Tensor:
            if forced is not None:  # normalized over the chosen, the others' logits have no say in their weights
                return logits.masked_fill(~next(forced), -torch.inf)
            top = logits.topk(top_k, dim=1).indices
            chosen.append(torch.zeros_like(logits, dtype=torch.bool).scatter_(1, top, True))
            return logits

        handles = [router.register_forward_hook(note) for router in routers]
        try:
            with self._mixed(parts):
                pieces = [self._packed(batch, parts) for batch in self._batches(by_count=False)]
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(pieces), chosen

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.view.device)

    # the mixture

    @contextlib.contextmanager
    def _mixed(self, parts: Parts) -> Iterator[None]:
        """The view's weights and inputs as the picked sides have them; as they were afterwards."""
        held: list[tuple[nn.Module, str, Any]] = []
        handles: list[RemovableHandle] = []

        def put(module: nn.Module, name: str, value: torch.Tensor | nn.Module) -> None:
            held.append((module, name, getattr(module, name)))
            held_value = nn.Parameter(value, requires_grad=False) if isinstance(value, torch.Tensor) else value
            setattr(module, name, held_value)

        try:
            if "staleness" in parts:
                self._put_plain_weights(put)
            for name, linear in linears_of(self.view).items():
                own = self._whole_linear(name, parts)
                if own is not None:
                    owner, _, leaf = name.rpartition(".")
                    put(self.view.get_submodule(owner), leaf, own)
                    continue
                value = self._weight(name, linear, parts)
                if value is not None:
                    put(linear, "weight", value)
                handles += self._round_input(name, linear, parts)
            handles += self._round_routers(put, parts)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, name, old in reversed(held):
                setattr(module, name, old)

    def _whole_linear(self, name: str, parts: Parts) -> Linear | None:
        """One side's very linear, where the mixture asks for both of its operands; None where it takes two sides."""
        side = self._pick("weights", parts)
        if side is not self._pick("activations", parts):
            return None
        is_other = f"{name}.weight" in self.stale and side is not self._pick("staleness", parts)
        return None if is_other else linears_of(side.model)[name]

    def _put_plain_weights(self, put: _Put) -> None:
        """What is stale and no linear's weight: embeddings, norms, biases, routers, the head."""
        theirs = dict(self.sampler.model.named_parameters())
        linears = linears_of(self.view)
        for name in self.stale:
            owner, _, leaf = name.rpartition(".")
            if not (owner in linears and leaf == "weight"):
                put(self.view.get_submodule(owner), leaf, self._moved(theirs[name]))

    def _weight(self, name: str, linear: Linear, parts: Parts) -> torch.Tensor | None:
        """A linear's weight as the picked sides multiply with it; None where that is the trainer's own."""
        recipe = linear_recipes(self._pick("weights", parts).model)[name]
        is_stale = "staleness" in parts and f"{name}.weight" in self.stale
        other = linears_of(self.sampler.model)[name]
        source: torch.Tensor | None = linear.weight
        if is_stale:
            own = linear_recipes(self.sampler.model)[name]
            if own is not None and not own.is_emulated and (recipe == own or not self._has_source(name, other)):
                return torch.cat([self._moved(q.dequantize(self.view.dtype)) for q in other.quantized_weight(own)])
            source = None if other.weight is None else self._moved(other.weight)
        assert source is not None, "a side without codes has its weight"
        if recipe is None:
            return source if is_stale else None
        if recipe.is_emulated:
            emulated = emulated_operand(source, recipe, "weight")
            return source if emulated is None else emulated.to(self.view.dtype)
        kept = linear.weight
        linear.weight = nn.Parameter(source, requires_grad=False)
        try:
            return torch.cat([q.dequantize(self.view.dtype) for q in linear.quantized_weight(recipe)])
        finally:
            linear.weight = kept

    def _has_source(self, name: str, linear: Linear) -> bool:
        """Whether a stale linear of the sampler has the weight that its codes were made of: another than ours."""
        ours = linears_of(self.trainer.model)[name].weight
        return linear.weight is not None and ours is not None and not torch.equal(ours, self._moved(linear.weight))

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(self.view.device, self.view.dtype)

    def _round_input(self, name: str, linear: Linear, parts: Parts) -> list[RemovableHandle]:
        model = self._pick("activations", parts).model
        recipe = linear_recipes(model)[name]
        if recipe is None:
            return []
        return [linear.register_forward_pre_hook(_InputRounding(linears_of(model)[name], recipe))]

    def _round_routers(self, put: _Put, parts: Parts) -> list[RemovableHandle]:
        recipe = self._pick("router", parts).router_recipe
        if recipe is None:
            return []
        handles = []
        for router in (module for module in self.view.modules() if isinstance(module, Router)):
            put(router, "weight", rounded(router.weight, recipe.weight))
            handles.append(router.register_forward_pre_hook(lambda _, args: (rounded(args[0], recipe.input),)))
        return handles


class _InputRounding:
    """A forward pre-hook: the input as it is after a recipe's quantization."""

    def __init__(self, linear: Linear, recipe: Recipe) -> None:
        self._linear, self._recipe = linear, recipe

    def __call__(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, recipe = args[0], self._recipe
        if recipe.is_emulated:
            emulated = emulated_operand(x, recipe, "input")
            return (x if emulated is None else emulated.to(x.dtype), *args[1:])
        codes = quantize_input(x, self._linear.plan_for(recipe), columns=False, observe=False)[0]
        return (codes.dequantize(x.dtype), *args[1:])


def rounded(x: torch.Tensor, scaling: Scaling | None) -> torch.Tensor:
    """x [M, K] quantized and decoded, in its dtype."""
    return x if scaling is None else quantize(x, scaling).dequantize(x.dtype)
