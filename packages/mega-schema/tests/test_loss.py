"""Cross-entropy of one process, held against torch's own. Over tp it is in tests/parity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mega_model.loss import IGNORED, token_loss
from mega_model.mesh import Axis

Axes = Callable[[int], Sequence[Any]]
ALONE = Axis("tp")


def _case(seed: int, columns: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(9, columns, generator=generator)
    target = torch.randint(0, 19, (9,), generator=generator)
    target[seed % 9] = IGNORED
    return logits.requires_grad_(), target


@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_torchs(seed: int) -> None:
    logits, target = _case(seed)
    weight = torch.rand(9, generator=torch.Generator().manual_seed(1))
    loss = token_loss(logits, target, vocab=19, tp=ALONE)
    (grad,) = torch.autograd.grad((loss * weight).sum(), logits)
    wanted = F.cross_entropy(logits[:, :19], target, reduction="none", ignore_index=IGNORED)
    (wanted_grad,) = torch.autograd.grad((wanted * weight).sum(), logits)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, wanted_grad, atol=1e-6, rtol=1e-5)


def test_padding_columns_get_no_probability_and_no_gradient() -> None:
    logits, target = _case(0)
    loss = token_loss(logits, target, vocab=19, tp=ALONE)
    changed = logits.detach().clone()
    changed[:, 19:] = 1e4
    assert torch.equal(loss, token_loss(changed, target, vocab=19, tp=ALONE))
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad[:, 19:]) == 0


def test_a_token_that_does_not_count_has_neither_loss_nor_gradient() -> None:
    logits, target = _case(3)
    loss = token_loss(logits, target, vocab=19, tp=ALONE)
    loss.sum().backward()
    assert logits.grad is not None
    assert loss[3] == 0
    assert torch.count_nonzero(logits.grad[3]) == 0
    assert torch.count_nonzero(loss) == 8


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, 0.0], [-3e4, 0.0]], requires_grad=True)
    loss = token_loss(logits, torch.tensor([1, 0]), vocab=2, tp=ALONE)
    assert loss.tolist() == [3e4, 3e4]
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_are_summed_in_float32_and_left_as_they_were() -> None:
    logits, target = _case(1)
    low = logits.detach().bfloat16().requires_grad_()
    before = low.detach().clone()
    loss = token_loss(low, target, vocab=19, tp=ALONE)
    assert loss.dtype == torch.float32
    wanted = F.cross_entropy(before.float()[:, :19], target, reduction="none", ignore_index=IGNORED)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    loss.sum().backward()
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16
    assert torch.equal(low.detach(), before)


class _Made(TorchDispatchMode):
    """Elements and dtype of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if _is(t)}
        for t in pytree.tree_leaves(out):
            if _is(t) and t.untyped_storage().data_ptr() not in given:
                self.made.append((t.numel(), t.dtype))
        return out


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_as_large_as_the_logits_is_made_but_their_gradient(dtype: torch.dtype) -> None:
    logits = torch.randn(1024, 2048).to(dtype).requires_grad_()
    target = torch.randint(0, 2000, (1024,))
    kept: list[torch.Tensor] = []
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t)
    with _Made() as passes, keeping:
        loss = token_loss(logits, target, vocab=2000, tp=ALONE).sum()
        (grad,) = torch.autograd.grad(loss, logits)
    assert [made for made in passes.made if made[0] > 1 << 18] == [(1024 * 2048, dtype)]
    assert [t.data_ptr() == grad.data_ptr() for t in kept if t.numel() > 1024] == [True]


def test_without_a_gradient_nothing_as_large_as_the_logits_is_made() -> None:
    logits, target = torch.randn(1024, 2048), torch.randint(0, 2000, (1024,))
    before = logits.clone()
    with _Made() as passes:
        loss = token_loss(logits, target, vocab=2000, tp=ALONE)
    assert max(size for size, _ in passes.made) <= 1 << 18
    assert torch.equal(logits, before)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :2000], target, reduction="none"))


@pytest.mark.parametrize("vocab", [3, 16, 19, 24])
def test_ranks_that_hold_a_slice_each_give_slices_of_the_gradient(vocab: int, axes: Axes) -> None:
    """Eight columns a rank, the last of them padding or, with a small vocabulary, nothing but padding."""
    whole, target = _case(2)
    target = torch.where(target == IGNORED, target, target % vocab)
    wanted = F.cross_entropy(whole[:, :vocab], target, reduction="none", ignore_index=IGNORED)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), whole)
    slices = [part.detach().requires_grad_() for part in whole.split(8, 1)]
    with ThreadPoolExecutor(3) as pool:
        losses = pool.map(lambda part, tp: token_loss(part, target, vocab=vocab, tp=tp), slices, axes(3))
    for part, loss, grad in zip(slices, losses, wanted_grad.split(8, 1), strict=True):
        torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
        (got,) = torch.autograd.grad(loss.sum(), part)
        torch.testing.assert_close(got, grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("wrong", [19, -1, 1000])
def test_a_target_outside_the_vocabulary_is_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"target {wrong} in a vocabulary of 19"):
        token_loss(torch.zeros(1, 24), torch.tensor([wrong]), vocab=19, tp=ALONE)
