"""The callback of docs/training.md: a run of transformers' Trainer under delayed scaling that resumes bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.testing import assert_bitwise
from tests.test_docs import ROOT, blocks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS, SAVED = 5, 3


def callbacks() -> list[Any]:
    """The page's own."""
    (code,) = [code for _, code in blocks(ROOT / "docs" / "training.md") if "class FP8State" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    return [names["FP8State"]()]


def train(folder: Path, steps: int, with_state: bool = True) -> dict[str, torch.Tensor]:
    """Weights and FP8 state after so many steps; from the folder's last checkpoint on where it has one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    octavo.convert(model, "delayed")
    ids = torch.randint(64, (4 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, lr_scheduler_type="constant",
        gradient_accumulation_steps=2, save_steps=SAVED, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=callbacks() if with_state else [],
    )
    trainer.train(resume_from_checkpoint=(folder / f"checkpoint-{SAVED}").exists())
    state = {f"fp8 {name}": tensor.clone() for name, tensor in octavo.nn.fp8_state_dict(model).items()}
    return {**model.state_dict(), **state}


def test_a_resumed_run_is_equal_in_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", STEPS)
    for name, with_state in (("resumed", True), ("without", False)):
        folder = tmp_path / name
        train(folder, SAVED, with_state)
        assert (folder / f"checkpoint-{SAVED}" / "fp8.safetensors").is_file() == with_state
        resumed = train(folder, STEPS, with_state)
        assert list(resumed) == list(whole)
        if with_state:
            for key, tensor in whole.items():
                assert_bitwise(resumed[key], tensor)
        else:
            assert any(not torch.equal(resumed[key], tensor) for key, tensor in whole.items())
