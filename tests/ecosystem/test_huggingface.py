"""octavo inside TRL and accelerate: examples run, several ranks train, and checkpoints are plain ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType
from safetensors.torch import load_file

import octavo
from octavo.errors import ConfigError
from octavo.integrations.huggingface import convert
from octavo.models import char_tokenizer
from octavo.testing import assert_bitwise
from tests.ecosystem.launched import finish, kill_a_rank, launch
from tests.integrations.test_huggingface import FAMILIES
from tests.integrations.toy_trainer import make_model, make_rows, make_trainer
from tests.ranks import free_port, run_ranks

pytestmark = pytest.mark.ecosystem
EXAMPLES = Path(__file__).parents[2] / "examples" / "huggingface"
LAYERS = {"Llama": "LlamaDecoderLayer", "GptOss": "GptOssDecoderLayer", "GPT2": "GPT2Block"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("toy")
    make_model().save_pretrained(folder)
    characters = char_tokenizer("0123456789+= ")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters.backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder


def run(*command: object, **environment: str) -> str:
    """What a program prints, on this machine's CPU."""
    place = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=250, env=os.environ | place | environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def logged(folder: Path, key: str) -> list[float]:
    last = max(checkpoints(folder), key=lambda each: int(each.name.removeprefix("checkpoint-")))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [row[key] for row in history if key in row]


def checkpoints(folder: Path) -> list[Path]:
    """Those that are whole."""
    return [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]


@pytest.mark.parametrize(("example", "key"), [("train", "loss"), ("sft", "loss"), ("grpo", "reward")])
def test_an_example_learns_and_saves_a_plain_model(example: str, key: str, toy: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, EXAMPLES / f"{example}.py", toy, tmp_path)
    assert "14 of 15 linears in FP8" in printed
    values = logged(tmp_path, key)
    better = -1 if key == "reward" else 1
    assert better * sum(values[-3:]) < better * sum(values[:3]), values
    assert list(load_file(tmp_path / "model.safetensors")) == list(load_file(toy / "model.safetensors"))
    assert "octavo" not in (tmp_path / "config.json").read_text()


def test_accelerate_launches_two_ranks(toy: Path) -> None:
    launch = (Path(sys.executable).with_name("accelerate"), "launch", "--multi_gpu", "--num_processes", 2)
    options = ("--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", 0)
    lines = [line.split() for line in run(*launch, *options, EXAMPLES / "ranks.py", toy).splitlines()]
    losses = [float(words[1]) for words in lines if words[0] == "loss"]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    assert {words[2] for words in lines if words[0] == "loss"} == {"DistributedDataParallel"}


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(toy: Path, tmp_path: Path) -> None:
    place = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

    def train(folder: Path, steps: int) -> subprocess.Popen[str]:
        options = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
        options += ("--dynamo_backend", "no", "--main_process_port", str(free_port()))
        script = (EXAMPLES / "train.py", toy, folder, "--recipe", "delayed", "--steps", str(steps))
        return launch("-m", "accelerate.commands.launch", *options, *script, **place)

    whole, folder = tmp_path / "whole", tmp_path / "killed"
    finish(train(whole, 20))
    kill_a_rank(train(folder, 100_000), lambda: bool(checkpoints(folder)))
    for unfinished in set(folder.glob("checkpoint-*")) - set(checkpoints(folder)):
        shutil.rmtree(unfinished)
    saved = max(int(each.name.removeprefix("checkpoint-")) for each in checkpoints(folder))
    finish(train(folder, max(20, saved + 10)))
    resumed, undisturbed = logged(folder, "loss"), logged(whole, "loss")
    assert len(resumed) == max(20, saved + 10) and len(undisturbed) == 20
    assert resumed[:20] == undisturbed


def prepared(model: Any, kind: str, layer: str) -> tuple[Accelerator, Any, Any]:
    """A model and its optimizer, prepared by accelerate for DDP or FSDP2."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if kind == "fsdp2" else None)
    if kind == "fsdp2":  # accelerate switches FSDP on for accelerators alone, but shards on a CPU all the same
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train_prepared(rank: int, kind: str) -> dict[str, torch.Tensor]:
    """Losses and weights of each family, on two ranks."""
    found: dict[str, torch.Tensor] = {}
    for family, layer in LAYERS.items():
        model = make_model(family, **FAMILIES.get(family, {}))
        convert(model, "rowwise")
        accelerator, model, optimizer = prepared(model.eval(), kind, layer)  # without dropout
        losses = []
        for ids in make_rows(80).split(4)[rank::2]:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        with pytest.raises(ConfigError, match=r"already, and convert comes before accelerator.prepare\(\): convert\("):
            convert(model, "rowwise")
        weights = accelerator.unwrap_model(model).state_dict()
        found |= {f"{family} {key}": w.full_tensor() if hasattr(w, "full_tensor") else w for key, w in weights.items()}
        found[f"{family} losses"] = torch.stack(losses)
    if kind == "fsdp2":
        _, other, _ = prepared(make_model(), kind, LAYERS["Llama"])
        with pytest.raises(ConfigError, match=r"is sharded already .* call octavo.convert first"):
            octavo.convert(other, "rowwise")
    torch.distributed.destroy_process_group()
    return found


def test_ddp_and_fsdp2_train_alike() -> None:
    """Two ranks add two gradients in either order to the same bits."""
    ddp, fsdp2 = (run_ranks(train_prepared, 2, kind) for kind in ("ddp", "fsdp2"))
    for one, other in zip(ddp, fsdp2, strict=True):
        assert list(one) == list(other)
        for name, tensor in one.items():
            assert_bitwise(other[name], tensor)
    for family in LAYERS:
        assert ddp[0][f"{family} losses"][-1] < ddp[0][f"{family} losses"][0] - 0.5


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_no_codes_are_stale_after_bitsandbytes(optim: str, tmp_path: Path) -> None:
    model = make_model()
    convert(model, "blockwise")
    make_trainer(model, tmp_path, 3, optim=optim).train()
    octavo.nn.check_weights(model)
