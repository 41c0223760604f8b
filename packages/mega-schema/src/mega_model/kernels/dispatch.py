"""Choose the version of each kernel that a model computes with, before it is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import torch

from mega_model.kernels import REFERENCE, batch_invariant, cpp, cpu_attention, third_party
from mega_model.kernels.interface import Kernels
from mega_model.kernels.numba import has_numba, load_kernels
from mega_model.matmul_precision import has_native
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

KernelsName = Literal["auto", "reference", "compile", "triton", "liger", "apex", "flash-attn"]

# the module that each name imports, and how to install it
PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "triton": ("triton", "pip install triton"),
        "liger": ("liger_kernel", "pip install liger-kernel"),
        "apex": ("apex", "build https://github.com/NVIDIA/apex; PyPI's package of that name is another"),
        "flash-attn": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    }
)
_THIRD_PARTY: Mapping[str, Callable[[], third_party.KernelOverrides]] = MappingProxyType(
    {"liger": third_party.liger, "apex": third_party.apex, "flash-attn": third_party.flash_attn}
)
_COMPILED = (
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "bias_gelu", "swiglu",
    "apply_rotary", "apply_rotary_packed", "masked_softmax",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The chosen kernels, and for each field of `Kernels` its source and the reason."""

    kernels: Kernels
    sources: Mapping[str, str]
    reasons: Mapping[str, str]

    @property
    def summary(self) -> str:
        """The sources, that of most fields first: "triton, reference (attention, linear)"."""
        fields_by_source: dict[str, list[str]] = {}
        for field, source in self.sources.items():
            fields_by_source.setdefault(source, []).append(field)
        first, *others = sorted(fields_by_source, key=lambda name: -len(fields_by_source[name]))
        return ", ".join([first, *(f"{name} ({', '.join(fields_by_source[name])})" for name in others)])


def installed_version(name: str) -> str | None:
    """Return the version of a package of `PACKAGES` or of any import; None if it is not installed."""
    module = PACKAGES[name][0] if name in PACKAGES else name
    if find_spec(module) is None:
        return None
    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return "of unknown version"


def choose_kernels(
    name: KernelsName, device: torch.device, *, where: str = "kernels", backend: str = "inductor"
) -> KernelChoice:
    """Choose kernels by name for a device.

    On a GPU, `auto` takes our Triton kernels, and flash-attn if it is installed. On a CPU it takes the
    reference with blockwise attention and, with a C++ compiler, the kernels of `cpp`. The name of a package
    selects its kernels, and ours for all other functions.

    Args:
        where: the flag or key that an error names.
        backend: torch.compile's.

    Raises:
        ConfigError: the requested package is not installed, or does not run on this device.
    """
    if name == "reference":
        return _reference_choice("requested")
    if name == "compile":
        return _override(_reference_choice("not compiled"), name, _compile(backend), "requested")
    if name != "auto":
        _check_available(name, device, where)
    if device.type == "cpu" and not _is_interpreting():
        return _cpu_choice()
    if installed_version("triton") is None:
        choice = _reference_choice("triton is not installed")
    else:
        from mega_model.kernels.triton import TRITON

        triton_kernels = {field.name: getattr(TRITON, field.name) for field in fields(Kernels)}
        choice = _override(
            _reference_choice(""), "triton", triton_kernels, "requested" if name == "triton" else "installed"
        )
    torch_kernels: third_party.KernelOverrides = {
        name: getattr(REFERENCE, name) for name in ("angles", "attention", "linear", "add_product")
    }
    choice = _override(choice, "reference", torch_kernels, "torch's own: cuBLAS, cuDNN, flash attention")
    package = "flash-attn" if name == "auto" else name
    if package in _THIRD_PARTY and installed_version(package) is not None:
        choice = _override(
            choice, package, _THIRD_PARTY[package](), "installed" if name == "auto" else "requested"
        )
    return choice


def choose_batch_invariant_kernels(device: torch.device, *, package: str) -> KernelChoice:
    """Choose the kernels of --batch-invariant; those of `auto` compute gradients.

    Args:
        package: whose extra `cpu` an error tells to install.

    Raises:
        ConfigError: the device is no CPU, or numba is not installed.
    """
    if device.type != "cpu":
        raise ConfigError(
            "--batch-invariant", "has kernels for CPUs only", found=device.type, wanted="--device cpu"
        )
    if not has_numba():
        hint = install_hint(package, "cpu")
        raise ConfigError("--batch-invariant", "needs numba, which is not installed", hint=hint)
    choice = choose_kernels("auto", device)
    kernels = batch_invariant.build_kernels(choice.kernels, load_kernels(package=package))
    names = [field.name for field in fields(Kernels)]
    changed = [name for name in names if getattr(kernels, name) is not getattr(choice.kernels, name)]
    overrides: Any = {name: getattr(kernels, name) for name in changed}
    return _override(choice, "batch-invariant", overrides, "requested")


def _reference_choice(reason: str) -> KernelChoice:
    names = [field.name for field in fields(Kernels)]
    return KernelChoice(REFERENCE, dict.fromkeys(names, "reference"), dict.fromkeys(names, reason))


def _cpu_choice() -> KernelChoice:
    choice = _reference_choice("the CPU kernels")
    if not has_native(torch.bfloat16):
        overrides = {"attention": cpu_attention.attention_in_float32}
        return _override(choice, "blocked", overrides, "in float32: this CPU has no products of bfloat16")
    choice = _override(
        choice, "blocked", {"attention": cpu_attention.attention}, "this CPU has products of bfloat16"
    )
    try:
        return _override(choice, "c++", cpp.build_overrides(), "compiled on this machine")
    except cpp.CompileError as error:
        reasons = dict.fromkeys(("add_product", "bias_gelu", "cross_entropy"), str(error))
        return replace(choice, reasons={**choice.reasons, **reasons})


def _check_available(name: str, device: torch.device, where: str) -> None:
    _, how_to_install = PACKAGES[name]
    if installed_version(name) is None:
        raise ConfigError(where, f"{name} is not installed", hint=f"{how_to_install}; or {where} auto")
    if device.type != "cuda" and not (name == "triton" and _is_interpreting()):
        raise ConfigError(
            where, "needs a GPU", found=f"{name} on {device.type}", wanted="cuda", hint=f"{where} auto"
        )


def _is_interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, slowly (its own variable TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _override(
    choice: KernelChoice, source: str, overrides: third_party.KernelOverrides, reason: str
) -> KernelChoice:
    kernels: Mapping[str, Any] = overrides
    return KernelChoice(
        replace(choice.kernels, **kernels),
        {**choice.sources, **dict.fromkeys(overrides, source)},
        {**choice.reasons, **dict.fromkeys(overrides, reason)},
    )


def _compile(backend: str) -> third_party.KernelOverrides:
    """Compile the kernels between a block's products and collectives with torch.compile.

    Products and collectives are custom autograd functions, at which torch.compile ends a graph.
    """
    return {field: torch.compile(getattr(REFERENCE, field), backend=backend) for field in _COMPILED}
