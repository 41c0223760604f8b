"""C++ kernels for CPUs with AVX-512 bfloat16 products.

Each takes contiguous rows of bfloat16 or float32 (`linear`: float32 only). Other inputs go to the reference,
or for attention to `cpu_attention`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mega_model.kernels import cpu_attention, products, reference
from mega_model.kernels.cpp.library import load_kernels
from mega_model.kernels.interface import Visible
from mega_model.kernels.third_party import KernelOverrides
from mega_schema.cpp_library import CompileError, cpu_vendor

__all__ = ["CompileError", "build_overrides"]

_SUFFIXES = MappingProxyType(
    {torch.bfloat16: "bf16", torch.float32: "f32"}
)  # of the exported functions' names
_MIN_SIDE = 128  # minimum tokens and sides of a weight; for smaller ones packing costs more than it saves


def build_overrides() -> KernelOverrides:
    """Return the kernels written in C++, by their field in `Kernels`.

    `linear` is for AMD's CPUs only: on Intel's, torch's MKL product may be faster. `add_product` is for all:
    torch has no CPU product of bfloat16 factors with a float32 result.

    Raises:
        CompileError: they cannot be compiled on this machine.
    """
    load_kernels()
    overrides: dict[str, Any] = {
        "add_product": add_product,
        "attention": attention,
        "bias_gelu": bias_gelu,
        "cross_entropy": partial(reference.cross_entropy, softmax_=softmax_),
    }
    return {**overrides, "linear": linear} if cpu_vendor() == "AuthenticAMD" else overrides


def add_product(main_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, first: bool, rounded: bool) -> None:
    """Add a weight gradient to float32, as `products.add_product`."""
    if grad_TO.dtype not in _SUFFIXES or main_OI.stride(1) != 1 or not len(grad_TO):
        products.add_product(main_OI, grad_TO, x_TI, first=first, rounded=rounded)
        return
    tokens, out = grad_TO.shape
    width = x_TI.shape[1]
    matrices = main_OI, _dense_rows(grad_TO), _dense_rows(x_TI)
    layout = [value for x in matrices for value in (_pointer(x), x.stride(0))]
    name = f"mega_add_weight_gradient_{_SUFFIXES[grad_TO.dtype]}"
    _call(name, *layout, tokens, out, width, first, rounded)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute a float32 linear layer, as `products.linear`.

    Other dtypes and small sizes go there, where torch is faster.
    """
    inputs = (x_TI, weight_OI) if bias_O is None else (x_TI, weight_OI, bias_O)
    is_supported = all(x.dtype == torch.float32 for x in inputs) and 1 in weight_OI.stride()
    # torch raises the error for shapes that do not match
    if not is_supported or x_TI.dim() != 2 or x_TI.shape[1] != weight_OI.shape[1]:
        return products.linear(x_TI, weight_OI, bias_O)
    tokens, width = x_TI.shape
    out = weight_OI.shape[0]
    if min(tokens, width, out) < _MIN_SIDE:
        return products.linear(x_TI, weight_OI, bias_O)
    x_TI = _dense_rows(x_TI)
    transposed = weight_OI.stride(1) != 1
    y_TO = x_TI.new_empty(tokens, out) if bias_O is None else bias_O.expand(tokens, out).contiguous()
    layout = (
        _pointer(y_TO),
        out,
        _pointer(x_TI),
        x_TI.stride(0),
        _pointer(weight_OI),
        weight_OI.stride(int(transposed)),
    )
    _call("mega_linear_f32", *layout, tokens, out, width, bias_O is None, transposed)
    return y_TO


def bias_gelu(x_TF: Tensor, bias_F: Tensor | None, approximate: Literal["none", "tanh"]) -> Tensor:
    """Add the bias and apply GELU, as `reference.bias_gelu`."""
    if x_TF.dtype not in _SUFFIXES or approximate != "tanh":
        return reference.bias_gelu(x_TF, bias_F, approximate)
    out: Tensor = _Gelu.apply(x_TF, bias_F)
    return out


def softmax_(logits_CV: Tensor, scale: float) -> Tensor:
    """Compute log Σ exp(z) and the softmax in place, as `reference.softmax_`."""
    if logits_CV.dtype not in _SUFFIXES or logits_CV.stride(1) != 1:
        return reference.softmax_(logits_CV, scale)
    log_C = torch.empty(len(logits_CV))
    _call(
        f"mega_softmax_{_SUFFIXES[logits_CV.dtype]}",
        _pointer(logits_CV),
        logits_CV.stride(0),
        *logits_CV.shape,
        float(scale),
        _pointer(log_C),
    )
    return log_C


def attention(q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible) -> Tensor:
    """Compute attention, as `reference.attention`.

    Masks, single queries and odd bfloat16 head widths go to `cpu_attention`.
    """
    inputs = (q_BNsH, k_BKSH, v_BKSH)
    queries = q_BNsH.shape[2]
    is_supported = (
        q_BNsH.dtype in _SUFFIXES and not isinstance(visible, Tensor) and 1 < queries <= k_BKSH.shape[2]
    )
    if not is_supported or (q_BNsH.dtype == torch.bfloat16 and q_BNsH.shape[3] % 2):
        return cpu_attention.attention(q_BNsH, k_BKSH, v_BKSH, visible)
    out: Tensor = _Attention.apply(*inputs, visible == "before")
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, causal: bool) -> Tensor:
        inputs = [_dense_rows(x) for x in (q_BNsH, k_BKSH, v_BKSH)]
        ctx.save_for_backward(*inputs)
        ctx.causal = causal
        out_BNsH = cpu_attention.token_major(q_BNsH)
        _call_attention("mega_attention", (out_BNsH, *inputs), inputs, causal)
        return out_BNsH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNsH: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = [cpu_attention.token_major(x) for x in inputs]
        _call_attention(
            "mega_attention_backward", (*grads, _dense_rows(grad_BNsH), *inputs), inputs, ctx.causal
        )
        return *grads, None


def _call_attention(name: str, tensors: Sequence[Tensor], inputs: Sequence[Tensor], causal: bool) -> None:
    q_BNsH, k_BKSH, _ = inputs
    rows, heads, queries, width = q_BNsH.shape
    steps = [step for x in tensors for step in x.stride()[:3]]
    array = (ctypes.c_long * len(steps))(*steps)
    name = f"{name}_{_SUFFIXES[q_BNsH.dtype]}"
    sizes = rows, heads, k_BKSH.shape[1], queries, k_BKSH.shape[2], width
    _call(name, *map(_pointer, tensors), ctypes.cast(array, ctypes.c_void_p), *sizes, width**-0.5, causal)


def _dense_rows(x: Tensor) -> Tensor:
    """Return x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, bias_F: Tensor | None) -> Tensor:
        x_TF = x_TF.contiguous()
        bias_F = None if bias_F is None else bias_F.contiguous()
        ctx.save_for_backward(x_TF, bias_F)
        out_TF = torch.empty_like(x_TF)
        columns = x_TF.shape[-1]
        name = f"mega_gelu_{_SUFFIXES[x_TF.dtype]}"
        _call(name, _pointer(out_TF), _pointer(x_TF), _pointer(bias_F), x_TF.numel() // columns, columns)
        return out_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor | None]:
        x_TF, bias_F = ctx.saved_tensors
        grad_TF = grad_TF.contiguous()
        grad_x_TF = torch.empty_like(x_TF)
        columns = x_TF.shape[-1]
        sum_F = None if bias_F is None else torch.empty(columns)
        pointers = (_pointer(x) for x in (grad_x_TF, sum_F, grad_TF, x_TF, bias_F))
        _call(f"mega_gelu_backward_{_SUFFIXES[x_TF.dtype]}", *pointers, x_TF.numel() // columns, columns)
        return grad_x_TF, None if sum_F is None else sum_F.to(x_TF.dtype)


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _call(name: str, *arguments: ctypes.c_void_p | float) -> None:
    """Call a function of the library, with torch's number of threads."""
    if getattr(load_kernels(), name)(*map(_ctype, arguments), ctypes.c_int(torch.get_num_threads())):
        raise MemoryError(f"{name}: no memory for the panels of a product")


def _ctype(x: ctypes.c_void_p | float) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_long | ctypes.c_float:
    if isinstance(x, bool):
        return ctypes.c_int(x)
    if isinstance(x, int):
        return ctypes.c_long(x)
    return ctypes.c_float(x) if isinstance(x, float) else x
