"""A job of one host's processes that find each other on loopback, without torchrun: who starts them has rank 0."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it by a star
from torch.distributed.rendezvous import rendezvous

from octavo.distributed.tensor_group import TensorGroup
from octavo.distributed.torch_private import forget_group_names
from octavo.errors import ConfigError

_TIMEOUT = datetime.timedelta(seconds=60)
# at NCCL's end torch ends the process, so what can say why comes first: a server's --step-timeout
_NCCL_TIMEOUT = datetime.timedelta(seconds=600)
_is_own = False  # the job that this process is in was made here


def open_store() -> TCPStore:
    """Where the processes meet, at a port that is free; of rank 0.

    Raises:
        ConfigError: this process is in a job already.
    """
    if dist.is_initialized() and _is_own:
        raise ConfigError(
            "this process has another LLM(tensor_parallel_size=...); close it first: llm.close(), or `with LLM(...) as "
            "llm`"
        )
    if dist.is_initialized():
        raise ConfigError(
            "this process is part of a torch.distributed job already, so it cannot start one; under torchrun, call "
            "octavo.parallel.parallelize on every rank and make an LLM of the model there"
        )
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def join(store: TCPStore, rank: int, size: int, device: torch.device) -> TensorGroup:
    """Become a rank; all of them come here."""
    global _is_own
    _is_own = True
    if device.type == "cuda":
        torch.cuda.set_device(device)
        limit = _NCCL_TIMEOUT
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return TensorGroup.of()


def future_group(rank: int, size: int) -> TensorGroup:
    """The group that join gives, before the ranks meet: a model can be cut, and not yet compute."""
    return TensorGroup(None, rank, size)


def new_host_group() -> Any:
    """A group of all ranks over gloo, for a thread with collectives of its own; all of them come here."""
    return dist.new_group(backend="gloo", timeout=_TIMEOUT)


def connect(port: int) -> TCPStore:
    """The store of rank 0."""
    return TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)


def launchers_store() -> Any:
    """torchrun's, for ranks that do not become a job."""
    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    return store


def leave() -> None:
    """Forget the job, whatever became of the others."""
    global _is_own
    _is_own = False
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # a rank was lost as they met
        forget_group_names()
