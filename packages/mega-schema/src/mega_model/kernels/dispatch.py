"""Which version of each kernel a model computes with: chosen once, before it is built, for a reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import torch

from mega_model.kernels import REFERENCE, cpp, cpu_attention, third_party
from mega_model.kernels.interface import Kernels
from mega_model.matmul_precision import native
from mega_schema.errors import ConfigError

Name = Literal["auto", "reference", "compile", "triton", "liger", "apex", "flash-attn"]

# what a name imports, and how one gets it
PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "triton": ("triton", "pip install triton"),
        "liger": ("liger_kernel", "pip install liger-kernel"),
        "apex": ("apex", "build https://github.com/NVIDIA/apex; PyPI's package of that name is another"),
        "flash-attn": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    }
)
_PARTS: Mapping[str, Callable[[], third_party.Part]] = MappingProxyType(
    {"liger": third_party.liger, "apex": third_party.apex, "flash-attn": third_party.flash_attn}
)
_COMPILED = (
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "bias_gelu", "swiglu", "rotate",
    "rotate_packed", "masked_softmax",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels, and of each field of the record whose it is and why."""

    kernels: Kernels
    whose: Mapping[str, str]
    why: Mapping[str, str]

    @property
    def summary(self) -> str:
        """Whose they are, most first: "triton, reference (attention, linear, add_product)"."""
        by: dict[str, list[str]] = {}
        for field, its in self.whose.items():
            by.setdefault(its, []).append(field)
        first, *rest = sorted(by, key=lambda name: -len(by[name]))
        return ", ".join([first, *(f"{name} ({', '.join(by[name])})" for name in rest)])


def found(name: str) -> str | None:
    """The version of a package of `PACKAGES` or of any other import; None where it is not installed."""
    module = PACKAGES[name][0] if name in PACKAGES else name
    if find_spec(module) is None:
        return None
    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return "of unknown version"


def choose(name: Name, device: torch.device, *, backend: str = "inductor") -> Choice:
    """The kernels that --kernels names, for a device.

    `auto` takes on a GPU ours in Triton, and flash-attn where it is installed; on a CPU the definitions, but
    attention in blocks, and where a compiler is there what `cpp.part` has. The name of a
    package takes what that has, and ours for the rest.

    Args:
        backend: torch.compile's.

    Raises:
        ConfigError: what is asked for is not installed, or does not run on this device.
    """
    if name == "reference":
        return _definitions("asked for")
    if name == "compile":
        return _with(_definitions("not compiled"), name, _compiled(backend), "asked for")
    if name != "auto":
        _check(name, device)
    if device.type == "cpu" and not _interpreting():
        return _on_a_cpu()
    if found("triton") is None:
        chosen = _definitions("triton is not installed")
    else:
        from mega_model.kernels.fused import TRITON

        ours = {field.name: getattr(TRITON, field.name) for field in fields(Kernels)}
        chosen = _with(_definitions(""), "triton", ours, "asked for" if name == "triton" else "installed")
    torchs: third_party.Part = {
        name: getattr(REFERENCE, name) for name in ("attention", "linear", "add_product")
    }
    chosen = _with(chosen, "reference", torchs, "torch's own: cuBLAS, cuDNN, flash or what it has")
    part = "flash-attn" if name == "auto" else name
    if part in _PARTS and found(part) is not None:
        chosen = _with(chosen, part, _PARTS[part](), "installed" if name == "auto" else "asked for")
    return chosen


def _definitions(why: str) -> Choice:
    names = [field.name for field in fields(Kernels)]
    return Choice(REFERENCE, dict.fromkeys(names, "reference"), dict.fromkeys(names, why))


def _on_a_cpu() -> Choice:
    chosen = _definitions("what a CPU computes")
    if not native(torch.bfloat16):
        part = {"attention": cpu_attention.attention_in_float32}
        return _with(chosen, "blocked", part, "in float32: this CPU has no products of bfloat16")
    chosen = _with(
        chosen, "blocked", {"attention": cpu_attention.attention}, "this CPU has products of bfloat16"
    )
    try:
        return _with(chosen, "c++", cpp.part(), "compiled on this machine")
    except cpp.NotCompiled as error:
        why = dict.fromkeys(("add_product", "bias_gelu", "cross_entropy"), str(error))
        return replace(chosen, why={**chosen.why, **why})


def _check(name: str, device: torch.device) -> None:
    _, get = PACKAGES[name]
    if found(name) is None:
        raise ConfigError("--kernels", f"{name} is not installed", hint=f"{get}; or --kernels auto")
    if device.type != "cuda" and not (name == "triton" and _interpreting()):
        raise ConfigError(
            "--kernels", "needs a GPU", found=f"{name} on {device.type}", wanted="cuda", hint="--kernels auto"
        )


def _interpreting() -> bool:
    """Whether Triton runs kernels on the CPU, slowly; it says so itself, by its own variable."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _with(choice: Choice, whose: str, part: third_party.Part, why: str) -> Choice:
    versions: Mapping[str, Any] = part
    return Choice(
        replace(choice.kernels, **versions),
        {**choice.whose, **dict.fromkeys(part, whose)},
        {**choice.why, **dict.fromkeys(part, why)},
    )


def _compiled(backend: str) -> third_party.Part:
    """What lies between a block's products and exchanges. These are autograd functions of ours, at which
    torch.compile would end a graph: what is left of a block to compile is what lies between them.
    """
    return {field: torch.compile(getattr(REFERENCE, field), backend=backend) for field in _COMPILED}
