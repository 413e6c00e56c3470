"""Supervised fine-tuning by TRL with FP8 linears: python examples/huggingface/sft.py MODEL OUT."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from octavo.integrations.huggingface import OctavoCallback, OctavoConfig

source, out = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(
    source, quantization_config=OctavoConfig(recipe="blockwise"), dtype=torch.float32
)
sums = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(10) for b in range(10)]
trainer = SFTTrainer(
    model,
    SFTConfig(
        out,
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        bf16=torch.cuda.is_available(),  # TRL's default of True wants a GPU
    ),
    train_dataset=Dataset.from_list(sums),
    callbacks=[OctavoCallback()],
)
trainer.train()
trainer.save_model()  # a plain checkpoint: it loads with and without octavo
