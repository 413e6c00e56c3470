"""A toy model, trained by transformers' Trainer and by a loop of plain torch that does the same operations."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import octavo
from octavo.integrations.huggingface import OctavoCallback, OctavoConfig
from tests.ecosystem.plain_run import recipe_of

STEPS, SAVED, BATCH, TOKENS = 20, 10, 2, 16
LEARNING_RATE = 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: its recipe, micro-batches a step, and whether the Trainer's is cut in the middle and resumed."""

    recipe: str
    accumulation: int
    resumed: bool


def make_model(family: str = "Llama", **options: Any) -> Any:
    """A model of two layers, the same each time; options go to its config."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "GPT2":
        sizes, heads = {"vocab_size": 64}, {}
    config = getattr(transformers, f"{family}Config")(**(sizes | heads | options))
    return transformers.AutoModelForCausalLM.from_config(config)


def load_model(folder: Path, recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    """A saved model, loaded by from_pretrained to train in FP8."""
    config = OctavoConfig(recipe=recipe_of(recipe))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def make_rows(num: int) -> torch.Tensor:
    """[num, TOKENS] token ids, the same each time; each is the one before it plus one."""
    first = torch.randint(64, (num, 1), generator=torch.Generator().manual_seed(1))
    return (first + torch.arange(TOKENS)) % 64


class RecordingTrainer(transformers.Trainer):
    """Keeps each micro-batch's loss, and takes the rows in their order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[torch.Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.clone())
        return loss

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(model: Any, folder: Path, steps: int, accumulation: int = 1, **options: Any) -> RecordingTrainer:
    """A Trainer over make_rows; options go to TrainingArguments, but callbacks to the Trainer."""
    callbacks = options.pop("callbacks", [OctavoCallback()])
    options = {"learning_rate": LEARNING_RATE, "save_strategy": "no", "logging_steps": 10} | options
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, lr_scheduler_type="constant",
        gradient_accumulation_steps=accumulation, use_cpu=True, report_to="none", disable_tqdm=True,
        ddp_find_unused_parameters=False, **options,
    )  # fmt: skip
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = [{"input_ids": row, "labels": row} for row in make_rows(STEPS * BATCH * accumulation * world)]
    return RecordingTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:BATCH], callbacks=callbacks)


def run_trainer(case: Case, source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Losses and final weights of the Trainer's run, from the model saved in source."""
    saving = {"save_strategy": "steps", "save_steps": SAVED}
    losses = []
    for steps in (SAVED, STEPS) if case.resumed else (STEPS,):
        model = load_model(source, case.recipe)
        trainer = make_trainer(model, folder, steps, case.accumulation, **saving)
        trainer.train(resume_from_checkpoint=steps > SAVED and case.resumed)
        losses += trainer.losses
    return {"losses": torch.stack(losses), **model.state_dict()}


def run_plain(case: Case) -> dict[str, torch.Tensor]:
    """The same of a loop without transformers' Trainer; under torch.distributed, in DDP."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = make_model()
    octavo.convert(model, recipe_of(case.recipe))
    run = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    rows = iter(make_rows(STEPS * BATCH * case.accumulation * world).split(BATCH))
    num_tokens = torch.tensor(BATCH * (TOKENS - 1) * case.accumulation * world)
    model.train()
    losses = []
    for _ in range(STEPS):
        for part in range(case.accumulation):
            ids = [next(rows) for _ in range(world)][rank]
            if world > 1:
                run.require_backward_grad_sync = part == case.accumulation - 1
            loss = run(input_ids=ids, labels=ids, num_items_in_batch=num_tokens).loss
            loss = loss * world if world > 1 else loss
            loss.backward()
            losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), **model.state_dict()}
