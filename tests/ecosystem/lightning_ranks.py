"""What the ranks of test_lightning.py do: the same steps under Lightning's Trainer and in plain torch."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import octavo
from octavo.integrations.lightning import OctavoPrecision
from octavo.nn import check_weights
from tests.ecosystem.plain_run import STEPS, Case, batches, loss_of, make, plain, recipe_of, said_to

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EPOCHS = 2  # a run is cut between them: Lightning keeps the place in a loader only where that has a state of its own


class Module(lightning.LightningModule):
    """The model of plain_run; each epoch has batches of its own."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        super().__init__()
        self.case, self.losses, self.val_losses = case, list[float](), list[float]()
        self.model = make(case, seed)

    def train_dataloader(self) -> DataLoader:
        found, epoch = batches(self.case, self.global_rank), self.trainer.current_epoch
        size = len(found) // EPOCHS
        return DataLoader(found[epoch * size : (epoch + 1) * size], batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(batches(self.case, self.global_rank)[:2], batch_size=None)

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, ids)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids: torch.Tensor) -> None:
        self.val_losses.append(loss_of(self.model, ids).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sharded(Module):
    """FSDP2 by Lightning's ModelParallelStrategy, whose users shard in configure_model: convert comes before."""

    is_converted_first = True

    def configure_model(self) -> None:
        if any(hasattr(parameter, "device_mesh") for parameter in self.parameters()):
            return
        if self.is_converted_first:
            octavo.convert(self.model, recipe_of(self.case.recipe), ignore=())
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def strategy_of(case: Case, size: int) -> Any:
    if case.stage == 3:
        return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    return DDPStrategy(broadcast_buffers=False) if size > 1 else "auto"


def trainer_of(case: Case, folder: Path, **options: Any) -> lightning.Trainer:
    size = dist.get_world_size() if dist.is_initialized() else options.pop("devices", 1)
    defaults = {
        "plugins": [OctavoPrecision(recipe_of(case.recipe), ignore=())],
        "accelerator": "cpu",
        "devices": size,
        "strategy": strategy_of(case, size),
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": case.accumulation,
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**(defaults | options))


def under_lightning(case: Case, folder: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights; a resumed run is that of a new Trainer over a new model."""
    kind = Sharded if case.stage == 3 else Module
    module, path = kind(case), None
    if case.resumed:
        first = trainer_of(case, folder, max_epochs=1, **options)
        first.fit(module)
        path = folder / "saved.ckpt"
        first.save_checkpoint(path)
        losses = module.losses
        module = kind(case, seed=9)
        module.losses = losses
    trainer = trainer_of(case, folder, **options)
    trainer.fit(module, ckpt_path=path)
    assert trainer.global_step == STEPS
    check_weights(module)
    return module.losses, weights_of(module)


def weights_of(module: Module) -> dict[str, torch.Tensor]:
    """Whole weights by their names in the model."""
    found = module.model.state_dict()
    return {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in found.items()}


def compare(rank: int, size: int, cases: list[Case], folder: Path) -> list[Any]:
    """(losses under Lightning, in plain torch, names of weights that differ in bits) of each case."""
    results = []
    for i, case in enumerate(cases):
        mine, weights = under_lightning(case, folder / str(i))
        theirs, others = plain(case, rank, size)
        results.append((mine, theirs, [name for name in others if not torch.equal(weights[name], others[name])]))
    return results


def said_to_ranks(folder: Path) -> dict[str, str]:
    """What is said to mistakes that only several ranks can make."""
    delayed = Case(0, "delayed", "fp32", 1)
    unconverted = Sharded(Case(3, "blockwise", "fp32", 1))
    unconverted.is_converted_first = False
    return {
        "buffers": said_to(lambda: trainer_of(delayed, folder, strategy="ddp").fit(Module(delayed))),
        "sharded before convert": said_to(lambda: trainer_of(unconverted.case, folder).fit(unconverted)),
    }


def together(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """What two ranks show; Lightning takes torchrun's environment as its own launcher's."""
    dist.init_process_group("gloo")
    found = {"cases": compare(rank, 2, cases, Path(folder)), "said": said_to_ranks(Path(folder))}
    dist.barrier()
    dist.destroy_process_group()
    return found


def in_bf16(precision: str, case: Case, folder: Path) -> tuple[list[float], list[float]]:
    """Losses under Lightning with another precision for the rest, and by hand."""
    plugin = OctavoPrecision(case.recipe, precision=precision, ignore=())
    mine, _ = under_lightning(case, folder, plugins=[plugin])
    model = make(case)
    if precision == "bf16-true":
        model.bfloat16()
    octavo.convert(model, case.recipe, ignore=())
    optimizer, theirs = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for ids in batches(case, 0):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    return mine, theirs


class WeightsOfValidation(Callback):
    """Keeps the weights that validation has."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Module) -> None:
        check_weights(pl_module)
        self.weights = {name: weight.clone() for name, weight in weights_of(pl_module).items()}
