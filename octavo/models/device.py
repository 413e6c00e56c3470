"""Which device a name means, and whether this machine has it: asked before a model is loaded there."""

import torch

from octavo.errors import BackendError, ConfigError


def check_device(device: torch.device | str | None, what: str = "device") -> torch.device:
    """The device of that name, where this machine has it.

    Args:
        device: None is the CPU, as in torch.
        what: for the error: the argument or key that the name was given by.
    Raises:
        ConfigError: not the name of a device that octavo runs on.
        BackendError: this machine has no such device.
    """
    try:
        found = torch.device("cpu" if device is None else device)
    except RuntimeError:  # torch's word for a name that it does not know
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f"{what} must be 'cpu', 'cuda' or 'cuda:N', got {str(device)!r}")
    if found.type == "cuda" and not (torch.cuda.is_available() and (found.index or 0) < torch.cuda.device_count()):
        raise BackendError(f"there is no device {str(device)!r} here; leave {what} out to take what there is")
    return found
