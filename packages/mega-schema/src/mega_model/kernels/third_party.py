"""Other people's kernels behind our signatures: of each package what it has, by field of the record.

Liger's kernels are held against the definitions by Triton's interpreter. apex and flash-attn need CUDA to be
built: their adapters are held against stand-ins of their functions, and have not run with the packages
themselves. `mega-train doctor` checks each of them where it is.
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
    """NVIDIA apex: its fused norms, the residual added before."""
    from apex.normalization import fused_layer_norm as fused

    def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
        y: Tensor = fused.fused_layer_norm_affine(x_TD, scale_D, shift_D, scale_D.shape, eps)
        return y

    def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
        y: Tensor = fused.fused_rms_norm_affine(x_TD, scale_D, scale_D.shape, eps)
        return y

    return _norms(layer_norm, rms_norm)


def liger() -> KernelOverrides:
    """Liger (arXiv:2410.10989): its norms, the residual added before, and SwiGLU."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
        y: Tensor = LigerLayerNormFunction.apply(x_TD, scale_D, shift_D, eps)
        return y

    def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
        # offset 0, rounded before it is scaled, and the gradient that comes in left as it is
        y: Tensor = LigerRMSNormFunction.apply(x_TD, scale_D, eps, 0.0, "llama", False)
        return y

    def swiglu(x_TF: Tensor) -> Tensor:
        # copies, even of one row: its backward writes gradients over what it was given
        gate, up = (half.clone(memory_format=torch.contiguous_format) for half in x_TF.chunk(2, -1))
        y: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return y

    return {**_norms(layer_norm, rms_norm), "swiglu": swiglu}


def flash_attn() -> KernelOverrides:
    """flash-attn (arXiv:2307.08691): attention in half precision that sees all, or all before."""
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
    """The two, and the two with an addition before."""

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
