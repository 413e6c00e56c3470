"""transformers' Trainer with FP8 linears: python examples/huggingface/train.py MODEL OUT."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from octavo.integrations.huggingface import OctavoCallback, OctavoConfig

source, out = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(
    source, quantization_config=OctavoConfig(recipe="blockwise"), dtype=torch.float32
)
rows = (torch.randint(8, 16, (80, 1)) + torch.arange(16)) % 32
trainer = Trainer(
    model,
    TrainingArguments(
        out, max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to="none"
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[OctavoCallback()],
)
trainer.train()
trainer.save_model()  # a plain checkpoint: it loads with and without octavo
