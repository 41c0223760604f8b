"""Check this machine: its devices, the kernels that training would use and why, and each kernel's results."""

from __future__ import annotations

import os
import platform
import shutil
import time
from types import MappingProxyType
from typing import Any

import torch

from mega_model.fp8 import unsupported_reason
from mega_model.kernels.dispatch import PACKAGES, choose_kernels, installed_version
from mega_model.kernels.verify import KernelCheck, check_fp8, check_kernels
from mega_model.matmul_precision import matmul_dtype
from mega_train.config.training import DeviceName, KernelsName
from mega_train.optim.factory import check_adamw, choose_adamw

# reported if installed, but not used
_UNUSED_PACKAGES = MappingProxyType(
    {"transformer_engine": "not needed: FP8 is over torch's own products", "torchao": "not used"}
)


def collect_report(kernels: KernelsName, device: DeviceName) -> dict[str, Any]:
    """Collect the report as JSON values.

    Raises:
        ConfigError: the requested kernels are not available.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    start_time = time.perf_counter()
    torch_device = torch.device(device)
    kernel_choice = choose_kernels(kernels, torch_device, where="--kernels")
    adamw_choice = choose_adamw(kernels, torch_device)
    results = [
        _result_to_dict(result, str(dtype).removeprefix("torch."))
        for dtype in (torch.float32, torch.bfloat16)
        for result in check_kernels(kernel_choice.kernels, torch_device, dtype)
    ]
    results.append(_result_to_dict(check_adamw(adamw_choice.optimizer_class, torch_device), "float32"))
    kernels_taken = {
        name: {"whose": source, "why": kernel_choice.reasons[name]}
        for name, source in kernel_choice.sources.items()
    }
    kernels_taken["adamw"] = {"whose": adamw_choice.source, "why": adamw_choice.reason}
    kernels_taken["fp8"] = {
        "whose": "torch",
        "why": "--fp8-format, slower than bfloat16" if device == "cpu" else "--fp8-format",
    }
    if missing_feature := unsupported_reason(torch_device):
        kernels_taken["fp8"] = {"whose": "none", "why": f"{missing_feature} has no such products"}
    else:
        results.append(_result_to_dict(check_fp8(torch_device), "bfloat16"))
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "devices": _list_devices(),
        "c_compiler": c_compiler(),
        "packages": {name: installed_version(name) for name in (*PACKAGES, *_UNUSED_PACKAGES)},
        "device": device,
        "kernels": kernels_taken,
        "tests": results,
        "seconds": round(time.perf_counter() - start_time, 2),
        "healthy": all(result["ok"] for result in results),
    }


def c_compiler() -> str | None:
    """Find the C compiler that Triton uses: $CC, else gcc, else clang (triton/runtime/build.py).

    Triton compiles the launcher of each kernel with it when a run on a GPU starts. Returns None if there is
    none.
    """
    from_environment = os.environ.get("CC")
    return (
        shutil.which(from_environment)
        if from_environment is not None
        else shutil.which("gcc") or shutil.which("clang")
    )


def _describe_compiler(path: str | None) -> str:
    if path is not None:
        return path
    from_environment = os.environ.get("CC")
    unset = "neither gcc nor clang is on PATH and CC is unset"
    cause = unset if from_environment is None else f"CC={from_environment} is not a program"
    return f"none: {cause}; Triton's kernels on a GPU need one; hint: apt-get install gcc libc6-dev"


def _result_to_dict(result: KernelCheck, dtype: str) -> dict[str, Any]:
    return {
        "kernel": result.name,
        "dtype": dtype,
        "seconds": round(result.seconds, 4),
        "error": round(result.error, 3) if result.error < float("inf") else None,
        "failure": result.failure,
        "ok": result.ok,
    }


def _list_devices() -> list[str]:
    has_bfloat16 = matmul_dtype(torch.empty(0, dtype=torch.bfloat16)) == torch.bfloat16
    half = "bfloat16 in hardware" if has_bfloat16 else "no bfloat16 in hardware, computed in float32"
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    devices = [f"cpu: {platform.machine()}, {cores}, {half}"]
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        devices.append(f"cuda:{number}: {properties.name}, {memory}, CUDA {torch.version.cuda}")
    return devices


def format_report(report: dict[str, Any]) -> str:
    """Format the report as text."""
    lines = [f"torch {report['torch']}, Python {report['python']}", *report["devices"], ""]
    for name, entry in report["packages"].items():
        note = f" ({_UNUSED_PACKAGES[name]})" if name in _UNUSED_PACKAGES else ""
        lines.append(f"{name:20} {entry or 'not installed'}{note}")
    lines.append(f"{'C compiler':20} {_describe_compiler(report['c_compiler'])}")
    lines += ["", f"kernels of a run on {report['device']}:"]
    tests: dict[str, list[dict[str, Any]]] = {}
    for result in report["tests"]:
        tests.setdefault(result["kernel"], []).append(result)
    for name, entry in report["kernels"].items():
        failed = [test for test in tests.get(name, ()) if not test["ok"]]
        state = "; ".join(f"{test['dtype']}: {test['failure'] or 'wrong'}" for test in failed) or (
            "ok" if name in tests else "-"
        )
        lines.append(f"  {name:16} {entry['whose']:12} {state:6} {entry['why']}")
    verdict = (
        "every kernel matches its reference"
        if report["healthy"]
        else "not every kernel matches its reference"
    )
    return "\n".join([*lines, "", f"{verdict}; {report['seconds']:.1f} s"])
