"""A loop of your own on several ranks: accelerate launch --num_processes 2 examples/huggingface/ranks.py MODEL."""

import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from octavo.integrations.huggingface import OctavoConfig

accelerator = Accelerator()
config = OctavoConfig(recipe="blockwise")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = (torch.randint(8, 16, (64, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(16)) % 32
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # converted before, sharded here
model.train()
for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()[None]).mean()
    accelerator.print(f"loss {mean:.3f}", type(model).__name__)
