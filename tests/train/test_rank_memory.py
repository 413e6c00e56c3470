"""The planned memory of a rank against every allocation of a real step under FSDP2.

torch's fake process group makes one process rank 0 of two: a backend's own copies are no part of the plan.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from octavo.train.config import TrainConfig
from octavo.train.memory_plan import describe_model, plan_memory
from tests.ranks import run_group

WORLD, SEQ_LEN = 2, 16  # so few tokens that weights are most of what is held
COMPACT = {"state_dtype": "fp8", "master_weights": "remainder"}
# layers, vocabulary, optimizer: the peak is in the layers' backward, or as the root's gradients are reduced
CASES: list[tuple[int, int, dict[str, Any]]] = [(6, 1024, COMPACT), (6, 1024, {}), (2, 20_000, COMPACT)]


def configure(num_layers: int, vocab_size: int, optimizer: dict[str, Any]) -> TrainConfig:
    sections = {
        "model": {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": num_layers,
            "tie_word_embeddings": False,
        },
        "data": {"vocab_size": vocab_size, "seq_len": SEQ_LEN, "batch_size": WORLD, "micro_batch_size": 1},
        "optimizer": optimizer,
        "precision": {"recipe": "bf16"},  # a CPU quantizes by way of fp32
        "parallel": {"data_parallel_shard_degree": WORLD},
        "run": {"device": "cpu"},
    }
    return TrainConfig.model_validate(sections)


def observe(_: int, __: int) -> list[int]:
    """Of each case, the most that was allocated at once in forward and backward beyond what was there before."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from octavo.distributed.mesh import DIMENSIONS, Mesh

    warnings.filterwarnings("ignore")
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    mesh = Mesh(
        0, WORLD, 1, WORLD, torch.device("cpu"), init_device_mesh("cpu", (1, WORLD), mesh_dim_names=DIMENSIONS[:2])
    )
    return [most_allocated(configure(*case), mesh) for case in CASES]


def most_allocated(config: TrainConfig, mesh: Any) -> int:
    from torch.profiler import ProfilerActivity, profile

    from octavo.parallel import shard
    from octavo.train.data import make_batch
    from octavo.train.step import summed_loss

    model = describe_model(config)
    sharded = model.float() if config.optimizer.master_weights == "fp32" else model
    shard(sharded, mesh, reduction="sum", param_dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)  # type: ignore[operator]
    tokens = np.random.default_rng(0).integers(config.data.vocab_size, size=SEQ_LEN + 1)
    batch = make_batch([tokens], None)

    def step() -> None:
        summed_loss(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    sizes = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"])
    return int(sizes.cumsum(0).max())


def test_gathered_units_and_reductions_are_predicted() -> None:
    for case, seen in zip(CASES, run_group(observe, 1)[0], strict=True):
        loss, backward = plan_memory(configure(*case))._sharded_moments()
        assert max(loss, backward) == pytest.approx(seen, rel=0.01), case
