"""Dropout (Srivastava et al. 2014) decided by a hash of the element, not by a random stream of the rank.

The hash covers the seed, the sample's number, the token's position in the sample, the name of the site, the
head and the column: a counter-based generator (Salmon et al. 2011). Random state need not differ between
ranks (arXiv:2205.05198 §4), be restored for recomputation or be saved in a checkpoint. Every layout drops the
same elements, and backward computes the mask again instead of storing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mega_model.distributed.mesh import Axis


class DropoutFn(Protocol):
    """A function that applies dropout to the output of a residual branch or of the embedding, and adds it."""

    def __call__(self, site: str, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """Apply dropout to x and add the residual.

        Args:
            site: name of the layer whose output it is, such as "embed" or "layers.0.down".
            x_TD: with sequence parallelism, this rank's shard of the tokens.
            residual_TD: added to x after dropout.
        """


def no_dropout(site: str, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
    """Add without dropout: the `DropoutFn` of scoring and generation."""
    return x_TD if residual_TD is None else residual_TD + x_TD


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of one micro-batch of training.

    Attributes:
        hidden, attention: probabilities in [0, 1), rounded to a multiple of 1/65,536.
        token_T: a hash of every token that this rank attends from, by `token_keys`.
        kernel: the `dropout_add` of the run's kernels.
    """

    hidden: float
    attention: float
    token_T: Tensor
    tp: Axis
    kernel: Callable[[Tensor, Tensor | None, Tensor, float], Tensor] | None = None

    def __call__(self, site: str, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        if self.hidden == 0:
            return no_dropout(site, x_TD, residual_TD)
        return self._dropout_add(
            x_TD, residual_TD, _site_key(self.tp.local_shard(self.token_T), site), self.hidden
        )

    def score_keys(self, layer: int, rows: int, heads: int) -> Tensor | None:
        """Return a hash of every query of this rank's heads, (B, N, s); None without attention dropout."""
        if self.attention == 0:
            return None
        token_Bs = _site_key(self.token_T, f"layers.{layer}.scores").unflatten(0, (rows, -1))
        head_N = torch.arange(heads, device=token_Bs.device) + self.tp.rank * heads
        return _splitmix64(token_Bs[:, None] + head_N[:, None] * _ODD)

    def drop_scores(self, probability_BNsS: Tensor, row_BNs: Tensor) -> Tensor:
        """Apply attention dropout; columns are positions in the sample."""
        return self._dropout_add(probability_BNsS, None, row_BNs, self.attention)

    def _dropout_add(self, x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
        return (self.kernel or dropout_add)(x, residual, key, probability)


def token_keys(seed: int, samples: Sequence[int], position_s: Tensor) -> Tensor:
    """Return a hash of every token, (T,): of seed, sample number and position in the sample.

    Args:
        position_s: positions, within each sample, of the tokens this rank holds.
    """
    key_B = torch.tensor([_hash_key(f"{seed}/{number}") for number in samples], device=position_s.device)
    return _splitmix64(key_B[:, None] + position_s * _ODD).flatten()


def _site_key(key: Tensor, site: str) -> Tensor:
    return _splitmix64(key ^ _hash_key(site))


def dropout_add(x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
    """Drop elements of x, scale the others so that the mean stays, and add the residual.

    Args:
        x, residual: (..., D) of one shape; without a residual nothing is added.
        key: int64, one per row of x.
        probability: in [0, 1), rounded to a multiple of 1/65,536.
    """
    y: Tensor = _DropoutFunction.apply(x, key, probability)
    return y if residual is None else residual + y


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(row)
        ctx.probability = probability
        return _apply_dropout(x, row, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply_dropout(grad, ctx.saved_tensors[0], ctx.probability), None, None


def _apply_dropout(x: Tensor, row: Tensor, probability: float) -> Tensor:
    """Drop elements of x and scale the others so that the mean stays; one key per row of x."""
    steps = min(round(probability * 65536), 65535)
    mask = torch.empty((row.numel(), x.shape[-1]), dtype=x.dtype, device=x.device)
    torch.ge(
        _uniform_int16(row.flatten(), x.shape[-1]), steps - 32768, out=mask
    )  # written as numbers, which saves a conversion from bool
    return (x * mask.view(x.shape)).mul_(65536 / (65536 - steps))


def _uniform_int16(key_R: Tensor, width: int) -> Tensor:
    """Return uniformly distributed int16 numbers, (R, width): a hash of the row's key and the column.

    Both halves of a 32-bit word are used. The key enters twice, so that no row is a shifted copy of another.
    The rounds of multiplying and shifting are those of the integer hash of
    https://github.com/skeeto/hash-prospector; `torch.int32` multiplies modulo 2^32, and its right shift
    copies the sign.
    """
    key_R2 = key_R.contiguous().view(torch.int32).unflatten(0, (-1, 2))
    column = torch.arange(-(-width // 2), dtype=torch.int32, device=key_R.device) * _WEYL
    word = column ^ key_R2[:, :1]
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLIER_1)
    word.bitwise_xor_((word >> 15).bitwise_and_(0x1FFFF)).add_(key_R2[:, 1:]).mul_(_MULTIPLIER_2)
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    return word.view(torch.int16)[:, :width]


def _splitmix64(z: Tensor) -> Tensor:
    """Mix the bits of an int64: the finalizer of splitmix64 (Steele et al. 2014)."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _from_twos_complement(0xBF58476D1CE4E5B9, 64)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _from_twos_complement(0x94D049BB133111EB, 64)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _hash_key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _from_twos_complement(number: int, bits: int) -> int:
    """Return the number whose two's complement has these bits."""
    return number - (1 << bits) if number >> (bits - 1) else number


_ODD = _from_twos_complement(0x9E3779B97F4A7C15, 64)
_WEYL, _MULTIPLIER_1, _MULTIPLIER_2 = (
    _from_twos_complement(number, 32) for number in (0x9E3779B9, 0x21F0AAAD, 0xD35A2D97)
)
