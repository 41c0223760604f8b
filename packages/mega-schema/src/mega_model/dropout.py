"""Dropout (Srivastava et al. 2014) whose choice depends on what an element is, not on which rank computes it.

Whether an element is dropped is a hash of the seed, the sample's number, the place of its token in the
sample, the name of where it is dropped, its head and its column: a counter-based generator (Salmon et al.
2011). There is no stream of random numbers to keep apart between ranks (arXiv:2205.05198 §4), to put back for
recomputation or to write to a checkpoint; every layout drops the same elements, and backward makes the choice
again instead of keeping it.
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
    """What becomes of a residual branch's output, or of the embedding's, before it is added."""

    def __call__(self, site: str, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """
        Args:
            site: name of the layer whose output it is, such as "embed" or "layers.0.down".
            x_TD: with sequence parallelism, of this rank's share of the tokens.
            residual_TD: what the rest of x is added to.
        """


def no_dropout(site: str, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
    """No dropout: a `Drop` for scoring and generation."""
    return x_TD if residual_TD is None else residual_TD + x_TD


@dataclass(frozen=True, slots=True)
class Dropout:
    """What one micro-batch drops in training.

    Attributes:
        hidden, attention: probabilities in [0, 1), taken to the nearest of 65,536.
        token_T: a hash of every token this rank attends from, as `token_keys` gives.
        kernel: a record's `add_dropped`.
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
        """A hash of every query of this rank's heads, (B, N, s); None where attention drops nothing."""
        if self.attention == 0:
            return None
        token_Bs = _site_key(self.token_T, f"layers.{layer}.scores").unflatten(0, (rows, -1))
        head_N = torch.arange(heads, device=token_Bs.device) + self.tp.rank * heads
        return _splitmix64(token_Bs[:, None] + head_N[:, None] * _ODD)

    def drop_scores(self, probability_BNsS: Tensor, row_BNs: Tensor) -> Tensor:
        """The same with some of them dropped; columns are places in the sample."""
        return self._dropout_add(probability_BNsS, None, row_BNs, self.attention)

    def _dropout_add(self, x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
        return (self.kernel or dropout_add)(x, residual, key, probability)


def token_keys(seed: int, samples: Sequence[int], position_s: Tensor) -> Tensor:
    """A hash of every token, (T,): of the run's seed, its sample's number in the run and its place in that.

    Args:
        place_s: places in the sample of the tokens this rank holds of each.
    """
    key_B = torch.tensor([_hash_key(f"{seed}/{number}") for number in samples], device=position_s.device)
    return _splitmix64(key_B[:, None] + position_s * _ODD).flatten()


def _site_key(key: Tensor, site: str) -> Tensor:
    return _splitmix64(key ^ _hash_key(site))


def dropout_add(x: Tensor, residual: Tensor | None, key: Tensor, probability: float) -> Tensor:
    """x with elements dropped and the rest larger, so that the mean stays, added to the residual.

    Args:
        x, residual: (..., D) of one shape; None adds to nothing.
        key: int64, one for every row of x.
        probability: in [0, 1), taken to the nearest of 65,536.
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
    """x with elements dropped, and the rest larger so that the mean stays; a row of x for every key."""
    steps = min(round(probability * 65536), 65535)
    mask = torch.empty((row.numel(), x.shape[-1]), dtype=x.dtype, device=x.device)
    torch.ge(
        _uniform_int16(row.flatten(), x.shape[-1]), steps - 32768, out=mask
    )  # as numbers: no bools to convert
    return (x * mask.view(x.shape)).mul_(65536 / (65536 - steps))


def _uniform_int16(key_R: Tensor, width: int) -> Tensor:
    """Evenly distributed int16 numbers, (R, width): a hash of the row's key and the column.

    Both halves of a 32-bit word are used, and the key enters in two places, so that rows do not repeat each
    other at a distance. The rounds of multiplying and shifting are those of the integer hash of
    https://github.com/skeeto/hash-prospector; `torch.int32` multiplies modulo 2^32 and shifts the sign in.
    """
    key_R2 = key_R.contiguous().view(torch.int32).unflatten(0, (-1, 2))
    column = torch.arange(-(-width // 2), dtype=torch.int32, device=key_R.device) * _WEYL
    word = column ^ key_R2[:, :1]
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLIER_1)
    word.bitwise_xor_((word >> 15).bitwise_and_(0x1FFFF)).add_(key_R2[:, 1:]).mul_(_MULTIPLIER_2)
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    return word.view(torch.int16)[:, :width]


def _splitmix64(z: Tensor) -> Tensor:
    """Every bit of an int64 depends on every bit: the finalizer of splitmix64 (Steele et al. 2014)."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _as_signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _as_signed(0x94D049BB133111EB, 64)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _hash_key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _as_signed(number: int, bits: int) -> int:
    """The number that has these bits in two's complement."""
    return number - (1 << bits) if number >> (bits - 1) else number


_ODD = _as_signed(0x9E3779B97F4A7C15, 64)
_WEYL, _MULTIPLIER_1, _MULTIPLIER_2 = (
    _as_signed(number, 32) for number in (0x9E3779B9, 0x21F0AAAD, 0xD35A2D97)
)
