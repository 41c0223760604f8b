"""The reference cross-entropy against torch's in float64.

The head's loss, which uses it, is in `test_head_loss`; faster versions are held against it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mega_model.distributed.mesh import Axis
from mega_model.kernels.reference import IGNORED, cross_entropy

ALONE = Axis("tp")


def _case(seed: int, columns: int = 19) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(9, columns, generator=generator)
    target = torch.randint(0, columns, (9,), generator=generator)
    target[seed % 9] = IGNORED
    return logits, target


def _torchs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, and their sum's gradient."""
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, target, reduction="none", ignore_index=IGNORED)
    return loss.detach(), torch.autograd.grad(loss.sum(), exact)[0]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_torchs(seed: int, scale: float) -> None:
    logits, target = _case(seed)
    wanted, wanted_grad = _torchs(logits, target)
    loss = cross_entropy(logits, target, ALONE, scale)
    torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.double() / scale, wanted_grad, atol=1e-6, rtol=1e-5)


def test_logits_that_are_columns_of_wider_ones_leave_the_others_alone() -> None:
    wide, target = _case(0, 24)
    target = torch.where(target == IGNORED, target, target % 19)
    before = wide.clone()
    wanted, wanted_grad = _torchs(wide[:, :19], target)
    loss = cross_entropy(wide[:, :19], target, ALONE, 1.0)
    torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(wide[:, :19].double(), wanted_grad, atol=1e-6, rtol=1e-5)
    assert torch.equal(wide[:, 19:], before[:, 19:])


def test_a_token_that_does_not_count_has_neither_loss_nor_gradient() -> None:
    logits, target = _case(3)
    loss = cross_entropy(logits, target, ALONE, 1.0)
    assert loss[3] == 0
    assert torch.count_nonzero(logits[3]) == 0
    assert torch.count_nonzero(loss) == 8


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, 0.0], [-3e4, 0.0]])
    loss = cross_entropy(logits, torch.tensor([1, 0]), ALONE, 1.0)
    assert loss.tolist() == [3e4, 3e4]
    assert logits.tolist() == [[1, -1], [-1, 1]]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_logits_that_are_not_finite_make_the_loss_of_their_token_alone_not_finite(value: float) -> None:
    logits, target = _case(1)
    logits[4, 7] = value
    finite = torch.isfinite(cross_entropy(logits, target, ALONE, 1.0))
    assert finite.tolist() == [token != 4 for token in range(9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32_and_their_gradient_is_rounded_once(
    dtype: torch.dtype,
) -> None:
    logits, target = _case(1)
    low = logits.to(dtype)
    wanted, wanted_grad = _torchs(low, target)
    loss = cross_entropy(low, target, ALONE, 1024.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-5)
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(low.double(), 1024 * wanted_grad, atol=1e-4, rtol=1.01 * rounding)


def test_a_small_probability_is_not_lost_in_float16() -> None:
    """1 / 60,000 is below float16's normal numbers."""
    logits = torch.zeros(1, 60_000, dtype=torch.float16)
    loss = cross_entropy(logits, torch.tensor([0]), ALONE, 1024.0)
    assert float(loss) == pytest.approx(11.0021, abs=1e-3)
    assert float(logits[0, 1]) == pytest.approx(1024 / 60_000, rel=1e-3)
    assert float(logits[0, 0]) == pytest.approx(-1024, rel=1e-3)


class _ElementCounter(TorchDispatchMode):
    """Elements of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        pointers = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if _is(t)}
        for t in pytree.tree_leaves(out):
            if _is(t) and t.untyped_storage().data_ptr() not in pointers:
                self.elements.append(t.numel())
        return out


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_as_large_as_the_logits_is_made(dtype: torch.dtype, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(1025, 2048, generator=generator).to(dtype)
    target = torch.randint(0, 2048, (1025,), generator=generator)
    target[7] = IGNORED
    wanted, wanted_grad = _torchs(logits, target)
    with _ElementCounter() as passes:
        loss = cross_entropy(logits, target, ALONE, scale)
    assert max(passes.elements) <= 1 << 20
    torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-5)
    if scale is not None:
        torch.testing.assert_close(
            logits.double(), wanted_grad, atol=1e-6, rtol=1.01 * torch.finfo(dtype).eps / 2 + 1e-5
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [3, 8, 16, 19, 24])
def test_ranks_that_hold_a_slice_each_get_the_loss_and_slices_of_the_gradient(
    columns: int, dtype: torch.dtype, axes: Callable[[int], Sequence[Any]]
) -> None:
    """Eight columns a rank; of few, the last ranks have none: they hold nothing but padding."""
    whole, target = _case(2, columns)
    whole = whole.to(dtype)
    wanted, wanted_grad = _torchs(whole, target)
    slices = [part.clone() for part in whole.tensor_split((8, 16), 1)]
    targets = [
        torch.where((target >= first) & (target < first + 8), target - first, -1).where(
            target != IGNORED, IGNORED
        )
        for first in (0, 8, 16)
    ]
    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(lambda *arguments: cross_entropy(*arguments, 1.0), slices, targets, axes(3)))
    for loss in losses:
        torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(loss, losses[0])
    gradient = torch.cat(slices, 1).double()
    torch.testing.assert_close(gradient, wanted_grad, atol=1e-6, rtol=2 * torch.finfo(dtype).eps + 1e-5)
