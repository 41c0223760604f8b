"""Kernels of other packages behind our signatures: for each package its kernels, by field of `Kernels`.

Liger's kernels are tested against the reference in Triton's interpreter. apex and flash-attn need CUDA to
build: their adapters are tested against stand-ins of their functions, and were never run with the packages
themselves. `mega-train doctor` checks each of them where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mega_model.kernels import reference
from mega_model.kernels.interface import Visible

KernelOverrides = Mapping[str, Callable[..., Any]]


def apex() -> KernelOverrides:
    """Return NVIDIA apex's fused norms; the residual is added before."""
    from apex.normalization import fused_layer_norm as fused

    def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
        y: Tensor = fused.fused_layer_norm_affine(x_TD, scale_D, shift_D, scale_D.shape, eps)
        return y

    def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
        y: Tensor = fused.fused_rms_norm_affine(x_TD, scale_D, scale_D.shape, eps)
        return y

    return _norms(layer_norm, rms_norm)


def liger() -> KernelOverrides:
    """Return Liger's norms and SwiGLU (arXiv:2410.10989); the residual is added before the norms."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
        y: Tensor = LigerLayerNormFunction.apply(x_TD, scale_D, shift_D, eps)
        return y

    def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
        # offset 0; "llama": cast before scaling; False: do not overwrite the incoming gradient
        y: Tensor = LigerRMSNormFunction.apply(x_TD, scale_D, eps, 0.0, "llama", False)
        return y

    def swiglu(x_TF: Tensor) -> Tensor:
        # clones, even of one row: its backward overwrites its inputs with gradients
        gate, up = (half.clone(memory_format=torch.contiguous_format) for half in x_TF.chunk(2, -1))
        y: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return y

    return {**_norms(layer_norm, rms_norm), "swiglu": swiglu}


def flash_attn() -> KernelOverrides:
    """Return flash-attn's attention (arXiv:2307.08691), for half precision with no mask or a causal one."""
    from flash_attn import flash_attn_func

    def attention(q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible) -> Tensor:
        if isinstance(visible, Tensor) or q_BNsH.dtype not in (torch.bfloat16, torch.float16):
            return reference.attention(q_BNsH, k_BKSH, v_BKSH, visible)
        q, k, v = (x.transpose(1, 2) for x in (q_BNsH, k_BKSH, v_BKSH))
        repeats = torch.are_deterministic_algorithms_enabled()
        out: Tensor = flash_attn_func(q, k, v, causal=visible == "before", deterministic=repeats)
        return out.transpose(1, 2)

    return {"attention": attention}


def _norms(layer_norm: Callable[..., Tensor], rms_norm: Callable[..., Tensor]) -> KernelOverrides:
    """Return the two norms, and versions that first add the residual."""

    def add_layer_norm(
        x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TD = residual_TD + x_TD
        return sum_TD, layer_norm(sum_TD, scale_D, shift_D, eps)

    def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_TD = residual_TD + x_TD
        return sum_TD, rms_norm(sum_TD, scale_D, eps)

    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "add_layer_norm": add_layer_norm,
        "add_rms_norm": add_rms_norm,
    }
