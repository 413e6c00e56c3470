"""GRPO by TRL with FP8 linears: python examples/huggingface/grpo.py MODEL OUT."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from octavo.integrations.huggingface import OctavoCallback, OctavoConfig


def share_of_ones(completions: list[str], **_: object) -> list[float]:
    """The reward: how much of an answer is the digit 1."""
    return [text.count("1") / max(1, len(text)) for text in completions]


source, out = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(
    source, quantization_config=OctavoConfig(recipe="blockwise"), dtype=torch.float32
)
trainer = GRPOTrainer(
    model,
    share_of_ones,
    GRPOConfig(
        out,
        max_steps=10,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        bf16=torch.cuda.is_available(),  # TRL's default of True wants a GPU
    ),
    train_dataset=Dataset.from_list([{"prompt": f"{a} + {b} = "} for a in range(10) for b in range(10)]),
    callbacks=[OctavoCallback()],
)
trainer.train()
trainer.save_model()  # a plain checkpoint: it loads with and without octavo
