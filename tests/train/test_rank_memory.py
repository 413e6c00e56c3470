"""The planned memory of a rank against every allocation of a real step under FSDP2, or of one that cuts linears.

torch's fake process group makes one process rank 0 of two: a backend's own copies are no part of the plan.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from octavo.distributed.shards import local
from octavo.models import Decoder
from octavo.ops.gemm.hp_mm import library
from octavo.run.optimizer import MasterAdamW
from octavo.train.build import cut_linears, recompute_layers
from octavo.train.config import TrainConfig
from octavo.train.data import Batch, make_batch
from octavo.train.memory_plan import ACTIVATIONS, STATE, describe_model, plan_memory
from octavo.train.memory_report import saved_bytes
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
    library.CPU_BF16_IS_FAST = True  # a CPU without bf16 products widens operands, which no plan is about
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    mesh = Mesh(
        0, WORLD, 1, WORLD, torch.device("cpu"), init_device_mesh("cpu", (1, WORLD), mesh_dim_names=DIMENSIONS[:2])
    )
    return [most_allocated(configure(*case), mesh) for case in CASES]


def most_allocated(config: TrainConfig, mesh: Any) -> int:
    from torch.profiler import ProfilerActivity, profile

    from octavo.parallel import shard
    from octavo.train.step import summed_loss

    model = describe_model(config)
    sharded = model.float() if config.optimizer.master_weights == "fp32" else model
    shard(sharded, mesh, reduction="sum", param_dtype=torch.bfloat16)
    batch = filled(model, config)

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


def filled(model: Decoder, config: TrainConfig) -> Batch:
    """A micro-batch, for a model that has values from here on."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(0.0, 0.02)
    tokens = np.random.default_rng(0).integers(config.data.vocab_size, size=config.data.seq_len + 1)
    return make_batch([tokens], None)


def test_gathered_units_and_reductions_are_predicted() -> None:
    for case, seen in zip(CASES, run_group(observe, 1)[0], strict=True):
        loss, backward = plan_memory(configure(*case))._sharded_moments()
        assert max(loss, backward) == pytest.approx(seen, rel=0.01), case


# family, recipe, mode, what is recomputed; tokens where each rank has its own, in whole blocks or not, else 0
CUTS: list[tuple[str, str, str, str, int]] = [
    *(
        ("llama", recipe, mode, "none", 0)
        for recipe in ("bf16", "blockwise", "rowwise")
        for mode in ("gather", "reduce")
    ),
    *(("llama", "blockwise", "gather", "full", num) for num in (0, 256)),
    *(("llama", recipe, "gather", "none", 256) for recipe in ("bf16", "blockwise", "rowwise", "tensorwise")),
    *(("llama", recipe, "gather", "none", 37) for recipe in ("bf16", "blockwise")),
    ("llama", "blockwise", "reduce", "none", 256),
    *((family, recipe, "gather", "none", 256) for family in ("gptj", "qwen3_moe") for recipe in ("bf16", "blockwise")),
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def configure_cut(family: str, recipe: str, mode: str, recompute: str, num_own: int) -> TrainConfig:
    base = configure(2, 1024, {}).model_dump()
    parallel = {"tensor_parallel_degree": WORLD, "tensor_parallel_mode": mode, "data_parallel_shard_degree": 1}
    sections = {
        "model": base["model"] | {"family": family} | (EXPERTS if family == "qwen3_moe" else {}),
        "data": base["data"] | {"seq_len": num_own or SEQ_LEN},
        "precision": {"recipe": recipe},
        "parallel": parallel | {"sequence_parallel": num_own > 0},
        "run": base["run"] | {"recompute": recompute},
    }
    return TrainConfig.model_validate(base | sections)


def observe_cut(_: int, __: int) -> list[tuple[int, int]]:
    """Of each case, bytes that a forward saves and bytes that the optimizer keeps."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from octavo.distributed.tensor_group import TensorGroup

    dist.destroy_process_group()
    configs = [configure_cut(*case) for case in CUTS]
    models = [describe_model(config) for config in configs]
    for model, config in zip(models, configs, strict=True):
        recompute_layers(model, config.run)
        cut_linears(model, TensorGroup(None, 0, WORLD), config.parallel)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    found = []
    for model, config in zip(models, configs, strict=True):
        batch = filled(model, config)
        optimizer = MasterAdamW(model, config.optimizer)
        optimizer.init_state()
        found.append((saved_bytes(model, batch), sum(t.nbytes for t in optimizer.state_dict().values() if t.dim())))
    return found


def test_what_a_rank_that_cuts_linears_holds_is_predicted() -> None:
    for case, (saved, kept) in zip(CUTS, run_group(observe_cut, 1)[0], strict=True):
        plan = plan_memory(configure_cut(*case))
        assert plan.total(ACTIVATIONS) == pytest.approx(saved, rel=0.01), case
        assert plan.total(STATE, "master weights", "moments") == pytest.approx(kept, rel=0.001), case
        assert plan.num_ranks == 2
