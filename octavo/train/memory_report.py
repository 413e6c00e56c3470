"""`octavo train --plan`: the predicted memory as a table, and with --observe what two real steps held beside it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from octavo.env import torchrun_place
from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.run.build import find_device
from octavo.run.optimizer import MasterAdamW
from octavo.train.build import build_model
from octavo.train.config import TrainConfig
from octavo.train.data import Batch
from octavo.train.dataset import load_dataset
from octavo.train.memory_plan import ACTIVATIONS, SHARDING, STATE, TRANSIENT, MemoryPlan, plan_memory
from octavo.train.step import summed_loss, train_step

_MIB = 2**20
_NUM_STEPS = 2  # the second step has moments, and weights of a new version


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a run really held.

    Attributes:
        activation_bytes: saved by autograd in one micro-batch's forward, each storage once, parameters and weight codes
            not counted.
        num_tokens: of that micro-batch.
        state_bytes: allocated on a GPU after the steps; None on a CPU.
        peak_bytes: allocated on a GPU at most; None on a CPU.
    """

    activation_bytes: int
    num_tokens: int
    state_bytes: int | None
    peak_bytes: int | None


def print_plan(config: TrainConfig, *, observe: bool) -> None:
    """Print the plan of a run; observe also runs two steps, which change nothing on disk but the token cache.

    Raises:
        ConfigError: observe of a run on several ranks; as plan_memory.
    """
    plan = plan_memory(config)
    if observe and plan.num_ranks > 1:
        raise ConfigError(
            f"--observe runs two steps in one process, and this run has {plan.num_ranks} ranks; leave it out"
        )
    place = torchrun_place()
    if place is not None and place.rank > 0:
        return
    console = Console(highlight=False)
    seen = observe_memory(config) if observe else None
    console.print(make_table(plan, seen))
    if seen is not None and seen.peak_bytes is None:
        console.print("a CPU's peak is not measured: only what autograd saved was")
    if seen is not None and seen.num_tokens != plan.num_tokens:
        console.print(f"the observed micro-batch had {seen.num_tokens:,} tokens, the plan is for {plan.num_tokens:,}")


def make_table(plan: MemoryPlan, seen: Observation | None = None) -> Table:
    """The plan, and what was seen, in MiB."""
    title = f"{plan.num_params / 1e6:.1f}M parameters, {plan.num_tokens:,} tokens a micro-batch"
    if plan.num_ranks > 1:
        title += f", on each of {plan.num_ranks} ranks"
    table = Table("", "dtype", "predicted MiB", *(["observed MiB"] if seen else []), title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    observed = {} if seen is None else {STATE: seen.state_bytes, ACTIVATIONS: seen.activation_bytes}
    group = ""
    for row in plan.rows:
        if row.group != group:
            group = row.group
            total = None if group in (SHARDING, TRANSIENT) else plan.total(group)  # not all of these at once
            _add(table, group, "", total, observed.get(group), bold=True)
        _add(table, f"  {row.what}", row.dtype, row.num_bytes, None)
    _add(table, "peak", "", plan.peak_bytes, seen.peak_bytes if seen else None, bold=True)
    return table


def _add(
    table: Table, what: str, dtype: str, predicted: int | None, observed: int | None, *, bold: bool = False
) -> None:
    cells = [what, dtype, *("" if n is None else f"{n / _MIB:,.2f}" for n in (predicted, observed))]
    table.add_row(*cells[: len(table.columns)], style="bold" if bold else None)


def observe_memory(config: TrainConfig) -> Observation:
    """Build the run and do two of its steps."""
    device = find_device(config.run.device)
    dataset = load_dataset(config)
    on_gpu = device.type == "cuda"
    if on_gpu:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    model = build_model(config, dataset.tokenizer.vocab_size, dataset.tokenizer.eos_id, device)
    optimizer = MasterAdamW(model, config.optimizer)
    for step in range(_NUM_STEPS):
        batches = dataset.batches(step)
        train_step(model, optimizer, batches, lr=1e-6, max_grad_norm=config.optimizer.max_grad_norm, step=step + 1)
    state = torch.cuda.memory_allocated(device) - before if on_gpu else None
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    batch = max(dataset.batches(0), key=lambda batch: len(batch.input_ids)).to(device)
    return Observation(saved_bytes(model, batch), len(batch.input_ids), state, peak)


def saved_bytes(model: Decoder, batch: Batch) -> int:
    """Bytes that autograd saves in the forward and the loss of one batch, each storage once."""
    own = [*model.parameters(), *model.buffers()]
    ignored = {tensor.untyped_storage().data_ptr() for tensor in own}
    storages: dict[int, torch.UntypedStorage] = {}
    with _watch(storages):
        loss = summed_loss(model, batch)
    del loss
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in ignored)


@contextmanager
def _watch(storages: dict[int, torch.UntypedStorage]) -> Iterator[None]:
    """Collect the storages of what is saved; they are held, so that no address comes twice."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def unpack(tensor: Any) -> Any:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
