"""The mesh of a job: what fits its ranks, what is refused, and whether all ranks run the same."""

import re
from typing import Any

import pytest

from octavo.config import Config
from octavo.distributed.agreement import check_agreement, check_versions, describe_process, versions
from octavo.distributed.mesh import Mesh, ParallelSection
from octavo.env import torchrun_place
from octavo.errors import BackendError, ConfigError
from octavo.rl.config import RLConfig
from octavo.train.config import TrainConfig
from tests.ranks import run_ranks


def job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(ParallelSection(data_parallel_replicate_degree=2, timeout_s=60), "cpu")
    found: dict[str, Any] = {"sizes": [mesh.num_replicas, mesh.num_shards, mesh.rank, mesh.is_first]}
    found["dimensions"] = mesh.device_mesh.mesh_dim_names
    groups = [mesh.group(name) for name in ("dp_replicate", "dp_shard", "dp")]  # type: ignore[arg-type]
    found["groups"] = [group.size() for group in groups]
    found["share"] = list(mesh.own_share(4))
    facts = {"config.run.seed": 1, "versions.torch": "2.13"}
    check_agreement(facts)
    found["refusals"] = []
    for other in ({"config.run.seed": rank}, {"versions.torch": f"2.{rank}"}, {f"config.only_{rank}": 1}):
        with pytest.raises(ConfigError) as error:
            check_agreement(facts | other)
        found["refusals"].append(str(error.value))
    with pytest.raises(ConfigError) as error:
        Mesh.from_config(ParallelSection(data_parallel_shard_degree=3), "cpu")
    found["refusals"].append(str(error.value))
    with pytest.raises(ConfigError) as error:
        mesh.own_share(3)
    found["refusals"].append(str(error.value))
    mesh.close()
    return found


@pytest.mark.parametrize("config", [TrainConfig, RLConfig])
@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "tensor_parallel_size", "tp"])
def test_other_frameworks_names_lead_to_the_degree(config: type[Config], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}; did you mean parallel.tensor_parallel_degree\?$"):
        config(parallel={name: 2})
    assert set(ParallelSection.other_names.values()) <= set(ParallelSection.model_fields)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(job, 2)


def test_a_mesh_has_torchtitans_dimensions(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["sizes"] == [2, 1, rank, rank == 0]
        assert found["dimensions"] == ("dp_replicate", "dp_shard")
        assert found["groups"] == [2, 1, 2]


def test_micro_batches_go_to_the_ranks_in_turn(ranks: list[dict[str, Any]]) -> None:
    assert [found["share"] for found in ranks] == [[0, 2], [1, 3]]


def test_the_first_key_that_differs_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        seed, torch, only, *_ = found["refusals"]
        assert "config.run.seed is 0 on rank 0 and 1 on rank 1" in seed
        assert "versions.torch is '2.0' on rank 0 and '2.1' on rank 1" in torch
        assert "config.only_0 is 1 on rank 0 and (not set) on rank 1" in only


def test_what_does_not_fit_the_ranks_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        _, _, _, degrees, share = found["refusals"]
        assert "must be the number of ranks, got 2; start 3 ranks, or set data_parallel_shard_degree = -1" in degrees
        assert "must be a multiple of the ranks, got 3 for 2" in share


@pytest.mark.parametrize(
    ("replicas", "shards", "ranks", "expected"), [(1, -1, 8, (1, 8, 1)), (2, -1, 8, (2, 4, 1)), (2, 2, 4, (2, 2, 1))]
)
def test_degrees(replicas: int, shards: int, ranks: int, expected: tuple[int, int, int]) -> None:
    section = ParallelSection(data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards)
    assert section.degrees(ranks) == expected


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"start a multiple of 3 ranks \(torchrun --nproc-per-node 3\)"):
        ParallelSection(data_parallel_replicate_degree=3).degrees(4)


def test_a_tensor_parallel_degree_takes_its_share_of_the_ranks() -> None:
    assert ParallelSection(tensor_parallel_degree=2).degrees(8) == (1, 4, 2)
    with pytest.raises(ConfigError, match="shard_degree=3 times tensor_parallel_degree=2 must be the number of ranks"):
        ParallelSection(data_parallel_shard_degree=3, tensor_parallel_degree=2).degrees(8)


@pytest.mark.parametrize("kind", ["context", "pipeline", "expert"])
def test_what_is_not_there_yet_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind}_parallel_degree must be 1, got 2: .* not supported yet"):
        ParallelSection(**{f"{kind}_parallel_degree": 2})


def test_no_launcher_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    mesh = Mesh.from_config(device="cpu")
    assert (mesh.rank, mesh.world_size, mesh.group("dp"), list(mesh.own_share(3))) == (0, 1, None, [0, 1, 2])
    with pytest.raises(ConfigError, match="must be the number of ranks, got 1; start 2 ranks"):
        Mesh.from_config(ParallelSection(data_parallel_shard_degree=2), "cpu")
    check_agreement({"nothing": "to compare with"})
    assert set(describe_process()) == {"octavo", "python", "torch", "triton", "device"}


def test_half_of_a_launchers_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="LOCAL_RANK=None, WORLD_SIZE=2; start with torchrun"):
        torchrun_place()
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK must be a whole number, got 'first'"):
        torchrun_place()


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [("cuda:0", ConfigError, "where several ranks run"), ("cuda", BackendError, "needs GPUs, torch sees none")],
)
def test_a_device_that_ranks_cannot_share_is_refused(
    device: str, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(error, match=text):
        Mesh.from_config(device=device)


@pytest.mark.parametrize("name", ["octavo", "torch", "triton"])
def test_a_process_of_another_version_is_refused(name: str) -> None:
    check_versions("rank 0", versions(), "rank 1")
    text = re.escape(f"{name} is 9.9 on the router and {versions()[name]} on replica 1; octavo or torch was installed")
    with pytest.raises(ConfigError, match=text):
        check_versions("the router", versions() | {name: "9.9"}, "replica 1")
