"""transformers' Trainer with FP8 linears: python examples/huggingface/train.py MODEL OUT; run again, it goes on."""

import argparse
import os

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from octavo.integrations.huggingface import OctavoCallback, OctavoConfig

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("out")
parser.add_argument("--recipe", default="blockwise")
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()

config = OctavoConfig(recipe=given.recipe)
model = AutoModelForCausalLM.from_pretrained(given.model, quantization_config=config, dtype=torch.float32)
rows = (torch.randint(8, 16, (80, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(16)) % 32
trainer = Trainer(
    model,
    TrainingArguments(
        given.out,
        max_steps=given.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=10,
        report_to="none",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[OctavoCallback()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(given.out) if os.path.isdir(given.out) else None)
trainer.save_model()  # a plain checkpoint: it loads with and without octavo
