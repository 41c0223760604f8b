"""Resolve the name of a device, and check that this machine has it."""

from __future__ import annotations

import torch

from mega_schema.errors import ConfigError

AUTO = "auto"


def resolve_device(name: str, *, where: str = "device") -> torch.device:
    """Return the device of this name: `auto` is the first GPU, or the CPU on a machine without one.

    Args:
        where: the flag or key that an error names.

    Raises:
        ConfigError: torch knows no such device, or this machine does not have it.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # torch raises AssertionError if it was built without CUDA
        raise ConfigError(
            where, "not a device of this machine", found=name, wanted=_list_devices(), hint=f"{where} cpu"
        ) from None
    return device


def _list_devices() -> str:
    """Return the names that this machine accepts, for an error."""
    gpus = torch.cuda.device_count()
    more = f" | cuda | cuda:0 to cuda:{gpus - 1}" if gpus else ": this machine has no GPU that torch can use"
    return f"{AUTO} | cpu{more}"
