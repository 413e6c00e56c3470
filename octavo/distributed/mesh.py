"""The ranks of a job as a mesh: the [parallel] section of a config, and the process groups by what they are for.

Dimensions have torchtitan's names: dp_replicate (ranks with a copy of the shards), dp_shard (ranks that share a model),
tp (ranks that compute each linear together; neighbours, since they talk most).
"""

import atexit
import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, PositiveInt, model_validator
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from octavo.config import Config
from octavo.distributed.collectives import all_gather_into
from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.torch_private import default_store, set_timeout
from octavo.distributed.watchdog import Watchdog
from octavo.env import TorchrunPlace, torchrun_place
from octavo.errors import BackendError, ConfigError

T = TypeVar("T")
DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
_HOST_TIMEOUT = datetime.timedelta(minutes=30)
_LATER = {
    "context_parallel_degree": "context parallelism is not supported yet",
    "pipeline_parallel_degree": "pipeline parallelism is not supported yet; shard over more ranks",
    "expert_parallel_degree": "expert parallelism is not supported yet; experts are sharded with their layer",
}


class ParallelSection(Config):
    """How the ranks of a job share a model; torchtitan's keys. All of them together are torchrun's number of ranks.

    Args:
        data_parallel_replicate_degree: groups of ranks with a copy of the shards each (HSDP); 1 for none.
        data_parallel_shard_degree: ranks that a model is sharded over (FSDP2); -1 for all that are left.
        tensor_parallel_degree: ranks among which each linear is cut (octavo.parallel.parallelize).
        tensor_parallel_mode: "gather" for forwards in the bits of one GPU, "reduce" for fewer messages; left out, as
            parallelize has it: "reduce" unless the numerics are exact.
        sequence_parallel: ranks that cut each linear have their own tokens alone between linears, which divides the
            memory of norms and residual sums by them.
        context_parallel_degree: 1; more is not supported yet.
        pipeline_parallel_degree: 1; more is not supported yet.
        expert_parallel_degree: 1; more is not supported yet.
        reduction: how gradients of the ranks are added: "sum", by the backend; "ordered", in the order of the global
            micro-batch, which gives the bits of one process with as many micro-batches.
        all_gather_dtype: "fp8" lets FSDP2 gather the codes of FP8 linears, half the bytes, with the same bits; what
            cannot be gathered so is gathered as with "bf16", and the run says why.
        timeout_s: seconds that a rank waits in a collective for the others, then the job ends. For the first rank's
            tokens, and for disks, they wait at least 30 minutes.
    """

    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel", "tp_size", "tp"),
            "tensor_parallel_degree",
        ),
        **dict.fromkeys(("fsdp_size", "data_parallel_size", "dp_shard"), "data_parallel_shard_degree"),
    }

    data_parallel_replicate_degree: PositiveInt = 1
    data_parallel_shard_degree: int = Field(default=-1, ge=-1)
    tensor_parallel_degree: PositiveInt = 1
    tensor_parallel_mode: Literal["gather", "reduce"] | None = None
    sequence_parallel: bool = False
    context_parallel_degree: PositiveInt = 1
    pipeline_parallel_degree: PositiveInt = 1
    expert_parallel_degree: PositiveInt = 1
    reduction: Literal["sum", "ordered"] = "sum"
    all_gather_dtype: Literal["bf16", "fp8"] = "bf16"
    timeout_s: PositiveInt = 600

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, rule in _LATER.items():
            if getattr(self, key) != 1:
                raise ValueError(f"{key} must be 1, got {getattr(self, key)}: {rule}")
        if self.data_parallel_shard_degree == 0:
            raise ValueError("data_parallel_shard_degree must be -1 (all that are left) or at least 1, got 0")
        if self.sequence_parallel and self.tensor_parallel_degree == 1:
            raise ValueError(
                "sequence_parallel cuts tokens among the ranks that cut each linear, and tensor_parallel_degree is 1; "
                "set that to 2 or more, or leave sequence_parallel out"
            )
        return self

    def refuse_tensor(self, command: str) -> None:
        """For a command that does not cut linears yet.

        Raises:
            ConfigError: tensor_parallel_degree asks for it.
        """
        if self.tensor_parallel_degree > 1:
            raise ConfigError(
                f"parallel.tensor_parallel_degree must be 1, got {self.tensor_parallel_degree}: {command} does not cut "
                "the linears that it trains yet; use data_parallel_shard_degree, and rollout.tensor_parallel_size to "
                "cut the sampler"
            )

    def degrees(self, world_size: int) -> tuple[int, int, int]:
        """(replicas, ranks that share a model, ranks that cut a linear) of a job of so many ranks.

        Raises:
            ConfigError: the degrees do not explain the ranks.
        """
        replicas, shards, tensor = (
            self.data_parallel_replicate_degree,
            self.data_parallel_shard_degree,
            self.tensor_parallel_degree,
        )
        known = replicas * tensor
        if shards == -1 and world_size % known == 0:
            return replicas, world_size // known, tensor
        if shards != -1 and known * shards == world_size:
            return replicas, shards, tensor
        degrees = f"data_parallel_replicate_degree={replicas} times data_parallel_shard_degree={shards}"
        if tensor > 1:
            degrees += f" times tensor_parallel_degree={tensor}"
        fits = f"start a multiple of {known} ranks (torchrun --nproc-per-node {known})"
        if shards != -1:
            fits = f"start {known * shards} ranks, or set data_parallel_shard_degree = -1"
        raise ConfigError(f"parallel: {degrees} must be the number of ranks, got {world_size}; {fits}")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """This process among the ranks of its job. `Mesh.single()` is one process without a process group.

    Attributes:
        rank: among the ranks with data of their own; those of one tensor group have the same.
        world_size: how many of these there are.
        num_replicas: size of dp_replicate.
        num_shards: size of dp_shard.
        device: this rank's.
        device_mesh: torch's DeviceMesh with DIMENSIONS, or None for one process.
        watchdog: says which rank is late, where from_config has started one.
        host_group: all ranks over gloo, for what the hosts agree on while the devices compute; None for one process.
        tensor_group: the ranks among which each linear is cut; None where none is.
        data_host_group: the ranks with data of their own that hold the same slices, over gloo; host_group without tp.
    """

    rank: int
    world_size: int
    num_replicas: int
    num_shards: int
    device: torch.device
    device_mesh: Any = None
    watchdog: Watchdog | None = None
    host_group: Any = None
    tensor_group: TensorGroup | None = None
    data_host_group: Any = None

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Self:
        """One process."""
        return cls(0, 1, 1, 1, torch.device(device))

    @classmethod
    def from_config(cls, parallel: ParallelSection | None = None, device: str = "") -> Self:
        """The mesh that torchrun's environment and a [parallel] section describe.

        The first call starts the process group and the watchdog; they stay until close, or until the process ends.

        Args:
            parallel: None for all ranks in one shard group.
            device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank); empty takes GPUs where there are any.
        Raises:
            ConfigError: the section does not fit the number of ranks; a GPU is named, but ranks take one each.
            BackendError: there are no GPUs, or fewer than this host's ranks.
        """
        parallel, place = parallel or ParallelSection(), torchrun_place()
        if place is None or place.world_size == 1:
            parallel.degrees(1)
            return cls.single(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        degrees = parallel.degrees(place.world_size)
        own = _device_of(place, device)
        timeout = datetime.timedelta(seconds=parallel.timeout_s)
        if not dist.is_initialized():
            _start(place, own, timeout)
        if not _watchdogs:
            store = default_store()
            store.set_timeout(datetime.timedelta(seconds=30))
            _watchdogs.append(Watchdog(store, place.rank, place.world_size, parallel.timeout_s / 2))
        mesh = cls.of_process_group(*degrees[:2], own, degrees[2])
        # torch gives new groups a default of its own; the hosts also wait for text to be tokenized, and for disks
        of_hosts = max(timeout, _HOST_TIMEOUT)
        set_timeout(of_hosts, mesh.host_group)
        for name in mesh.device_mesh.mesh_dim_names:
            set_timeout(timeout, mesh.group(name))
        return dataclasses.replace(mesh, watchdog=_watchdogs[0])

    @classmethod
    def of_process_group(
        cls, num_replicas: int, num_shards: int, device: torch.device | str, num_tensor: int = 1
    ) -> Self:
        """The mesh over torch's default process group, which the caller has started."""
        from torch.distributed.device_mesh import init_device_mesh

        device = torch.device(device)
        sizes = (num_replicas, num_shards, num_tensor)[: 3 if num_tensor > 1 else 2]
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS[: len(sizes)])
        # its own even where the default one is gloo: a save in the background must not meet training's collectives
        host_group = dist.new_group(backend="gloo")
        tensor_group, data_host_group = None, host_group
        if num_tensor > 1:
            tensor_group = TensorGroup.of(mesh.get_group("tp"))
            mesh["dp_replicate", "dp_shard"]._flatten("dp")
            everyone = range(dist.get_world_size())
            groups = [dist.new_group(list(everyone[i::num_tensor]), backend="gloo") for i in range(num_tensor)]
            data_host_group = groups[tensor_group.rank]
        return cls(
            dist.get_rank() // num_tensor,
            dist.get_world_size() // num_tensor,
            num_replicas,
            num_shards,
            device,
            mesh,
            host_group=host_group,
            tensor_group=tensor_group,
            data_host_group=data_host_group,
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints for all."""
        return self.rank == 0 and (self.tensor_group is None or self.tensor_group.rank == 0)

    def group(self, dimension: Literal["dp_replicate", "dp_shard", "tp", "dp"]) -> Any:
        """The process group of a dimension that this rank is in, None for one process.

        Args:
            dimension: a name of DIMENSIONS, or "dp" for all ranks with data of their own.
        """
        if self.device_mesh is None:
            return None
        if dimension == "dp" and self.tensor_group is None:
            return dist.group.WORLD
        return self.device_mesh.get_group(dimension)

    def own_share(self, num_micro_batches: int) -> range:
        """This rank's micro-batches of a global batch: rank, rank + world_size, ...

        Raises:
            ConfigError: the ranks would have different numbers of them.
        """
        if num_micro_batches % self.world_size:
            raise ConfigError(
                f"the micro-batches of a step must be a multiple of the ranks, got {num_micro_batches} for "
                f"{self.world_size}; set data.micro_batch_size so that data.batch_size / data.micro_batch_size is "
                f"a multiple of {self.world_size}"
            )
        return range(self.rank, num_micro_batches, self.world_size)

    def new_host_group(self) -> Any:
        """Another group like host_group, for a thread with collectives of its own; all ranks must ask."""
        return None if self.device_mesh is None else dist.new_group(backend="gloo", timeout=_HOST_TIMEOUT)

    def neighbours(self, size: int, timeout_s: int) -> TensorGroup:
        """This rank among `size` neighbours, which cut a model beside one that is sharded over all; all must ask."""
        everyone, timeout = range(dist.get_world_size()), datetime.timedelta(seconds=timeout_s)
        groups = [dist.new_group(list(everyone[i : i + size]), timeout=timeout) for i in everyone[::size]]
        return TensorGroup.of(groups[dist.get_rank() // size])

    def at(self, place: str) -> None:
        """Say where this rank is, for the watchdog; all ranks come to the same places in turn."""
        if self.watchdog is not None:
            self.watchdog.at(place)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.device_mesh is not None:
            dist.barrier()

    def largest_of_slices(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of what the ranks of a tensor group have found in their slices, free of NaN; all must ask."""
        return values if self.tensor_group is None else self.tensor_group.largest(values)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank; all must ask."""
        if self.device_mesh is None:
            return flag
        found = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers [n] of this rank's micro-batches -> [n * world_size], of all in their global order; all must ask."""
        if self.device_mesh is None:
            return values
        found = values.new_empty(self.world_size * len(values))
        all_gather_into(found, values.contiguous(), group=self.group("dp"))
        return found.view(self.world_size, -1).t().reshape(-1)

    def gather_vectors(self, own: torch.Tensor, lens: Sequence[int]) -> list[torch.Tensor]:
        """A vector [lens[rank]] of each rank, by rank, where this rank's is; all must ask with the same lens."""
        if self.device_mesh is None:
            return [own]
        assert len(own) == lens[self.rank], f"{len(own)} numbers, and {lens[self.rank]} were announced"
        found = own.new_empty(self.world_size, max(lens))
        all_gather_into(found.view(-1), torch.nn.functional.pad(own, (0, max(lens) - len(own))), group=self.group("dp"))
        return [row[:num] for row, num in zip(found, lens, strict=True)]

    def gather_objects(self, value: T) -> list[T]:
        """A small picklable value of each rank, those of one tensor group too, by rank; all must ask."""
        if self.device_mesh is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def gather_data_objects(self, value: T) -> list[T]:
        """gather_objects among the ranks with data of their own."""
        if self.device_mesh is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group("dp"))
        return found

    def gather_dealt(self, own: Sequence[T], num: int) -> list[T]:
        """Small picklable values of `num` items that were dealt to the ranks in turn, in their order; all must ask.

        Args:
            own: of items rank, rank + world_size, ...; what goes beyond num is left out.
        """
        everyone = self.gather_data_objects(list(own))
        return [everyone[index % self.world_size][index // self.world_size] for index in range(num)]

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the first rank's values to all, in place; all must ask."""
        if self.device_mesh is not None:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def close(self) -> None:
        """End the watchdog and the process group, where there are any; all ranks must come here."""
        if self.device_mesh is not None:
            end_job()


ONE_PROCESS = Mesh.single()
_watchdogs: list[Watchdog] = []  # of this process's job
_starts = itertools.count()


def _start(place: TorchrunPlace, device: torch.device, timeout: datetime.timedelta) -> None:
    """Start the default process group, and see to the watchdog's end."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun's tries share a store: without a name of its own a restarted rank finds the addresses of dead ones
    store = PrefixStore(f"attempt {place.attempt}.{next(_starts)}", store)
    common: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **common)
    else:
        dist.init_process_group("gloo", **common)
    # not the process group: on a rank that has failed, its end would wait for the others
    atexit.register(_end_watchdog)


def end_job() -> None:
    """End this process's part of a job that has gone well; all ranks must come here. Nothing where there is no job."""
    if dist.is_initialized():
        dist.barrier()  # a rank that ended first would cut the others' connections
        _end_watchdog()
        dist.destroy_process_group()


def _end_watchdog() -> None:
    while _watchdogs:
        _watchdogs.pop().close()


def _device_of(place: TorchrunPlace, device: str) -> torch.device:
    """A rank's own device."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if ":" in kind:
        raise ConfigError(
            f"run.device must be 'cuda' or 'cpu' where several ranks run, got {device!r}; a rank takes one"
        )
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise BackendError("run.device = 'cuda' needs GPUs, torch sees none; set run.device = 'cpu' (gloo)")
    if place.local_rank >= torch.cuda.device_count():
        raise BackendError(
            f"each rank needs a GPU of its own, local rank {place.local_rank} found {torch.cuda.device_count()}; start "
            f"torchrun with --nproc-per-node {torch.cuda.device_count()}, or set run.device = 'cpu'"
        )
    return torch.device("cuda", place.local_rank)
