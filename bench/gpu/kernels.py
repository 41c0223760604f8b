"""Benchmark each fused kernel against torch eager, torch.compile and Liger, forward and backward.

    python bench/gpu/kernels.py [--rows 8192] [--width 4096] [--json FILE]
    python bench/gpu/kernels.py --smoke    on a CPU, tiny, without a compiler: shows that it runs

One process, versions in turn, the device idle before and after each call. Prints the median milliseconds of
forward and backward and how many times as long the best of the others takes (above 1: ours is faster). Ours
are the Triton kernels on a GPU; Liger's are there where liger-kernel is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.kernels import REFERENCE, Kernels
from mega_model.kernels.dispatch import choose_kernels, installed_version

TIMES = 20


def cases(
    rows: int, width: int, device: torch.device
) -> dict[str, tuple[Callable[[Kernels], Any], list[Tensor]]]:
    """Return for each entry the call and its inputs."""
    head, dtype = 128 if width >= 128 else width, torch.bfloat16

    def make_inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]

    cos, sin = (torch.rand(rows, head // 2, device=device) for _ in range(2))
    key = torch.arange(rows, device=device) * 7919
    target = torch.arange(rows // 4, device=device) % (8 * width)
    seen = torch.ones(64, 64, dtype=torch.bool, device=device).tril()
    x, wide, scores = (rows, width), (rows, 4 * width), (rows // 64, 8, 64, 64)

    def rotation(kernels: Kernels) -> Callable[[Tensor], Any]:
        return lambda qkv: kernels.apply_rotary_packed(qkv * 1, (width, width, width), head, cos, sin)

    def entropy(kernels: Kernels) -> Callable[[Tensor], Tensor]:
        return lambda logits: kernels.cross_entropy(logits.detach().clone(), target, Axis("tp"), 1.0)

    return {
        "rms_norm": (lambda k: lambda x, w: k.rms_norm(x, w, 1e-5), make_inputs(x, (width,))),
        "layer_norm": (
            lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-5),
            make_inputs(x, (width,), (width,)),
        ),
        "add_rms_norm": (
            lambda k: lambda x, r, w: k.add_rms_norm(x, r, w, 1e-5),
            make_inputs(x, x, (width,)),
        ),
        "bias_gelu": (lambda k: lambda x, b: k.bias_gelu(x, b, "tanh"), make_inputs(wide, (4 * width,))),
        "swiglu": (lambda k: k.swiglu, make_inputs((rows, 7 * width))),
        "apply_rotary_packed": (rotation, make_inputs((rows, 3 * width))),
        "masked_softmax": (lambda k: lambda x: k.masked_softmax(x, seen, 0.1), make_inputs(scores)),
        "cross_entropy": (entropy, make_inputs((rows // 4, 8 * width))),
        "dropout_add": (lambda k: lambda x, r: k.dropout_add(x, r, key, 0.1), make_inputs(x, x)),
    }  # fmt: skip


def run_once(function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Run forward and backward."""
    out = function(*inputs)
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
    if outs:
        torch.autograd.grad(outs, inputs, [torch.ones_like(y) for y in outs], allow_unused=True)


def milliseconds(function: Callable[..., Any], inputs: Sequence[Tensor], times: int) -> float:
    """Return the median of some calls, after three warm-up calls."""
    times_taken = []
    for number in range(times + 3):
        _wait()
        began = time.perf_counter()
        run_once(function, inputs)
        _wait()
        if number >= 3:
            times_taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times_taken)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --smoke shows on a CPU that this runs")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, width, times = (128, 32, 1) if args.smoke else (args.rows, args.width, TIMES)
    backend = "aot_eager" if args.smoke else "inductor"
    versions = {
        "ours": choose_kernels("auto", device).kernels,
        "eager": REFERENCE,
        "compile": choose_kernels("compile", device, backend=backend).kernels,
    }
    if device.type == "cuda" and installed_version("liger") is not None:
        versions["liger"] = choose_kernels("liger", device).kernels
    results = []
    print(f"{'':15}" + "".join(f"{name:>10}" for name in versions) + "     ratio")
    for name, (call, inputs) in cases(rows, width, device).items():
        its = {version: milliseconds(call(kernels), inputs, times) for version, kernels in versions.items()}
        ratio = min(value for version, value in its.items() if version != "ours") / its["ours"]
        results.append({"kernel": name, "milliseconds": its, "ratio": ratio})
        print(f"{name:15}" + "".join(f"{value:10.3f}" for value in its.values()) + f"{ratio:10.2f}")
    if args.json:
        report = {"rows": rows, "width": width, "torch": torch.__version__, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
