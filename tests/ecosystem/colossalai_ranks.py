"""What the ranks of test_colossalai.py do: the same steps by ColossalAI's booster and in plain torch."""

import contextlib
import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.amp import Fallback
from octavo.distributed.fp8_hook import FP8HookState, fp8_hook
from octavo.nn import check_weights
from tests.ecosystem.plain_run import DIM, STEPS, Case, batches, build, loss_of, make, plain, recipe_of, said_to


class Run:
    """A boosted model. Without a precision it is ColossalAI's alone."""

    def __init__(self, case: Case, seed: int = 0, *, is_octavo: bool = True, level: str = "O1", **options: Any) -> None:
        from colossalai.booster import Booster
        from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

        from octavo.integrations.colossalai import OctavoLowLevelZeroPlugin, OctavoMixedPrecision

        self.case = case
        self.inner = model = make(case, seed)
        self.precision = OctavoMixedPrecision(level, recipe=recipe_of(case.recipe), ignore=(), **options)
        zero = {"stage": case.stage, "precision": case.dtype, "overlap_communication": False}
        if case.stage == 0:
            plugin = TorchDDPPlugin(broadcast_buffers=False)
        else:
            plugin = OctavoLowLevelZeroPlugin(self.precision, **zero) if is_octavo else LowLevelZeroPlugin(**zero)
        self.booster = Booster(mixed_precision=self.precision if case.stage == 0 and is_octavo else None, plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def steps(self, inputs: list[torch.Tensor]) -> list[float]:
        losses, num = [], self.case.accumulation
        for i, ids in enumerate(inputs):
            is_last = (i + 1) % num == 0
            sums_here = is_last or self.case.stage == 2  # which has no no_sync
            waits = contextlib.nullcontext() if sums_here else self.booster.no_sync(self.model, self.optimizer)
            with waits:
                loss = loss_of(self.model, ids)
                self.booster.backward(loss / num, self.optimizer)
            losses.append(loss.item())
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = self.precision.state_dict()
        self.booster.save_model(self.model, str(folder / "model"), shard=True)
        self.booster.save_optimizer(self.optimizer, str(folder / "optimizer.bin"))
        residuals = state.pop("fp8_communication", {})
        torch.save(residuals, folder / f"{dist.get_rank()}.pt")
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(state))
        dist.barrier()

    def load(self, folder: Path) -> None:
        with torch.no_grad():
            self.model(batches(self.case, 0)[0][:, 0])  # codes of the weights that go
        self.booster.load_model(self.model, str(folder / "model"))
        self.booster.load_optimizer(self.optimizer, str(folder / "optimizer.bin"))
        state = json.loads((folder / "0.json").read_text())  # of one rank for all
        if residuals := torch.load(folder / f"{dist.get_rank()}.pt"):
            state["fp8_communication"] = residuals
        self.precision.load_state_dict(state)

    def weights(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.inner.state_dict())


def by_booster(case: Case, rank: int, folder: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    inputs, run = batches(case, rank), Run(case, **options)
    half = len(inputs) // 2 if case.resumed else len(inputs)
    losses = run.steps(inputs[:half])
    if case.resumed:
        run.save(folder)
        run = Run(case, seed=9, **options)
        run.load(folder)
        losses += run.steps(inputs[half:])
    check_weights(run.inner)
    return losses, run.weights()


def compare(rank: int, cases: list[Case], folder: Path) -> list[Any]:
    """(losses under the booster, in plain torch, names of weights that differ in bits) of each case."""
    results = []
    for i, case in enumerate(cases):
        mine, weights = by_booster(case, rank, folder / str(i))
        theirs, others = plain(case, rank, dist.get_world_size())
        results.append((mine, theirs, differing(weights, others)))
    return results


def differing(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    assert list(weights) == list(others)
    return [name for name in others if not torch.equal(weights[name], others[name])]


def switched(stage: int) -> dict[str, list[float]]:
    """Losses of a run whose second third is in bf16, of runs at one level, and of ColossalAI alone."""
    case = Case(stage, "delayed", "bf16" if stage else "fp32", 1)
    inputs, run = batches(case, 0), Run(case)
    amp_model = make(case)
    amp_optimizer = torch.optim.AdamW(amp_model.parameters(), lr=1e-3)
    octavo.amp.initialize(amp_model, amp_optimizer, recipe=recipe_of(case.recipe), ignore=())
    losses: dict[str, list[float]] = {"switched": [], "by octavo.amp": []}
    for i in range(STEPS):
        if i in (7, 14):
            for handle in (run.precision.handle, octavo.amp.handle(amp_optimizer)):
                handle.switch("O2" if i == 7 else "O1")
        losses["switched"] += run.steps(inputs[i : i + 1])
        loss = loss_of(amp_model, inputs[i])
        loss.backward()
        amp_optimizer.step()
        amp_optimizer.zero_grad()
        losses["by octavo.amp"].append(loss.item())
    losses["O1"] = Run(case).steps(inputs)
    losses["O2"] = Run(case, level="O2").steps(inputs)
    losses["without octavo"] = Run(case, is_octavo=False).steps(inputs)
    return losses


def skips(rank: int, stage: int) -> tuple[int, list[str], list[str]]:
    """A step whose loss is infinite on one rank: updates left out, weights that changed, and after a good step."""
    case = Case(stage, "blockwise", "fp32", 1)
    inputs, run = batches(case, rank), Run(case)
    run.steps(inputs[:1])
    before = run.weights()
    run.booster.backward(loss_of(run.model, inputs[1]) * (float("inf") if rank == 1 else 1.0), run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    after = run.weights()
    run.steps(inputs[2:3])
    return run.precision.handle.num_skipped, differing(before, after), differing(after, run.weights())


def falls_back() -> list[str]:
    """Levels of a run whose loss jumps: booster.backward shows it to octavo.amp."""
    rule = Fallback(steps=2, window=8, min_losses=4)
    run = Run(Case(0, "blockwise", "fp32", 1), fallback=rule)
    levels = []
    for i, ids in enumerate(batches(run.case, 0)[:10]):
        run.booster.backward(loss_of(run.model, ids) * (100.0 if i == 6 else 1.0), run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        levels.append(run.precision.handle.level)
    return levels


def in_fp8(rank: int, folder: Path) -> dict[str, list[float]]:
    """Losses with gradients that travel in FP8: by the booster, resumed, by DDP's hook in plain torch; and without."""
    case, options = Case(0, "blockwise", "fp32", 1), {"fp8_communication": {"min_bytes": 0}}
    losses = {
        "by the booster": by_booster(case, rank, folder, **options)[0],
        "resumed": by_booster(case._replace(resumed=True), rank, folder, **options)[0],
        "not in FP8": by_booster(case, rank, folder)[0],
        "by hand": [],
    }
    model = nn.parallel.DistributedDataParallel(build(case))
    model.register_comm_hook(FP8HookState(model, min_bytes=0), fp8_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in batches(case, rank):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses["by hand"].append(loss.item())
    return losses


def own_reduction(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What ColossalAI's all_reduce_fp8 makes of a tensor, and the sum in fp32."""
    from colossalai.quantization.fp8 import all_reduce_fp8

    values = torch.randn(256, generator=torch.Generator().manual_seed(rank))
    theirs = values.clone()
    all_reduce_fp8(theirs)
    dist.all_reduce(values)
    return theirs, values


def refusals() -> dict[str, str]:
    """What is said to each mistake."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
    from colossalai.interface import ModelWrapper
    from peft import LoraConfig

    from octavo.integrations.colossalai import OctavoLowLevelZeroPlugin, OctavoMixedPrecision

    said = {}

    def boost(model: nn.Module | None = None, plugin: Any = None, **options: Any) -> Any:
        model = model or nn.Sequential(nn.Linear(DIM, DIM))
        precision = OctavoMixedPrecision(**options)
        optimizer = torch.optim.AdamW(model.parameters())
        return Booster(mixed_precision=precision, plugin=plugin or TorchDDPPlugin()).boost(model, optimizer)

    def zero(mixed: dict[str, Any] | None = None, **options: Any) -> Any:
        plugin = OctavoLowLevelZeroPlugin(
            OctavoMixedPrecision(**(mixed or {})), **{"precision": "bf16", "overlap_communication": False, **options}
        )
        model = nn.Sequential(nn.Linear(DIM, DIM))
        return Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))

    def attempt(name: str, act: Callable[[], Any]) -> None:
        said[name] = said_to(act)

    model = nn.Sequential(nn.Linear(DIM, DIM))
    optimizer = torch.optim.AdamW(model.parameters())
    attempt(
        "no optimizer", lambda: Booster(mixed_precision=OctavoMixedPrecision(), plugin=TorchDDPPlugin()).boost(model)
    )
    precision = OctavoMixedPrecision()
    attempt("no boost", lambda: precision.handle)
    attempt("no boost before its state", precision.state_dict)
    precision.configure(model, optimizer)
    attempt("twice", lambda: precision.configure(model, optimizer))
    attempt("amp before", lambda: OctavoMixedPrecision().configure(model, optimizer))
    attempt("converted before", lambda: boost(build(Case(0, "rowwise", "fp32", 1)), recipe=None))
    attempt("not converted", lambda: boost(recipe=None))
    attempt("dtype", lambda: OctavoMixedPrecision(dtype=torch.float16))
    attempt("fallback under ZeRO", lambda: zero({"fallback": Fallback()}))
    attempt("FP8 communication under ZeRO", lambda: zero({"fp8_communication": True}))
    attempt("use_fp8", lambda: zero(use_fp8=True))
    attempt("overlap_allgather", lambda: zero(overlap_allgather=True))
    attempt("fp16", lambda: zero(precision="fp16"))
    ours = LowLevelZeroPlugin(precision="bf16", overlap_communication=False)
    attempt("ignored by the booster", lambda: boost_and_ask(OctavoMixedPrecision(), ours))
    attempt("two hooks", lambda: boost(plugin=TorchDDPPlugin(fp8_communication=True), fp8_communication=True))
    attempt("buffers", lambda: boost(recipe="delayed"))
    attempt("another plug-in", lambda: OctavoMixedPrecision().configure(ModelWrapper(model), optimizer))
    theirs = type("TheirLinear", (nn.Linear,), {"__module__": "transformer_engine.pytorch"})(DIM, DIM)
    attempt("another backend", lambda: boost(nn.Sequential(nn.Linear(DIM, DIM), theirs)))
    adapters = LoraConfig(target_modules=["0"])
    with_adapters = Booster(plugin=TorchDDPPlugin()).enable_lora(nn.Sequential(nn.Linear(DIM, DIM)), None, adapters)
    attempt("adapters before", lambda: boost(with_adapters))
    communicates = Run(Case(0, "blockwise", "fp32", 1), fp8_communication=True)
    attempt("no residuals", lambda: communicates.precision.load_state_dict(communicates.precision.handle.state_dict()))
    return said


def boost_and_ask(precision: Any, plugin: Any) -> Any:
    from colossalai.booster import Booster

    model = nn.Sequential(nn.Linear(DIM, DIM))
    Booster(mixed_precision=precision, plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    assert type(model[0]) is nn.Linear
    return precision.handle


def zero_on_a_cpu() -> str:
    """What ColossalAI says to low-level ZeRO without a stand-in for a device."""
    from colossalai.accelerator import get_accelerator, set_accelerator

    stand_in = get_accelerator()
    set_accelerator("cpu")
    try:
        Run(Case(1, "blockwise", "bf16", 1))
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        set_accelerator(stand_in)
    return "nothing"


def exported(folder: Path) -> Path:
    """The folder of a bf16 run's model."""
    run = Run(Case(1, "blockwise", "bf16", 1))
    run.steps(batches(run.case, 0)[:4])
    run.booster.save_model(run.model, str(folder), shard=True)
    return folder


def alone(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """All that one rank shows."""
    begin()
    results = {
        "cases": compare(rank, cases, Path(folder)),
        "switched": [switched(stage) for stage in (0, 2)],
        "falls back": falls_back(),
        "refusals": refusals(),
        "zero_on_a_cpu": zero_on_a_cpu(),
        "exported": exported(Path(folder, "exported")),
    }
    dist.destroy_process_group()
    return results


def together(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """What several ranks show."""
    begin()
    results = {
        "cases": compare(rank, cases, Path(folder)),
        "in_fp8": in_fp8(rank, Path(folder, "in_fp8")),
        "own_reduction": own_reduction(rank),
        "skips": [skips(rank, stage) for stage in (0, 1)],
    }
    dist.barrier()
    dist.destroy_process_group()
    return results


def begin() -> None:
    """A process group of ColossalAI's. Its low-level ZeRO refuses a CPU by the accelerator's name, so this one has the
    name of a device; streams do nothing there."""
    warnings.simplefilter("ignore")
    import colossalai
    from colossalai.accelerator import set_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    class StandIn(CpuAccelerator):  # type: ignore[misc]
        name = "cuda"

        def nothing(self, *_: Any, **__: Any) -> None:
            pass

        device_count = synchronize = current_stream = Stream = nothing

        def stream(self, _: Any) -> Any:
            return contextlib.nullcontext()

    set_accelerator(StandIn())
    colossalai.launch_from_torch(backend="gloo", verbose=False)
