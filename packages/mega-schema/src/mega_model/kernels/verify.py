"""Check kernels against the reference on their device: outputs and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mega_model.distributed.mesh import Axis
from mega_model.fp8 import E4M3, E5M2, column_linear, quantize
from mega_model.kernels import REFERENCE, Kernels
from mega_model.weight_gradients import WeightGradients
from mega_schema.fp8_recipe import Fp8Recipe

_T = 64  # tokens
_N = 4  # query heads
_K = 2  # key heads
_H = 16  # width of a head
_D = 96  # hidden
_V = 501  # vocabulary
_TOLERANCE_EPS = 16.0  # allowed roundings of the largest number; times the tokens for a sum over them


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The result of checking one kernel.

    Attributes:
        seconds: of a first call, forward and backward, which may compile.
        error: the largest error, relative to what rounding explains.
        failure: the exception it raised; "" if none.
    """

    name: str
    seconds: float
    error: float
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= 1


def check_kernels(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCheck]:
    """Check every kernel of a record against the reference in float64 on the CPU."""
    for field in fields(Kernels):
        call, inputs = _case(field.name, device, dtype)
        start = time.perf_counter()
        try:
            outputs = _run_with_gradients(call(kernels), inputs)
            seconds = time.perf_counter() - start
        except Exception as error:  # any exception is reported as the kernel's failure
            failure = f"{type(error).__name__}: {error}"
            yield KernelCheck(field.name, time.perf_counter() - start, float("inf"), failure)
            continue
        cpu_call, _ = _case(field.name, torch.device("cpu"), torch.float64)
        wanted = _run_with_gradients(cpu_call(REFERENCE), [x.cpu().double() for x in inputs])
        worst = max(_error(a, b, dtype) for a, b in zip(outputs, wanted, strict=True))
        yield KernelCheck(field.name, seconds, worst)


def check_fp8(device: torch.device) -> KernelCheck:
    """Check a layer's three FP8 products against the same quantized factors in float64 on the CPU."""
    x, weight, grad = (
        _numbers(shape, i).to(device, torch.bfloat16)
        for i, shape in enumerate(((_T + 8, _D), (2 * _D, _D), (_T + 8, 2 * _D)))
    )
    main = torch.zeros(weight.shape, device=device)
    gradients = WeightGradients()
    parameter = nn.Parameter(weight)
    start = time.perf_counter()
    gradients.register_main_grad(parameter, lambda: main)
    x.requires_grad_()
    try:
        y = column_linear(x, parameter, Axis("tp"), gradients, Fp8Recipe("hybrid"))
        (grad_x,) = torch.autograd.grad(y, x, grad)
        outputs = [output.detach().cpu() for output in (y, grad_x, main)]
    except Exception as error:  # as above
        failure = f"{type(error).__name__}: {error}"
        return KernelCheck("fp8", time.perf_counter() - start, float("inf"), failure)
    seconds = time.perf_counter() - start
    x_64, weight_64, grad_64 = (
        values.double() * scale.double()
        for values, scale in (
            quantize(factor.detach().cpu(), dtype)
            for factor, dtype in ((x, E4M3), (weight, E4M3), (grad, E5M2))
        )
    )
    wanted = (x_64 @ weight_64.t(), grad_64 @ weight_64, grad_64.t() @ x_64)
    worst = max(_error(a, b, torch.bfloat16) for a, b in zip(outputs, wanted, strict=True))
    return KernelCheck("fp8", seconds, worst)


def _error(output: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    summed = _T if output.dim() == 1 else 1
    allowed = _TOLERANCE_EPS * torch.finfo(dtype).eps * summed * max(1.0, float(wanted.abs().max()))
    error = float((output.detach().cpu().double() - wanted.double()).abs().max()) / allowed
    return error if error == error else float("inf")


def _run_with_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*(x * 1 for x in leaves))  # x * 1 copies: kernels may overwrite their inputs
    outputs = output if isinstance(output, tuple) else (output,)
    total = sum((y * _numbers(y.shape, i + 7).to(y)).sum() for i, y in enumerate(outputs) if y.requires_grad)
    grads = torch.autograd.grad(total, leaves) if isinstance(total, Tensor) else ()
    return [y.detach() for y in outputs] + list(grads)


def _numbers(shape: torch.Size | tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _case(
    name: str, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[Kernels], Callable[..., Any]], list[Tensor]]:
    """Return a function that calls a kernel of a record, and its inputs."""

    def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [_numbers(shape, i).to(device, dtype) for i, shape in enumerate(shapes)]

    angle = _numbers((_T, _H // 2), 20)
    angles = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (x.bfloat16().to(device, angles) for x in (angle.cos(), angle.sin()))
    key = torch.randint(-(1 << 62), 1 << 62, (_T,), generator=torch.Generator().manual_seed(4)).to(device)
    target = torch.randint(0, _V, (_T,), generator=torch.Generator().manual_seed(5)).to(device)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    widths = (_N * _H, _K * _H, _K * _H)

    cases: dict[str, tuple[Callable[[Kernels], Callable[..., Any]], list[Tensor]]] = {
        "rms_norm": (lambda k: lambda x, w: k.rms_norm(x, w, 1e-5), random_tensors((_T, _D), (_D,))),
        "layer_norm": (
            lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-5),
            random_tensors((_T, _D), (_D,), (_D,)),
        ),
        "add_rms_norm": (
            lambda k: lambda x, r, w: k.add_rms_norm(x, r, w, 1e-5),
            random_tensors((_T, _D), (_T, _D), (_D,)),
        ),
        "add_layer_norm": (
            lambda k: lambda x, r, w, b: k.add_layer_norm(x, r, w, b, 1e-5),
            random_tensors((_T, _D), (_T, _D), (_D,), (_D,)),
        ),
        "bias_gelu": (lambda k: lambda x, b: k.bias_gelu(x, b, "tanh"), random_tensors((_T, _D), (_D,))),
        "swiglu": (lambda k: k.swiglu, random_tensors((_T, 2 * _D))),
        "angles": (
            lambda k: lambda p, f: k.angles(p.detach().float(), f.detach().float()),
            random_tensors((_T,), (_D,)),
        ),
        "apply_rotary": (lambda k: lambda x: k.apply_rotary(x, cos, sin), random_tensors((_T, _N, _H))),
        "apply_rotary_packed": (
            lambda k: lambda x: k.apply_rotary_packed(x, widths, _H, cos, sin),
            random_tensors((_T, sum(widths))),
        ),
        "masked_softmax": (
            lambda k: lambda x: k.masked_softmax(x, mask, 0.25),
            random_tensors((2, _N, 8, 8)),
        ),
        "attention": (
            lambda k: lambda q, k_, v: k.attention(q, k_, v, "before"),
            random_tensors((2, _N, 32, _H), (2, _K, 32, _H), (2, _K, 32, _H)),
        ),
        "cross_entropy": (lambda k: partial(_cross_entropy, k, target), random_tensors((_T, _V))),
        "dropout_add": (
            lambda k: lambda x, r: k.dropout_add(x, r, key, 0.25),
            random_tensors((_T, _D), (_T, _D)),
        ),
        "linear": (
            lambda k: partial(_linear, k),
            random_tensors((2 * _D, 2 * _D), (2 * _D, 2 * _D), (2 * _D,), (2 * _D, 2 * _D)),
        ),
        "add_product": (lambda k: partial(_add_product, k), random_tensors((_T, _D), (_T, 2 * _D))),
    }
    return cases[name]


def _cross_entropy(kernels: Kernels, target: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    work = logits.detach().clone()
    return kernels.cross_entropy(work, target, Axis("tp"), 1.0), work


def _add_product(kernels: Kernels, grad: Tensor, x: Tensor) -> Tensor:
    main_dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    main = torch.ones(_D, 2 * _D, dtype=main_dtype, device=grad.device)
    kernels.add_product(main, grad.detach(), x.detach(), first=False, rounded=False)
    return main


def _linear(kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, bias, grad = (tensor.detach() for tensor in (x, weight, bias, grad))
    return kernels.linear(x, weight, bias), kernels.linear(grad, weight.t())
