"""What this machine has for training, whose kernels a run would take, and whether they are right."""

from __future__ import annotations

import os
import platform
import shutil
import time
from types import MappingProxyType
from typing import Any, Literal

import torch

from mega_model.fp8 import why_unsupported
from mega_model.kernels.dispatch import PACKAGES, choose_kernels, installed_version
from mega_model.kernels.verify import KernelCheck, check_fp8, check_kernels
from mega_model.matmul_precision import matmul_dtype
from mega_train.config.training import Kernels
from mega_train.optim.factory import adam, checked_adam

# found and told of; nothing here uses them
_ALSO = MappingProxyType(
    {"transformer_engine": "not needed: FP8 is over torch's own products", "torchao": "not used"}
)


def examined(kernels: Kernels, device: Literal["auto", "cpu", "cuda"]) -> dict[str, Any]:
    """Everything there is to say, as JSON has it.

    Raises:
        ConfigError: the kernels asked for cannot be had.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    began, where = time.perf_counter(), torch.device(device)
    choice = choose_kernels(kernels, where)
    adamw = adam(kernels, where)
    results = [
        _result(result, str(dtype).removeprefix("torch."))
        for dtype in (torch.float32, torch.bfloat16)
        for result in check_kernels(choice.kernels, where, dtype)
    ]
    results.append(_result(checked_adam(adamw.kind, where), "float32"))
    taken = {name: {"whose": whose, "why": choice.reasons[name]} for name, whose in choice.sources.items()}
    taken["adamw"] = {"whose": adamw.whose, "why": adamw.why}
    taken["fp8"] = {"whose": "torch", "why": "--fp8-format" + ", slower than bfloat16" * (device == "cpu")}
    if lacking := why_unsupported(where):
        taken["fp8"] = {"whose": "none", "why": f"{lacking} has no such products"}
    else:
        results.append(_result(check_fp8(where), "bfloat16"))
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "devices": _devices(),
        "c_compiler": c_compiler(),
        "packages": {name: installed_version(name) for name in (*PACKAGES, *_ALSO)},
        "device": device,
        "kernels": taken,
        "tests": results,
        "seconds": round(time.perf_counter() - began, 2),
        "healthy": all(result["ok"] for result in results),
    }


def c_compiler() -> str | None:
    """The path of the C compiler that Triton takes: $CC, else gcc, else clang (triton/runtime/build.py).

    Triton compiles the launcher of each kernel with it when a run on a GPU begins. None where there is none.
    """
    named = os.environ.get("CC")
    return shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang")


def _describe_compiler(path: str | None) -> str:
    if path is not None:
        return path
    named = os.environ.get("CC")
    unset = "neither gcc nor clang is on PATH and CC is unset"
    cause = unset if named is None else f"CC={named} is no program"
    return f"none: {cause}; Triton's kernels on a GPU need one; hint: apt-get install gcc libc6-dev"


def _result(result: KernelCheck, dtype: str) -> dict[str, Any]:
    return {
        "kernel": result.name,
        "dtype": dtype,
        "seconds": round(result.seconds, 4),
        "error": round(result.error, 3) if result.error < float("inf") else None,
        "failure": result.failure,
        "ok": result.ok,
    }


def _devices() -> list[str]:
    own = matmul_dtype(torch.empty(0, dtype=torch.bfloat16)) == torch.bfloat16
    half = "bfloat16 in hardware" if own else "no bfloat16 in hardware, computed in float32"
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    devices = [f"cpu: {platform.machine()}, {cores}, {half}"]
    for number in range(torch.cuda.device_count()):
        its = torch.cuda.get_device_properties(number)
        memory = f"{its.total_memory / 2**30:.0f} GiB"
        devices.append(f"cuda:{number}: {its.name}, {memory}, CUDA {torch.version.cuda}")
    return devices


def told(found: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"torch {found['torch']}, Python {found['python']}", *found["devices"], ""]
    for name, its in found["packages"].items():
        note = f" ({_ALSO[name]})" if name in _ALSO else ""
        lines.append(f"{name:20} {its or 'not installed'}{note}")
    lines.append(f"{'C compiler':20} {_describe_compiler(found['c_compiler'])}")
    lines += ["", f"on {found['device']} a run takes:"]
    tests: dict[str, list[dict[str, Any]]] = {}
    for result in found["tests"]:
        tests.setdefault(result["kernel"], []).append(result)
    for name, its in found["kernels"].items():
        failed = [one for one in tests.get(name, ()) if not one["ok"]]
        state = "; ".join(f"{one['dtype']}: {one['failure'] or 'wrong'}" for one in failed) or (
            "ok" if name in tests else "-"
        )
        lines.append(f"  {name:16} {its['whose']:12} {state:6} {its['why']}")
    verdict = "every kernel is its definition" if found["healthy"] else "not every kernel is its definition"
    return "\n".join([*lines, "", f"{verdict}; {found['seconds']:.1f} s"])
