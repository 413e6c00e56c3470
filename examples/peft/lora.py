"""LoRA by transformers' Trainer over a base in FP8: python examples/peft/lora.py MODEL OUT."""

import sys

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import octavo
from octavo.integrations.huggingface import OctavoCallback, OctavoConfig
from octavo.integrations.peft import get_peft_model

source, out = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(
    source, quantization_config=OctavoConfig(recipe="blockwise"), dtype=torch.bfloat16
)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
print(f"{octavo.nn.keep_codes_only(model)} bytes of frozen weights given up for their codes")
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
trainer.save_model()  # plain PEFT files: they load over this base with and without octavo
