"""Every environment variable that octavo reads, one typed function each; no other module reads them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from octavo.errors import ConfigError

T = TypeVar("T")

_BOOLS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def force_reference() -> bool:
    """`OCTAVO_FORCE_REFERENCE`: run the torch reference instead of the Triton kernels on a GPU.

    Returns:
        False where the variable is unset.
    Raises:
        ConfigError: for anything but 1, true, yes, on, 0, false, no and off.
    """
    return _read("OCTAVO_FORCE_REFERENCE", _parse_bool, default=False)


def triton_cache_dir() -> Path:
    """Where Triton keeps compiled kernels: its own `TRITON_CACHE_DIR`, or .triton/cache under `TRITON_HOME` or home."""
    home = os.environ.get("TRITON_HOME", "").strip() or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR", "").strip() or Path(home, ".triton", "cache"))


def accelerate_precision() -> str:
    """`ACCELERATE_MIXED_PRECISION`: what accelerate's launcher was told; "" where it is unset."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "")


def huggingface_home() -> Path:
    """`HF_HOME`: where Hugging Face's libraries keep their files."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")


def torch_extensions_dir() -> Path | None:
    """`TORCH_EXTENSIONS_DIR`: where torch builds C++ extensions; None for its own default."""
    return _read("TORCH_EXTENSIONS_DIR", Path, default=None)


def api_key_from_env() -> str | None:
    """`OCTAVO_API_KEY`: the key that clients of `octavo serve` must send; None where it is unset."""
    return _read("OCTAVO_API_KEY", str, default=None)


def admin_key_from_env() -> str | None:
    """`OCTAVO_ADMIN_KEY`: the key of the server's /admin routes; None where it is unset."""
    return _read("OCTAVO_ADMIN_KEY", str, default=None)


class TorchrunPlace(NamedTuple):
    """Where torchrun has put this process: its rank, its rank on this host, how many there are, which try of which job
    it is.
    """

    rank: int
    local_rank: int
    world_size: int
    attempt: int = 0
    job: str = ""


def torchrun_place() -> TorchrunPlace | None:
    """`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `TORCHELASTIC_RESTART_COUNT`, `TORCHELASTIC_RUN_ID`, as torchrun sets them.

    Returns:
        None where no launcher has set them.
    Raises:
        ConfigError: some are missing, or no numbers.
    """
    values = [_read(name, _parse_count, default=None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if values[0] is None and values[2] is None:
        return None
    rank, local_rank, world_size = values
    if rank is None or local_rank is None or world_size is None:
        raise ConfigError(
            "a launcher must set RANK, LOCAL_RANK and WORLD_SIZE together, got "
            f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world_size}; start with torchrun, or unset them"
        )
    attempt = _read("TORCHELASTIC_RESTART_COUNT", _parse_count, default=0)
    return TorchrunPlace(rank, local_rank, world_size, attempt, _read("TORCHELASTIC_RUN_ID", str, default=""))


def visible_devices() -> list[str]:
    """`CUDA_VISIBLE_DEVICES`: the GPUs that CUDA shows, in its order; empty where it is unset."""
    return _read("CUDA_VISIBLE_DEVICES", lambda text: [name.strip() for name in text.split(",")], default=[])


def set_cublas_workspace() -> None:
    """`CUBLAS_WORKSPACE_CONFIG`, where it is unset: cuBLAS's sums then have one order, from its first use on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child, with changes."""
    return os.environ | changes


def _read(name: str, parse: Callable[[str], T], default: T) -> T:
    """The parsed value of a variable, read again at every call; unset and empty both mean the default."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name} {error}, got {text!r}") from None


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number")
    return int(text)


def _parse_bool(text: str) -> bool:
    if text.lower() not in _BOOLS:
        raise ValueError(f"must be one of {', '.join(_BOOLS)}")
    return _BOOLS[text.lower()]
