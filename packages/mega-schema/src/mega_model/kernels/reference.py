"""Reference kernels: the definition of each function.

Faster versions are tested against them; a CPU runs some of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.kernels.interface import Visible

IGNORED = -100  # target of a token without a loss


def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) · scale, with the mean square in float32 (arXiv:1910.07467, eq. 4)."""
    x = x_TD.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(x_TD.dtype) * scale_D


def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
    """Compute (x - mean) / deviation · scale + shift, with the moments in float32 (arXiv:1607.06450)."""
    return F.layer_norm(x_TD, scale_D.shape, scale_D, shift_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its RMSNorm."""
    sum_TD = residual_TD + x_TD
    return sum_TD, rms_norm(sum_TD, scale_D, eps)


def add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its LayerNorm."""
    sum_TD = residual_TD + x_TD
    return sum_TD, layer_norm(sum_TD, scale_D, shift_D, eps)


def bias_gelu(x_TF: Tensor, bias_F: Tensor | None, approximate: Literal["none", "tanh"]) -> Tensor:
    """Compute u Φ(u) of u = x + bias, with Φ by erf or by its tanh approximation (arXiv:1606.08415)."""
    return F.gelu(x_TF if bias_F is None else x_TF + bias_F, approximate=approximate)


def swiglu(x_TF: Tensor) -> Tensor:
    """Compute silu(gate) · up of the two halves of the last dimension, gate and up (arXiv:2002.05202)."""
    gate, up = x_TF.chunk(2, -1)
    return F.silu(gate) * up


def angles(position_T: Tensor, frequency_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of position · frequency, radians: (T, R) float32."""
    angle_TR = position_T.float()[:, None] * frequency_R
    return angle_TR.cos(), angle_TR.sin()


def apply_rotary(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R components of every head, as pairs (i, i + R) (arXiv:2104.09864).

    The other components are unchanged.

    Args:
        cos_TR, sin_TR: of each token's angles, R pairs.
    """
    pairs = cos_TR.shape[-1]
    cos, sin = cos_TR[:, None].to(x_TNH.dtype), sin_TR[:, None].to(x_TNH.dtype)
    a, b, unrotated = x_TNH.split([pairs, pairs, x_TNH.shape[-1] - 2 * pairs], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), -1)


def apply_rotary_packed(
    qkv_TW: Tensor, widths: Sequence[int], head: int, cos_TR: Tensor, sin_TR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply rotary positions to the queries and keys of a fused projection, and split off its values.

    Args:
        qkv_TW: may be overwritten.
        widths: of Q, K and V in it, in this order.
        head: width of a head.

    Returns:
        (T, N, H), (T, K, H) and (T, K, H).
    """
    q, k, v = (part.unflatten(-1, (-1, head)) for part in qkv_TW.split(list(widths), -1))
    return apply_rotary(q, cos_TR, sin_TR), apply_rotary(k, cos_TR, sin_TR), v


def masked_softmax(score_BNsS: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute softmax(scale · score) over the keys in float32, returned in the dtype of the scores.

    Args:
        mask: broadcastable; bool: which keys a query sees, at least one; numbers: a bias added to the scores.
    """
    score_BNsS = score_BNsS * scale
    if mask is not None and mask.dtype == torch.bool:
        score_BNsS = score_BNsS.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        score_BNsS = score_BNsS + mask
    return score_BNsS.softmax(-1, dtype=torch.float32).to(score_BNsS.dtype)


def attention(q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible) -> Tensor:
    """Compute softmax(q kᵀ / √H) v over the visible keys, (B, N, s, H); torch chooses the algorithm."""
    q, k, v = (to_attention_dtype(x) for x in (q_BNsH, k_BKSH, v_BKSH))
    queries, keys = q.shape[2], k.shape[2]
    causal = isinstance(visible, str) and queries == keys
    if isinstance(visible, str):
        visible = None if queries in (1, keys) else _lower_right_mask(queries, keys, q.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(q_BNsH.dtype)


def _lower_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask whose last query sees every key.

    On a GPU it is torch's own class, for which flash attention materialises no mask. That module imports
    torch._dynamo, 140 MB and 1.5 s in a process that compiles nothing, so it is imported here and not at the
    top.
    """
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        mask: Tensor = causal_lower_right(queries, keys)
        return mask
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def to_attention_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype that attention computes in."""
    # On a CPU without half-precision instructions, torch's half-precision attention takes two to five times
    # as long as in float32 (bench/cpu_optimizations.py); a CPU with them uses `cpu_attention`.
    return x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x


def softmax_(logits_CV: Tensor, scale: float) -> Tensor:
    """Return log Σ exp(z) in float32, (C,); the logits are overwritten with `scale` times their softmax."""
    if logits_CV.dtype == torch.float32:
        largest_C = logits_CV.amax(1)
        torch.softmax(logits_CV, 1, out=logits_CV)
        log_C = largest_C - logits_CV.amax(1).log_()  # the largest probability is 1 / Σ exp(z - largest)
        if scale != 1:
            logits_CV.mul_(scale)
        return log_C
    tokens, columns = logits_CV.shape
    # as many tokens as have float32 logits that fit a CPU's cache, or occupy a GPU
    step = max(1, (1 << (20 if logits_CV.device.type == "cpu" else 25)) // columns)
    float_CV = logits_CV.new_empty((min(step, tokens), columns), dtype=torch.float32)
    log_parts = []
    for rows_CV in logits_CV.split(step):
        work_CV = float_CV[: len(rows_CV)].copy_(rows_CV)
        log_parts.append(softmax_(work_CV, scale))
        rows_CV.copy_(work_CV)
    return torch.cat(log_parts)


def cross_entropy(
    logits_CV: Tensor,
    target_C: Tensor,
    tp: Axis,
    scale: float | None,
    *,
    softmax_: Callable[[Tensor, float], Tensor] = softmax_,
) -> Tensor:
    """Compute log Σ exp(z) - z[target], reduced over tp with a few numbers per token (arXiv:1909.08053 §3).

    Shapes, and what overwrites the logits: see `interface.CrossEntropy`.
    """
    is_local_C, counts_C = target_C >= 0, target_C != IGNORED
    token_C, column_C = torch.arange(len(target_C), device=target_C.device), target_C.clamp(min=0)
    at_target_C = logits_CV.new_zeros(len(logits_CV), dtype=torch.float32)
    local_C = torch.full_like(at_target_C, -torch.inf)  # a rank may hold only padding
    if logits_CV.shape[1]:
        at_target_C = torch.where(is_local_C, logits_CV[token_C, column_C].float(), 0.0)
        local_C = softmax_(logits_CV, 1.0 if scale is None else scale)
    log_sum_C = local_C
    if tp.size > 1:
        largest_C = tp.reduce(local_C.clone(), "max")
        sum_C, at_target_C = tp.reduce(torch.stack(((local_C - largest_C).exp(), at_target_C)))
        log_sum_C = largest_C + sum_C.log()
    if scale is not None and logits_CV.shape[1]:
        # only a CPU can test without a synchronisation whether all tokens count
        if tp.size > 1 or logits_CV.device.type != "cpu" or not bool(counts_C.all()):
            logits_CV.mul_((local_C - log_sum_C).exp_().mul_(counts_C)[:, None])
        # p - 1 is rounded once; a token whose target is on another rank keeps its value in column 0
        target_grad_C = ((at_target_C - log_sum_C).expm1() * scale).to(logits_CV.dtype)
        # by index: scatter_ on a CPU copies all logits of a half precision
        logits_CV[token_C, column_C] = torch.where(is_local_C, target_grad_C, logits_CV[token_C, column_C])
    return torch.where(counts_C, log_sum_C - at_target_C, 0.0)
