"""transformers' Trainer with octavo's FP8 linears against bf16: `python -m bench.speed.trainer --out DIR`."""

import gc
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.program import Program
from bench.record import Record, summarize
from bench.report import STEP_TIME
from bench.speed.variants import attention_backend
from bench.timing import synchronize

_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
_TOY = _SIZES | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
_TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_BATCH, _WARM_UP_STEPS, _TIMED_STEPS = 2, 4, 10
_MAX_LOSS_DIFFERENCE = 0.01  # of the first loss, against bf16's
_ARMS = ("bf16", "delayed", "blockwise")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the arms one after the other, print them, write the record; 1 where a loss is another one."""
    parser = Program("bench.speed.trainer", __doc__)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU, not compiled")
    options = parser.parse(arguments)
    if options.device == "cpu" and not options.toy:
        parser.error("a CPU runs toy sizes only, which claim nothing: add --toy")
    what = (
        f"A step of transformers {importlib.metadata.version('transformers')}'s Trainer, LlamaForCausalLM of 8 layers "
        "at Llama-3-8B's width, vocabulary 32,000, random weights in bf16, 2 x 8192 random tokens, torch's fused "
        "AdamW, torch_compile=True and cuDNN's attention in every arm; optimizer, clipping and data loading included. "
        f"Median of {_TIMED_STEPS} steps after {_WARM_UP_STEPS}, each waited for. The head is in bf16 in all."
    )
    record, complaints = Record("trainer", what, device=options.device), 0
    losses: dict[str, float] = {}
    base: float | None = None
    for arm in _ARMS:
        seconds, losses[arm], gib = _measure(arm, options)
        timing, case = summarize([1e3 * each for each in seconds]), f"Trainer, {arm}"
        peer = None if base is None else "Trainer, bf16"
        record.add(case, STEP_TIME, "ms", timing.median_us, timing.p20_us, timing.p80_us, peer, base)
        record.add(case, "first loss", "nats", losses[arm])
        record.add(case, "peak memory", "GiB", gib)
        said = f"{case}: {timing.median_us:.1f} ms ({timing.p20_us:.1f} to {timing.p80_us:.1f}), {gib:.1f} GiB"
        if base is not None:
            record.add_ratio(case, "speed over bf16", base / timing.median_us, peer)
            said += f", {base / timing.median_us:.3f} of bf16"
        base = base or timing.median_us
        print(f"{said}; first loss {losses[arm]:.4f}", flush=True)
        if abs(losses[arm] - losses["bf16"]) > _MAX_LOSS_DIFFERENCE * losses["bf16"]:
            complaints += 1
            print(f"COMPLAINT: {case}: first loss {losses[arm]}, of bf16 {losses['bf16']}", flush=True)
        if options.out is not None:
            record.save(options.out, options.commit)
    return min(complaints, 1)


def _measure(arm: str, options: Any) -> tuple[list[float], float, float]:
    """An arm's step times in seconds, its first loss, and its peak memory in GiB."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from octavo.integrations.huggingface import convert

    gc.collect()
    torch.compiler.reset()
    is_cuda, seq_len = options.device == "cuda", 64 if options.toy else 8192
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    config = LlamaConfig(**(_TOY if options.toy else _SIZES), attn_implementation="sdpa", use_cache=False)
    with torch.device(options.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if arm != "bf16":
        convert(model, arm)
    seconds: list[float] = []
    losses: list[torch.Tensor] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            synchronize(options.device)
            seconds.append(-time.perf_counter())

        def on_step_end(self, *given: Any, **named: Any) -> None:
            synchronize(options.device)
            seconds[-1] += time.perf_counter()

    class Watched(Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            losses.append(loss.detach())
            return loss

    rows = torch.randint(config.vocab_size, (_BATCH, seq_len), generator=torch.Generator().manual_seed(1)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows] * (_WARM_UP_STEPS + _TIMED_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder,
            max_steps=_WARM_UP_STEPS + _TIMED_STEPS,
            per_device_train_batch_size=_BATCH,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            torch_compile=is_cuda,
            bf16=False,  # the parameters are
            use_cpu=not is_cuda,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        with attention_backend(options.device):
            Watched(model, given, train_dataset=data, callbacks=[Clock()]).train()
    gib = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
    return seconds[_WARM_UP_STEPS:], losses[0].item(), gib


if __name__ == "__main__":
    sys.exit(main())
