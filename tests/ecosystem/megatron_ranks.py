"""What the ranks of test_megatron.py do: the same steps under Megatron-Core and in plain torch."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import octavo
from tests.ecosystem.megatron_cpu import without_cuda
from tests.ecosystem.megatron_plain import HEADS, HIDDEN, LAYERS, SEQ, VOCAB, PlainGPT
from tests.ecosystem.plain_run import recipe_of

STEPS, BATCH = 20, 4


class Case(NamedTuple):
    """One run of STEPS steps; resumed: by a new model and optimizer, from a checkpoint, after half of them.

    cut: what the ranks share: "data", "tensor", "sequence" (tensor and sequence parallelism), "stages".
    dtype: "fp32", "bf16", or "bf16-sharded" with Megatron's distributed optimizer.
    """

    recipe: str
    accumulation: int
    cut: str = "data"
    dtype: str = "fp32"
    resumed: bool = False


def config(**fields: Any) -> Any:
    """A TransformerConfig of the tests' sizes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "use_cpu_initialization": True}
    return TransformerConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields})


def gpt(settings: Any, spec: Any, seed: int = 0, **options: Any) -> Any:
    """Megatron's GPTModel over a spec."""
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "max_sequence_length": SEQ, "parallel_output": False}
    return GPTModel(settings, spec, **sizes, **options)


class Run:
    """A model, its optimizer and its steps, all Megatron's."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from octavo.integrations.megatron import gpt_block_spec

        self.case, is_bf16 = case, case.dtype != "fp32"
        num_ranks = dist.get_world_size()
        self.config = config(
            tensor_model_parallel_size=num_ranks if case.cut in ("tensor", "sequence") else 1,
            pipeline_model_parallel_size=num_ranks if case.cut == "stages" else 1,
            pipeline_dtype=torch.float32,
            sequence_parallel=case.cut == "sequence",
            bf16=is_bf16,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        )
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(),
            "post_process": parallel_state.is_pipeline_last_stage(),
        }
        self.model = gpt(self.config, gpt_block_spec(self.config, recipe_of(case.recipe)), seed, **ends)
        wrapped = Float16Module(self.config, self.model) if is_bf16 else self.model
        sharded = case.dtype == "bf16-sharded"
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        self.ddp = DistributedDataParallel(self.config, ddp, wrapped)
        options = {"params_dtype": self.config.params_dtype, "use_distributed_optimizer": sharded, "clip_grad": 0.0}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, bf16=is_bf16, **options), [self.ddp])
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3

    def steps(self, inputs: list[torch.Tensor]) -> list[float]:
        """Losses of this rank's micro-batches."""
        from megatron.core.distributed import finalize_model_grads

        losses = []
        for i, ids in enumerate(inputs):
            is_last = (i + 1) % self.case.accumulation == 0
            if i % self.case.accumulation == 0:
                self.ddp.zero_grad_buffer()
                self.optimizer.zero_grad()
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                loss = loss_of(self.forward, ids)
                (loss / self.case.accumulation).backward()
            losses.append(loss.item())
            if is_last:
                finalize_model_grads([self.ddp])
                self.optimizer.step()
        return losses

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, SEQ] -> logits [B, SEQ, VOCAB]."""
        return self.ddp(ids, torch.arange(SEQ).expand_as(ids), None)  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """A distributed checkpoint."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded(False), str(folder))

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._sharded(True), str(folder))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _sharded(self, is_loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        options = {"is_loading": is_loading}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, **options)}


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def batches(case: Case) -> list[torch.Tensor]:
    """Token ids [BATCH, SEQ + 1] of each micro-batch; each token is the last one plus 1 or 2."""
    source = torch.Generator().manual_seed(1 + (dist.get_rank() if case.cut == "data" else 0))
    drawn = [torch.randint(1, 3, (BATCH, SEQ + 1), generator=source) for _ in range(STEPS * case.accumulation)]
    return [steps.cumsum(1) % VOCAB for steps in drawn]


def megatron(case: Case, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights that the run began with."""
    inputs, run = batches(case), Run(case)
    began = weights_of(run.model)
    half = len(inputs) // 2 if case.resumed else len(inputs)
    losses = run.steps(inputs[:half])
    if case.resumed:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        run.save(folder)
        run = Run(case, seed=9)
        with torch.no_grad():
            run.forward(inputs[0][:, :-1])  # codes of the weights that go
        run.load(folder)
        losses += run.steps(inputs[half:])
    octavo.nn.check_weights(run.model)
    return losses, began


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy({name: value for name, value in model.state_dict().items() if value is not None})


def plain(case: Case, began: dict[str, torch.Tensor]) -> list[float]:
    """Losses in plain torch, with sums over ranks and micro-batches as Megatron's DDP makes them."""
    num_ranks = dist.get_world_size()
    tensor = num_ranks if case.cut in ("tensor", "sequence") else 1
    model = PlainGPT(tensor, recipe_of(case.recipe), case.cut == "sequence")
    model.load_megatron(began)
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().clone()) for p in parameters] if case.dtype != "fp32" else parameters
    if case.dtype != "fp32":
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.01)
    losses, sums = [], [torch.zeros_like(master) for master in masters]
    for i, ids in enumerate(batches(case)):
        loss = loss_of(model, ids)
        (loss / case.accumulation).backward()
        losses.append(loss.item())
        for total, parameter in zip(sums, parameters, strict=True):
            total += parameter.grad
        model.zero_grad()
        if (i + 1) % case.accumulation:
            continue
        if case.cut == "data":
            for total in sums:
                total /= num_ranks
                dist.all_reduce(total)
        for part in model.replicated():
            dist.all_reduce(sums[[parameter is part for parameter in parameters].index(True)])
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        optimizer.step()
        optimizer.zero_grad()
        sums = [torch.zeros_like(master) for master in masters]
        if case.dtype != "fp32":
            torch._foreach_copy_([p.detach() for p in parameters], [m.detach() for m in masters])
    return losses


def compare(cases: list[Case], folder: Path) -> list[tuple[list[float], list[float]]]:
    """(losses under Megatron, in plain torch) of each case."""
    results = []
    for i, case in enumerate(cases):
        begin_parallel(tensor_model_parallel_size=1 if case.cut == "data" else dist.get_world_size())
        mine, began = megatron(case, folder / str(i))
        results.append((mine, plain(case, began)))
    return results


def begin_parallel(**sizes: int) -> None:
    """Megatron's groups, of initialize_model_parallel's sizes."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)


def begin() -> None:
    """A process group, and Megatron without CUDA."""
    without_cuda()
    dist.init_process_group("gloo")


def end() -> None:
    """Who leaves first would take the others' connections down."""
    dist.barrier()
    dist.destroy_process_group()
