"""What the ranks of test_deepspeed.py do: the same steps under DeepSpeed's engine and in plain torch."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.integrations import deepspeed as integration
from octavo.nn import Linear, check_weights
from octavo.nn.fusion import describe_fusion
from tests.ecosystem.plain_run import BATCH, DIM, Case, Tied, batches, build, loss_of, plain, said_to


def settings(case: Case, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": {"stage": case.stage, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": 0.0,  # by default 1.0, which plain torch does not do
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.dtype == "bf16"},
        **more,
    }


def start(case: Case, seed: int = 0, **more: Any) -> Any:
    """A new engine over a new model."""
    return engine_over(build(case, seed), case, **more)


def engine_over(model: nn.Module, case: Case, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return integration.initialize(model=model, optimizer=optimizer, config=settings(case, **more))[0]


def steps(engine: Any, inputs: list[torch.Tensor]) -> list[float]:
    losses = []
    for ids in inputs:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """All weights, on every rank."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return copy.deepcopy(engine.module.state_dict())


def under_deepspeed(case: Case, rank: int, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    inputs, engine = batches(case, rank), start(case)
    half = len(inputs) // 2 if case.resumed else len(inputs)
    losses = steps(engine, inputs[:half])
    if case.resumed:
        integration.save_checkpoint(engine, folder)
        engine.destroy()
        engine = start(case, seed=9)
        with torch.no_grad():
            engine(inputs[0][:, 0])  # codes of the weights that go
        _, client_state = integration.load_checkpoint(engine, folder)
        assert client_state is not None
        assert "octavo_fp8" not in client_state
        losses += steps(engine, inputs[half:])
    held = sum(module.source.held_bytes() for module in engine.module.modules() if isinstance(module, Linear))
    assert (held == 0) == (case.stage == 3), "ZeRO-3 leaves no codes of a weight that has gone"
    check_weights(engine.module)
    if case.own_layers:
        assert ("0 of 2 layers" in describe_fusion(engine.module)) == (case.stage == 3), "planned before its hooks came"
    return losses, gathered(engine)


def compare(rank: int, cases: list[Case], folder: Path) -> list[Any]:
    """(losses under DeepSpeed, in plain torch, names of weights that differ in bits) of each case."""
    world_size, results = dist.get_world_size(), []
    for i, case in enumerate(cases):
        mine, weights = under_deepspeed(case, rank, folder / str(i))
        theirs, others = plain(case, rank, world_size)
        results.append((mine, theirs, [name for name in others if not torch.equal(weights[name], others[name])]))
    return results


def universal(folder: Path) -> dict[str, torch.Tensor]:
    """Outputs after a universal checkpoint was loaded over weights in use: its weights come through .data."""
    case = Case(2, "rowwise", "bf16", 1)
    inputs, engine = batches(case, 0), start(case)
    ids = inputs[0][:, 0]
    steps(engine, inputs[:3])
    integration.save_checkpoint(engine, folder, tag="saved")
    to_universal = [sys.executable, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", str(folder / "saved"), "--output_folder", str(folder / "universal")]
    ran = subprocess.run([*to_universal, *folders, "--inject_missing_state"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    with torch.no_grad():
        outputs = {"wanted": engine(ids)}
        for name, load, steps_before in (
            ("octavo's load_checkpoint", integration.load_checkpoint, 3),  # as many as the checkpoint has
            ("engine.load_checkpoint", type(engine).load_checkpoint, 0),
        ):
            other = start(case, seed=5, checkpoint={"load_universal": True})
            other.global_steps = steps_before
            other(ids)  # codes of the weights that go
            load(other, str(folder), tag="universal")
            outputs[name] = other(ids)
    return outputs


def zero_init() -> tuple[list[float], list[float]]:
    """Losses of a model that deepspeed.zero.Init has partitioned before it is converted, and in plain torch."""
    import deepspeed

    case = Case(3, "delayed", "fp32", 1)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings(case)):
        model = Tied(False)
    octavo.convert(model, case.recipe, ignore=())
    return steps(engine_over(model, case), batches(case, 0)), plain(case, 0, 1)[0]


def refusals(folder: Path) -> dict[str, str]:
    """What is said to each mistake."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    case = Case(3, "delayed", "fp32", 1)
    said = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        said[name] = said_to(act)

    plain_model = Tied(False)
    attempt("not converted", lambda: engine_over(plain_model, case))
    optimizer = torch.optim.AdamW(plain_model.parameters())
    late = deepspeed.initialize(model=plain_model, optimizer=optimizer, config=settings(case))[0]
    attempt("prepared before convert", lambda: integration.prepare(late))
    attempt("converted late", lambda: octavo.convert(late.module, "blockwise"))
    attempt("section fp8", lambda: start(case, fp8={"enabled": True}))
    attempt("section fp8, off", lambda: start(case, fp8={"enabled": False}))
    pipeline = PipelineModule([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)], num_stages=1, loss_fn=nn.MSELoss())
    octavo.convert(pipeline, "blockwise")
    attempt("pipeline", lambda: engine_over(pipeline, case._replace(stage=0)))

    engine = start(case)
    engine.save_checkpoint(str(folder), tag="bare")
    integration.save_checkpoint(engine, folder, tag="whole")
    ids = batches(case, 0)[0][:, 0]
    engine = start(case)
    engine.load_checkpoint(str(folder), tag="whole")
    attempt("state not loaded", lambda: engine(ids))
    attempt("state loaded after that", lambda: (integration.load_checkpoint(engine, folder, tag="whole"), engine(ids)))
    engine = start(case)
    attempt("no state", lambda: integration.load_checkpoint(engine, folder, tag="bare"))
    without = {"tag": "bare", "fp8_state": False}
    attempt("no state, wanted", lambda: (integration.load_checkpoint(engine, folder, **without), engine(ids)))
    return said


def alone(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """All that one rank shows."""
    begin()
    results = {
        "cases": compare(rank, cases, Path(folder)),
        "universal": universal(Path(folder, "universal")),
        "zero_init": zero_init(),
        "refusals": refusals(Path(folder, "refusals")),
    }
    dist.destroy_process_group()
    return results


def together(rank: int, cases: list[Case], folder: str) -> list[Any]:
    """What several ranks show."""
    begin()
    results = compare(rank, cases, Path(folder))
    dist.barrier()
    dist.destroy_process_group()
    return results


def begin() -> None:
    """A process group of DeepSpeed's, whose own warnings are none of the tests' business."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed("gloo")
