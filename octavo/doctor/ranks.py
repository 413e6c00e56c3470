"""`octavo doctor --ranks`: whether ranks run the same, where they are, and how fast they reach each other."""

import torch

from octavo.distributed.agreement import check_agreement, describe_process
from octavo.distributed.links import describe_places, measure_links
from octavo.distributed.mesh import Mesh
from octavo.distributed.symmetric import workspace_of
from octavo.doctor.machine import Check
from octavo.errors import ConfigError

_BYTES = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}


def check_ranks(mesh: Mesh) -> list[Check]:
    """What a job of these ranks would meet; every rank must ask, and gets the same answers."""
    places = describe_places(mesh)
    checks = [Check(f"rank {rank}", "ok", place) for rank, place in enumerate(places)]
    if len(set(places)) < len(places) and mesh.device.type == "cuda":
        checks.append(Check("GPUs", "fail", "two ranks share a GPU; start one rank a GPU"))
    try:
        check_agreement(describe_process())
        checks.append(Check("versions", "ok", "the same on all ranks"))
    except ConfigError as error:
        checks.append(Check("versions", "fail", str(error)))
    if mesh.device.type == "cuda":
        checks += [_check_peers(mesh), _check_symmetric_memory(mesh)]
    for speed in measure_links(mesh, _BYTES[mesh.device.type]):
        text = f"{speed.num_bytes / 2**20:.0f} MiB in {speed.seconds * 1e3:.2f} ms, {speed.gib_per_s:.1f} GiB/s"
        wrong = "; wrong values arrived: look at the driver, the links and NCCL_* variables"
        checks.append(Check(speed.name, "ok" if speed.is_right else "fail", text + ("" if speed.is_right else wrong)))
    return checks


def _check_peers(mesh: Mesh) -> Check:
    """Whether GPUs of one host reach each other's memory."""
    here = range(torch.cuda.device_count())
    lacking = [f"{a} and {b}" for a in here for b in here if a < b and not torch.cuda.can_device_access_peer(a, b)]
    everywhere = [pair for of_rank in mesh.gather_objects(lacking) for pair in of_rank]
    if everywhere:
        return Check("peer access", "note", f"GPUs {everywhere[0]} reach each other through host memory only: slow")
    return Check("peer access", "ok", "GPUs of a host reach each other's memory")


def _check_symmetric_memory(mesh: Mesh) -> Check:
    """Whether FP8 all-reduces go through the ranks' memory."""
    found = workspace_of(None, mesh.device, 1)
    if isinstance(found, str):
        return Check("symmetric memory", "note", f"FP8 all-reduces use NCCL: {found}")
    return Check("symmetric memory", "ok", "FP8 all-reduces write into each other's memory")
