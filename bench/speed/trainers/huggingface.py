"""transformers' Trainer, as a user runs it: optimizer, clipping and data loading are in the step."""

import importlib.metadata
import os
import tempfile
import time
from typing import Any
from unittest import mock

import torch

from bench.record import summarize
from bench.speed.trainers.variants import (
    MODEL,
    TIMED_STEPS,
    WARM_UP_STEPS,
    TrainersSession,
    Variants,
    make_llama,
)
from bench.speed.variants import attention_backend
from bench.timing import synchronize

_BATCH = 2
# compiled whole, transformers makes a causal mask as a tensor under torch < 2.14, and attention computes twice as much
_REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


def huggingface(session: TrainersSession) -> None:
    """bf16, then each recipe."""
    session.describe(
        f"Trainer: a step of transformers {importlib.metadata.version('transformers')}'s Trainer, LlamaForCausalLM of "
        f"{MODEL}, 2 x 8192 random tokens, torch's fused AdamW, torch_compile=True with {_REGIONAL}=1 and cuDNN's "
        "attention in all alike; optimizer, clipping and data loading included. The head is in bf16. Median of "
        f"{TIMED_STEPS} steps after {WARM_UP_STEPS}, each waited for."
    )
    variants = Variants(session, "Trainer")
    for recipe in ("bf16", *session.recipes):
        session.attempt(variants.case(recipe), lambda name=recipe: _measure(variants, name))  # type: ignore[misc]


def _measure(variants: Variants, recipe: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from octavo.integrations.huggingface import convert

    session = variants.session
    torch.compiler.reset()
    model, is_cuda = make_llama(session), session.kind == "cuda"
    if recipe != "bf16":
        convert(model, recipe)
    num_warm_up, num_timed = (1, 2) if session.is_toy else (WARM_UP_STEPS, TIMED_STEPS)
    seconds: list[float] = []
    losses: list[torch.Tensor] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            synchronize(session.device)
            seconds.append(-time.perf_counter())

        def on_step_end(self, *given: Any, **named: Any) -> None:
            synchronize(session.device)
            seconds[-1] += time.perf_counter()
            if len(seconds) == 1:
                variants.check(losses[0].item())
            if len(seconds) == num_warm_up and is_cuda:
                torch.cuda.reset_peak_memory_stats()

    class Watched(Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            losses.append(loss.detach())
            return loss

    rows = session.tokens(_BATCH, 8192, model.config.vocab_size).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows] * (num_warm_up + num_timed)
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder,
            max_steps=num_warm_up + num_timed,
            per_device_train_batch_size=_BATCH,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            torch_compile=session.compiled and is_cuda,
            bf16=False,  # the parameters are
            use_cpu=not is_cuda,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        with attention_backend(session.kind), mock.patch.dict(os.environ, {_REGIONAL: "1"}):
            Watched(model, given, train_dataset=data, callbacks=[Clock()]).train()
    timing = summarize([1e3 * each for each in seconds[num_warm_up:]])
    peak_bytes = torch.cuda.max_memory_allocated() if is_cuda else 0
    variants.add(recipe, timing, peak_bytes, losses[0].item(), "bf16", "speed over bf16")
