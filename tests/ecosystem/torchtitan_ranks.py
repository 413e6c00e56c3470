"""What the ranks of test_torchtitan.py do: the same steps of its debug model by its Trainer and in plain torch."""

import dataclasses
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import tests.ecosystem.torchtitan_cpu  # noqa: F401 - before the rest of torchtitan

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from examples.torchtitan.llama3_fp8 import debugmodel_delayed
from octavo.integrations.torchtitan import OctavoCheckpointManager, OctavoConverter
from octavo.nn import check_weights, mark_weights_updated, update_scales
from tests.ecosystem.plain_run import STEPS, Case, recipe_of, said_to

BATCH, TOKENS, VOCAB, LAYERS = 2, 16, 2048, 2


class Tokens(BaseDataLoader):
    """A rank's batches: token ids that each are the last one plus one."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.place, self.rank = 0, dp_rank

    def __iter__(self) -> Any:
        while True:
            ids = batch(self.place, self.rank)
            self.place += 1
            yield {"input": ids[:, :-1]}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode  # type: ignore[assignment]


class Losses(MetricsProcessor):
    """Keeps them."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        if (folder := os.environ.get("LOSSES")) and dist.get_rank() == 0:
            with Path(folder, "losses.txt").open("a") as file:
                print(step, global_avg_loss, file=file)
        self.found = {**getattr(self, "found", {}), step: global_avg_loss}


def batch(place: int, rank: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * rank + place)
    return (torch.randint(VOCAB, (BATCH, 1), generator=source) + torch.arange(TOKENS + 1)) % VOCAB


def spec_of(*converters: Any) -> ModelSpec:
    return on_cpu(model_registry("debugmodel", converters=list(converters)))


def on_cpu(spec: ModelSpec) -> ModelSpec:
    """The debug model, of two layers, with an attention and sums that run on a CPU."""
    del spec.model.layers[LAYERS:]
    for _, _, parent, field in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, field, ScaledDotProductAttention.Config())
    parallelize = spec.parallelize_fn
    spec.parallelize_fn = lambda model, **options: summed(parallelize(model, **options))
    return spec


def summed(model: nn.Module) -> nn.Module:
    """Gloo has no sum with a factor, as FSDP2 asks of NCCL."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def converter(case: Case, **options: Any) -> OctavoConverter.Config:
    return OctavoConverter.Config(recipe=recipe_of(case.recipe), **options)


def config_of(case: Case, folder: Path, spec: ModelSpec | None = None, **options: Any) -> Trainer.Config:
    world_size = dist.get_world_size()
    defaults = {
        "model_spec": spec or spec_of(converter(case)),
        "hf_assets_path": "",
        "dump_folder": str(folder),
        "loss": CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        "tokenizer": NoTokenizer.Config(),
        "optimizer": default_adamw(lr=1e-3),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        "training": TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=BATCH * case.accumulation * world_size,
            seq_len=TOKENS,
            steps=STEPS,
            max_norm=1e9,
            disable_cuda_graphs=True,
            mixed_precision_param="float32" if case.dtype == "fp32" else "bfloat16",
        ),
        "dataloader": Tokens.Config(),
        "metrics": Losses.Config(log_freq=1),
        # torchtitan's default, spmd_types, does not shard over two ranks under torch 2.13
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor" if world_size > 1 else "spmd_types"),
        "checkpoint": OctavoCheckpointManager.Config(
            enable=case.resumed, interval=STEPS // 2, last_save_model_only=False
        ),
        "activation_checkpoint": None,
        "debug": DebugConfig(seed=1),
    }
    return Trainer.Config(**(defaults | options))


def run(config: Trainer.Config, until: int = STEPS) -> tuple[dict[int, float], dict[str, torch.Tensor], nn.Module]:
    """Losses by step, the first weights, and the model."""
    config.training.steps = until
    trainer = config.build()
    first = {name: weight.clone() for name, weight in whole(trainer.model_parts[0]).items()}
    trainer.train()
    trainer.close()
    return trainer.metrics_processor.found, first, trainer.model_parts[0]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    found = model.state_dict()
    return {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in found.items()}


def by_trainer(case: Case, folder: Path, **options: Any) -> tuple[dict[int, float], Any, Any]:
    """Losses, first and last weights; a resumed run is that of a new Trainer."""
    losses, first = {}, None
    if case.resumed:
        losses, first, _ = run(config_of(case, folder, **options), STEPS // 2)
    more, weights, model = run(config_of(case, folder, **options))
    assert list(losses | more) == list(range(1, STEPS + 1)) and not set(losses) & set(more)
    check_weights(model)
    return losses | more, first or weights, whole(model)


def plain(case: Case, first: dict[str, torch.Tensor], rank: int, world_size: int) -> tuple[dict[int, float], Any]:
    """Losses and last weights in plain torch, in the order of FSDP2's sums: over the ranks for each micro-batch."""
    config = config_of(case, Path())
    config.model_spec.model.update_from_config(config=config)
    model = config.model_spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    model.load_state_dict(first)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    if case.dtype == "bf16":
        model.bfloat16()
    optimizer, losses = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True), {}
    tokens = BATCH * TOKENS * case.accumulation * world_size
    for step in range(1, STEPS + 1):
        total = torch.zeros(())
        for part in range(case.accumulation):
            ids = batch((step - 1) * case.accumulation + part, rank)
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
            loss = loss / tokens
            loss.backward()
            total += loss.detach()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                grad = parameter.grad.float()
                if world_size > 1:
                    dist.all_reduce(grad)
                master.grad = grad if master.grad is None else master.grad + grad
            model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        mark_weights_updated(model)
        update_scales(model)
        if world_size > 1:
            dist.all_reduce(total)
        losses[step] = total.item()
    model.float()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    return losses, model.state_dict()  # which splits fused projections


def compare(rank: int, cases: list[Case], folder: Path) -> list[Any]:
    """(losses by the Trainer, in plain torch, names of weights that differ in bits) of each case."""
    results = []
    for i, case in enumerate(cases):
        mine, first, weights = by_trainer(case, folder / str(i))
        theirs, others = plain(case, first, rank, dist.get_world_size())
        results.append((mine, theirs, [name for name in others if not torch.equal(weights[name], others[name])]))
    return results


def refusals(folder: Path) -> dict[str, str]:
    """What is said to each mistake."""
    case = Case(3, "blockwise", "fp32", 1)

    def build(spec: ModelSpec, **options: Any) -> str:
        config = config_of(case, folder, spec)
        for name, value in options.items():
            section, _, field = name.partition("__")
            setattr(getattr(config, section), field, value)

        def model() -> None:  # as the Trainer has it; its own checks of ranks come before
            spec.model.update_from_config(config=config)
            spec.model.build()

        return said_to(model)

    theirs, ours = Float8LinearConverter.Config(emulate=True), converter(case)
    parallel = "parallelism__{}_parallel_degree".format
    return {
        "theirs before": build(spec_of(theirs, ours)),
        "theirs after": build(spec_of(ours, theirs)),
        "ignore": build(spec_of(converter(case, ignore=("wq_of_none",)))),
        "tensor parallel": build(spec_of(ours), **{parallel("tensor"): 2}),
        "pipeline": build(spec_of(ours), **{parallel("pipeline"): 2}),
        "full_dtensor": build(spec_of(ours), parallelism__spmd_backend="full_dtensor"),
        "graphs": build(spec_of(ours), training__disable_cuda_graphs=False),
    }


def leaving(folder: Path) -> dict[str, Any]:
    """A run by octavo, its checkpoint's keys, and the same run gone on with by torchtitan alone."""
    case = Case(3, "delayed", "fp32", 1, resumed=True)
    losses, _, model = run(config_of(case, folder), STEPS // 2)
    saved = FileSystemReader(folder / "checkpoint" / f"step-{STEPS // 2}").read_metadata().state_dict_metadata
    weights = {name: weight.clone() for name, weight in whole(model).items()}
    plain_keys = list(whole(run(config_of(case._replace(resumed=False), folder, spec_of()), 1)[2]))
    theirs, _, model = run(config_of(case, folder, spec_of(), checkpoint=theirs_of(case)))
    kinds = {type(module).__name__ for module in model.modules()}
    return {
        "losses": losses | theirs,
        "saved": {name.rpartition(".")[2] for name in saved if name.startswith("octavo_fp8.")},
        "keys": (list(weights), plain_keys, [name for name in plain_keys if name in saved]),
        "kinds": kinds,
        "weights": weights,
    }


def theirs_of(case: Case) -> CheckpointManager.Config:
    return CheckpointManager.Config(enable=True, interval=STEPS // 2, last_save_model_only=False)


def recomputed(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Losses with torchtitan's activation checkpointing and without."""
    case = Case(3, "delayed", "bf16", 1)
    return tuple(run(config_of(case, folder, activation_checkpoint=ac), 5)[0] for ac in (FullAC.Config(), None))


def alone(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """What one rank shows."""
    found = {"cases": ranks(rank, cases, folder, is_last=False)}
    found |= {"said": refusals(Path(folder)), "leaving": leaving(Path(folder, "leaving"))}
    found |= {"recomputed": recomputed(Path(folder))}
    dist.destroy_process_group()
    return found


def ranks(rank: int, cases: list[Case], folder: str, is_last: bool = True) -> list[Any]:
    """What one or several ranks show."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = compare(rank, cases, Path(folder))
    if is_last:
        dist.barrier()
        dist.destroy_process_group()
    return found


def main(folder: str, steps: int) -> None:
    """The example's config on a CPU, for a launcher; torchtitan goes on from its last checkpoint by itself."""
    dist.init_process_group("gloo")
    config = debugmodel_delayed()
    small = config_of(Case(3, "delayed", "fp32", 1), Path(folder), on_cpu(config.model_spec))
    small.checkpoint = config.checkpoint
    small.checkpoint.interval = 2
    run(small, steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
