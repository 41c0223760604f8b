"""Checks of the engine's options that need neither torch nor the device.

The command makes them before it opens its port, so that a mistake is answered by one line at once. The engine
makes those on which its own arithmetic depends again.
"""

from __future__ import annotations

import re
from pathlib import Path

from mega_schema.checkpoint.checkpoint_dir import MANIFEST
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.spec import ModelSpec

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def check_device(device: str, dtype: str) -> None:
    """Refuse the name of no device, and a dtype that the device has no products for.

    Raises:
        ConfigError: one of the two.
    """
    if not _DEVICE.fullmatch(device):
        wanted = "auto | cpu | cuda | cuda:N"
        raise ConfigError("--device", "no such device", found=device, wanted=wanted, hint="--device cpu")
    if dtype == "int8" and device.startswith("cuda"):
        what = "int8 weights are for CPUs"
        raise ConfigError("--dtype", what, found=f"--device {device}", hint="--dtype bfloat16")


def check_layout(spec: ModelSpec, tp: int, pp: int) -> None:
    """Refuse a layout that the model cannot be split over.

    Raises:
        LayoutError: a head, a key head or a layer would be split.
    """
    sizes = (
        ("--tp", tp, "attention heads", spec.heads),
        ("--tp", tp, "key and value heads", spec.kv_heads),
        ("--pp", pp, "layers", spec.layers),
    )
    for flag, degree, name, size in sizes:
        if degree < 1 or size % degree:
            divisors = " | ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            what = f"does not divide the model's {size} {name}"
            raise LayoutError(flag, what, found=degree, wanted=divisors)


def check_follow(follow: bool, ranks: int, load: Path) -> None:
    """Refuse to follow a training run with several ranks, and one checkpoint, which has no newer ones.

    Each rank would see a new checkpoint at its own time.

    Raises:
        ConfigError: the options are asked for together.
    """
    if not follow:
        return
    if ranks > 1:
        hint = "remove --follow, or --tp and --pp"
        raise ConfigError("--follow", "works with one process only", found=f"{ranks} ranks", hint=hint)
    if (load / MANIFEST).is_file():
        what = "needs the folder of a run"
        hint = f"--load {load.resolve().parent}"
        raise ConfigError("--follow", what, found=f"one checkpoint, {load}", hint=hint)


def check_context_length(asked: int | None, context: int) -> int:
    """Return the longest sequence in tokens: `asked`, or the model's context.

    Raises:
        ConfigError: `asked` is longer than the context.
    """
    if asked is not None and asked > context:
        what = "is longer than the model's context"
        wanted = f"at most {context}"
        raise ConfigError(
            "--max-model-len", what, found=asked, wanted=wanted, hint=f"--max-model-len {context}"
        )
    return context if asked is None else asked
