"""Cross-entropy of one process, held against torch's own. Over tp it is in tests/parity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mega_model.loss import IGNORED, token_loss
from mega_model.mesh import Axis

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


@pytest.mark.parametrize("wrong", [19, -1, 1000])
def test_a_target_outside_the_vocabulary_is_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"target {wrong} in a vocabulary of 19"):
        token_loss(torch.zeros(1, 24), torch.tensor([wrong]), vocab=19, tp=ALONE)
