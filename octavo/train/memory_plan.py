"""The memory that a run would need, predicted from its configuration before anything large exists.

Everything is a sum of tensor sizes: state that stays, activations that a micro-batch saves, gradients, and the largest
of what comes and goes; of a sharded run, on each rank. An allocator's rounding and a library's workspaces come on top.
"""

import dataclasses
from pathlib import Path

import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.models.checkpoint.dialects import newest_model, read_config
from octavo.models.config import ModelConfig
from octavo.models.tokenizer import load_tokenizer
from octavo.nn import Linear, RowLinear
from octavo.nn.logprob import EXACT_CHUNK_SIZE
from octavo.ops.logprob.chunks import chunk_len, loss_chunks
from octavo.run.build import build_model_config, find_device
from octavo.run.sections import OptimizerSection
from octavo.train.build import DTYPES, check_seq_len, cut_linears, set_precision
from octavo.train.config import TrainConfig
from octavo.train.rank_memory import (
    GATHERED_ROOT,
    HEAD_GRADIENT,
    IN_FLIGHT,
    ON_THEIR_WAY,
    REDUCED_LAYER,
    REDUCED_ROOT,
    RankShare,
    held_by_fsdp,
    late_gradients,
)
from octavo.train.saved_activations import HEAD, Saved, merge, saved_by_layer, saved_by_model, scale_bytes

STATE, ACTIVATIONS, GRADIENTS, TRANSIENT = "state", "activations", "gradients", "transient"
SHARDING = "gathered and reduced"
_MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "fp8": 2.0 + 8 / 128}  # both moments of a parameter, scales included
_MASTER_BYTES = {"fp32": 4, "remainder": 2, "none": 0}


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One line of the plan: group (STATE, ACTIVATIONS, GRADIENTS, SHARDING or TRANSIENT), what, dtype, bytes."""

    group: str
    what: str
    dtype: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """A run's predicted memory, on each of its ranks.

    Attributes:
        rows: by group.
        num_tokens: of a micro-batch, at most.
        num_params: of the model.
        num_micro_batches: of a rank, in a step.
        num_ranks: of the run.
        layer_bytes: of one layer's activations.
        late_gradient_bytes: of sharded gradients that come last, after a backward's largest moment.
    """

    rows: tuple[PlanRow, ...]
    num_tokens: int
    num_params: int
    num_micro_batches: int
    num_ranks: int = 1
    layer_bytes: int = 0
    late_gradient_bytes: int = 0

    def total(self, group: str, *lines: str) -> int:
        """Bytes of a group, or of some lines of it."""
        return sum(row.num_bytes for row in self.rows if row.group == group and (not lines or row.what in lines))

    @property
    def peak_bytes(self) -> int:
        """The largest of three moments, over the state that stays: the loss (all activations, and the sums of earlier
        micro-batches), the end of the backward (all gradients), the optimizer's update.
        """
        sums, own = self.total(GRADIENTS, "sums of micro-batches"), self.total(GRADIENTS, "of parameters")
        held = 0 if self.num_micro_batches == 1 else sums or own  # where there are no sums, they add up in place
        is_sharded = any(row.group == SHARDING for row in self.rows)
        loss, backward = self._sharded_moments() if is_sharded else self._moments()
        update = max(sums, own) + self.total(TRANSIENT, "optimizer")
        return self.total(STATE) + max(held + loss, (held if sums else 0) + backward, update)

    def _moments(self) -> tuple[int, int]:
        """(the loss, the end of the backward)."""
        layer = self.total(TRANSIENT, "one layer")
        loss = self.total(ACTIVATIONS) + max(self.total(TRANSIENT, "logits"), layer)
        return loss, self.total(GRADIENTS, "of parameters") + layer

    def _sharded_moments(self) -> tuple[int, int]:
        """As _moments, while FSDP2 gathers and reduces."""
        activations, own = self.total(ACTIVATIONS), self.total(GRADIENTS, "of parameters")
        root, head, in_flight, on_their_way, of_layer, of_root = (
            self.total(SHARDING, what)
            for what in (GATHERED_ROOT, HEAD_GRADIENT, IN_FLIGHT, ON_THEIR_WAY, REDUCED_LAYER, REDUCED_ROOT)
        )
        in_flight += self.total(TRANSIENT, "one layer")
        # the first layer to go back: the loss is done with its own; what it sends takes its activations' place
        first = head + activations - self.total(ACTIVATIONS, HEAD) + in_flight
        first += max(0, on_their_way - self.layer_bytes)
        loss = root + max(activations + max(self.total(TRANSIENT, "logits"), head), first)
        last = own - self.late_gradient_bytes + root + head + max(in_flight + on_their_way, of_layer)
        return loss, max(last, own + of_root)


def plan_memory(config: TrainConfig) -> MemoryPlan:
    """Predict the memory of a run, on each of its ranks: torchrun's, or as many as [parallel] gives degrees.

    Raises:
        ConfigError: as the run itself would.
        RecipeError: as the run itself would.
        CheckpointError: as the run itself would.
    """
    if config.lora is not None:
        raise ConfigError("--plan does not count adapters yet, got a [lora] section; leave one of the two out")
    device = find_device(config.run.device)
    model = describe_model(config)
    num_tokens = config.data.seq_len * (config.data.micro_batch_size or config.data.batch_size)
    layout = RankShare.of_config(config)
    if layout.num_tensor > 1:  # without values and process group: this is what a rank holds of it
        cut_linears(model, TensorGroup(None, 0, layout.num_tensor), config.parallel)
    num_micro_batches = layout.own_micro_batches(config.data.num_micro_batches)
    recomputed = 0
    if config.run.recompute == "full":
        recomputed = config.run.recompute_num_layers or len(model.layers)
    saved = saved_by_model(model, num_tokens, recomputed)
    codes = sum(map(_code_bytes, _linears(model)))
    held = held_by_fsdp(model, layout, codes, config.parallel.reduction) if layout.num_ranks > 1 else []
    rows = [
        *_state(model, config.optimizer, layout, codes),
        *(PlanRow(ACTIVATIONS, row.kind, row.dtype, row.num_bytes) for row in saved),
        *_gradients(model, config.optimizer, layout, num_micro_batches),
        *(PlanRow(SHARDING, row.kind, row.dtype, row.num_bytes) for row in held),
        *_transients(model, config, num_tokens, device, recomputed, layout),
    ]
    late = layout.own_share(late_gradients(model)) * layout.stored_dtype(model.dtype).itemsize
    of_layer = 0 if recomputed == len(model.layers) else sum(row.num_bytes for row in _widest_layer(model, num_tokens))
    return MemoryPlan(
        *(tuple(rows), num_tokens, model.num_params, num_micro_batches),
        num_ranks=layout.num_ranks * layout.num_tensor,
        layer_bytes=of_layer,
        late_gradient_bytes=late,
    )


def describe_model(config: TrainConfig) -> Decoder:
    """The run's model without values: its architecture and every linear's recipe."""
    architecture = _architecture(config)
    check_seq_len(config.data.seq_len, architecture)
    model = Decoder(architecture, dtype=DTYPES[config.precision.dtype], device="meta")
    set_precision(model, config.precision)
    return model


def _architecture(config: TrainConfig) -> ModelConfig:
    if config.model.path:
        return ModelConfig.from_hf(read_config(newest_model(Path(config.model.path))))
    data = config.data
    vocab_size = load_tokenizer(data.tokenizer).vocab_size if data.tokenizer else data.vocab_size
    return build_model_config(config.model, vocab_size, None, data.seq_len)


def _state(model: Decoder, optimizer: OptimizerSection, layout: RankShare, codes: int) -> list[PlanRow]:
    num_params, dtype = layout.own_share(_num_params(model)), layout.stored_dtype(model.dtype)
    own_master = dtype == torch.float32  # an fp32 parameter is its own
    masters = 0 if own_master else num_params * _MASTER_BYTES[optimizer.master_weights]
    tables = sum(buffer.numel() * buffer.element_size() for _, buffer in model.named_buffers())
    rows = [
        PlanRow(STATE, "parameters", _name(dtype), num_params * dtype.itemsize),
        PlanRow(STATE, "master weights", "none" if own_master else optimizer.master_weights, masters),
        PlanRow(STATE, "moments", optimizer.state_dtype, int(num_params * _MOMENT_BYTES[optimizer.state_dtype])),
        # of a gathered weight they go when it goes
        PlanRow(STATE, "weight codes", "fp8", codes if layout.num_ranks == 1 else 0),
        PlanRow(STATE, "RoPE tables", "fp32", tables),
        PlanRow(STATE, "amax histories", "fp32", sum(map(_history_bytes, _linears(model)))),
    ]
    return [row for row in rows if row.num_bytes]


def _num_params(model: Decoder) -> int:
    """Of a cut model those of a rank."""
    return sum(p.numel() for p in model.parameters())


def _linears(model: Decoder) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def _code_bytes(linear: Linear) -> int:
    """The 8-bit copies of a weight version: along K for the output, along N for grad_input."""
    recipe = linear.recipe
    if recipe is None or recipe.weight is None or recipe.is_emulated:
        return 0
    rows, cols = linear.out_features, linear.in_features
    forward = rows * cols + scale_bytes(rows, cols, recipe.weight)
    backward = rows * cols + scale_bytes(cols, rows, recipe.weight)
    return forward * recipe.in_fp8("output") + backward * recipe.in_fp8("grad_input")


def _history_bytes(linear: Linear) -> int:
    delayed = linear.recipe.delayed if linear.recipe else None
    return 0 if delayed is None else 4 * (delayed.amax_history_len + 1) * (2 + len(linear.parts))


def _gradients(model: Decoder, optimizer: OptimizerSection, layout: RankShare, num_micro_batches: int) -> list[PlanRow]:
    """The backward's own, and the sums that the optimizer reads."""
    num_params, dtype = layout.own_share(_num_params(model)), layout.stored_dtype(model.dtype)
    rows = [PlanRow(GRADIENTS, "of parameters", _name(dtype), num_params * dtype.itemsize)]
    compact = (optimizer.state_dtype, optimizer.master_weights) != ("fp32", "fp32")
    if dtype != torch.float32 and not (compact and num_micro_batches == 1):
        rows.append(PlanRow(GRADIENTS, "sums of micro-batches", "fp32", 4 * num_params))
    return rows


def _transients(
    model: Decoder, config: TrainConfig, num_tokens: int, device: torch.device, recomputed: int, layout: RankShare
) -> list[PlanRow]:
    """What comes and goes: the head's logits, the widest layer's gradients, the optimizer's temporaries."""
    architecture = model.config
    size = model.dtype.itemsize if device.type == "cuda" else 4  # a CPU multiplies the head in fp32
    chunk, part = loss_chunks(num_tokens, architecture.vocab_size, size, needs_weight=True)
    logits = architecture.vocab_size * (chunk * size + part * 4)
    if model.head_group is not None:  # a rank's own, all that it receives, and these in order
        own = architecture.vocab_size // model.head_group.size
        chunk = chunk_len(num_tokens, 3 * architecture.vocab_size, 4)
        if model.numerics.exact:
            chunk = min(num_tokens, EXACT_CHUNK_SIZE)
        backward = num_tokens * (chunk_len(own, num_tokens, 4 + size) * (4 + size) + 4 * architecture.hidden_size)
        logits = max(4 * chunk * (2 * architecture.vocab_size + own), backward)
    if device.type != "cuda":
        logits += 4 * architecture.vocab_size * architecture.hidden_size
    # gradients of the MLP's two inner tensors and of three of the layer's width, and their codes in both directions
    of_experts = architecture.num_experts_per_tok * architecture.moe_intermediate_size
    inner, hidden = max(architecture.intermediate_size // layout.num_tensor, of_experts), architecture.hidden_size
    layer = num_tokens * (3 * inner + 3 * hidden) * model.dtype.itemsize
    if any(isinstance(linear, RowLinear) and linear.mode == "gather" for linear in _linears(model)):
        layer += num_tokens * 2 * architecture.intermediate_size * model.dtype.itemsize  # down_proj's, before it is cut
    if recomputed:
        layer += sum(row.num_bytes for row in _widest_layer(model, num_tokens))
    optimizer = config.optimizer
    full = (optimizer.state_dtype, optimizer.master_weights) == ("fp32", "fp32")
    # torch's fused AdamW has none on a GPU, nor has octavo's; on a CPU it works on one parameter after the other
    largest = max((p.numel() for p in model.parameters()), default=0)
    temporaries = 4 * layout.own_share(largest) if full and device.type != "cuda" else 0
    rows = [
        PlanRow(TRANSIENT, "logits", "fp32", logits),
        PlanRow(TRANSIENT, "one layer", _name(model.dtype), layer),
        PlanRow(TRANSIENT, "optimizer", "fp32", temporaries),
    ]
    return [row for row in rows if row.num_bytes]


def _widest_layer(model: Decoder, num_tokens: int) -> list[Saved]:
    layers = [merge(saved_by_layer(layer, model, num_tokens)) for layer in model.layers]  # type: ignore[arg-type]
    return max(layers, key=lambda rows: sum(row.num_bytes for row in rows))


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"
