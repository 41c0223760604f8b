"""The chunked loss of the head against the loss of full logits in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_model import loss
from mega_model.distributed.mesh import Axis
from mega_model.loss import IGNORED, head_loss
from mega_model.weight_gradients import WeightGradients

ALONE = Axis("tp")
VOCAB = 19


def _case(seed: int, tokens: int, *, width: int = 8, rows: int = 24) -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(rows, width, generator=generator)
    target = torch.randint(0, VOCAB, (tokens,), generator=generator)
    target[seed % tokens] = IGNORED
    return x.requires_grad_(), nn.Parameter(weight), target


def _head(x: Tensor, weight: nn.Parameter, target: Tensor, **others: Any) -> Tensor:
    options = {"vocab": VOCAB, "tp": ALONE, "gradients": WeightGradients()} | others
    return head_loss(x, weight, target, **options)


def _reference_loss(x: Tensor, weight: Tensor, target: Tensor, vocab: int = VOCAB) -> Tensor:
    logits = x.double() @ weight[:vocab].double().t()
    return F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORED).float()


@pytest.fixture(params=[4, 256], ids=["chunks", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "max_chunk_tokens", lambda *_: request.param)


@pytest.mark.parametrize("tokens", [1, 7, 8, 50])
@pytest.mark.usefixtures("chunks")
def test_the_loss_and_both_gradients_are_those_of_whole_logits(tokens: int) -> None:
    x, weight, target = _case(tokens, tokens)
    actual, wanted = _head(x, weight, target), _reference_loss(x, weight, target)
    torch.testing.assert_close(actual, wanted)
    grads = torch.autograd.grad(0.3 * actual, (x, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(0.3 * wanted, (x, weight)))
    assert torch.count_nonzero(grads[1][VOCAB:]) == 0


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("gradient", [None, 0.3])
def test_weights_multiply_the_loss_and_the_gradients_of_each_token(gradient: float | None) -> None:
    x, weight, target = _case(3, 8)
    weights = torch.linspace(1.8, 0, 8)
    gradients = WeightGradients()
    actual = _head(x, weight, target, loss_weight_T=weights, gradients=gradients, gradient=gradient)
    logits = x.double() @ weight[:VOCAB].double().t()
    losses = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORED)
    wanted = (losses * weights).sum().float()
    torch.testing.assert_close(actual, wanted)
    grads = torch.autograd.grad(0.3 * actual, (x, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(0.3 * wanted, (x, weight)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_its_roundings_allow(dtype: torch.dtype) -> None:
    x, weight, target = _case(3, 50)
    low_x, low_weight = x.detach().to(dtype).requires_grad_(), nn.Parameter(weight.detach().to(dtype))
    gradients, main = WeightGradients(), torch.zeros_like(weight)
    gradients.register_main_grad(low_weight, lambda: main)
    actual = _head(low_x, low_weight, target, gradients=gradients)
    (0.3 * actual).backward()
    exact_x, exact_weight = low_x.detach().double().requires_grad_(), low_weight.detach().double()
    wanted = _reference_loss(exact_x, exact_weight.requires_grad_(), target)
    grad_x, grad_weight = torch.autograd.grad(0.3 * wanted, (exact_x, exact_weight))
    step = torch.finfo(dtype).eps / 2  # of a rounding: of logits, of their gradients, of what these give
    logits = float((exact_x @ exact_weight.t()).detach().abs().amax())
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(wanted.detach().item(), abs=50 * step * logits)
    torch.testing.assert_close(low_x.grad, grad_x.to(dtype), rtol=0, atol=8 * step * logits)
    torch.testing.assert_close(main.double(), grad_weight, rtol=0, atol=50 * step * logits)
    assert low_weight.grad is None


@pytest.mark.parametrize("vocab", [3, 8, 16, 19, 24])
@pytest.mark.usefixtures("chunks")
def test_ranks_that_hold_a_slice_each_get_the_whole_loss(
    vocab: int, axes: Callable[[int], Sequence[Any]]
) -> None:
    """Eight rows a rank, the last of them padding or, with a small vocabulary, nothing but padding."""
    x, weight, target = _case(2, 11)
    target = torch.where(target == IGNORED, target, target % vocab)
    wanted = _reference_loss(x, weight, target, vocab)
    grad_x, grad_weight = torch.autograd.grad(wanted, (x, weight))
    parts = [nn.Parameter(part.detach().clone()) for part in weight.split(8)]
    inputs = [x.detach().clone().requires_grad_() for _ in parts]
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda x, part, tp: _head(x, part, target, vocab=vocab, tp=tp), inputs, parts, axes(3))
        )
    for x, part, actual, grad in zip(inputs, parts, found, grad_weight.split(8), strict=True):
        torch.testing.assert_close(actual, wanted)
        got_x, got_weight = torch.autograd.grad(actual, (x, part))
        torch.testing.assert_close(got_x, grad_x)
        torch.testing.assert_close(got_weight, grad)


def test_the_logits_are_never_there_as_a_whole() -> None:
    """Nor is anything that is kept for the backward pass larger than the weight."""
    x, weight, target = _case(1, 4096, width=16, rows=512)
    largest: list[int] = []

    def kernel(logits: Tensor, target: Tensor, tp: Axis, scale: float | None) -> Tensor:
        largest.append(logits.numel())
        return logits.new_zeros(len(logits), dtype=torch.float32)

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        _head(x, weight, target, vocab=512, kernel=kernel)
    assert max(largest) <= 256 * 512
    assert sum(largest) == 4096 * 512
    assert sorted(t.numel() for t in saved) == [512 * 16, 4096 * 16]


@pytest.mark.parametrize(
    ("count", "wanted"), [(2048, [384] * 5 + [128]), (700, [384, 316]), (400, [256, 144])]
)
def test_a_chunks_logits_take_half_of_the_weights_gradient(count: int, wanted: list[int]) -> None:
    x, weight, target = _case(1, count, width=800, rows=VOCAB)
    tokens: list[int] = []

    def kernel(logits: Tensor, target: Tensor, tp: Axis, scale: float | None) -> Tensor:
        tokens.append(len(logits))
        return logits.new_zeros(len(logits), dtype=torch.float32)

    _head(x, weight, target, kernel=kernel)
    assert tokens == wanted  # of at most 400 tokens, and multiples of 128


def test_without_a_gradient_only_the_loss_is_computed() -> None:
    x, weight, target = _case(1, 9)
    asked: list[float | None] = []

    def kernel(logits: Tensor, target: Tensor, tp: Axis, scale: float | None) -> Tensor:
        asked.append(scale)
        return logits.new_ones(len(logits), dtype=torch.float32)

    with torch.no_grad():
        total = _head(x, weight, target, kernel=kernel)
    assert asked == [None]
    assert float(total) == 9
    assert not total.requires_grad


@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, False), (False, True)])
def test_one_gradient_alone_can_be_wanted(needs_x: bool, needs_weight: bool) -> None:
    x, weight, target = _case(1, 9)
    wanted = torch.autograd.grad(_reference_loss(x, weight, target), (x, weight))
    x.requires_grad_(needs_x)
    weight.requires_grad_(needs_weight)
    _head(x, weight, target).backward()
    for tensor, needs, grad in ((x, needs_x, wanted[0]), (weight, needs_weight, wanted[1])):
        if needs:
            torch.testing.assert_close(tensor.grad, grad)
        else:
            assert tensor.grad is None


def test_the_weights_gradient_is_added_at_once_also_where_others_are_put_off() -> None:
    x, weight, target = _case(1, 9)
    _, wanted = torch.autograd.grad(_reference_loss(x, weight, target), (x, weight))
    gradients, main, ready = WeightGradients(), torch.ones_like(weight), []
    gradients.register_main_grad(weight, lambda: main)
    gradients.on_grad_ready = ready.append
    loss = _head(x, weight, target, gradients=gradients)
    assert torch.equal(main, torch.ones_like(weight))
    with gradients.defer(0):
        (2 * loss).backward()
    torch.testing.assert_close(main, 1 + 2 * wanted)
    assert [weight_ready is weight for weight_ready in ready] == [True]


@pytest.mark.parametrize(
    ("dtype", "gradient", "in_forward"),
    [
        (torch.float32, 3.0, True),
        (torch.bfloat16, 0.25, True),
        (torch.bfloat16, 3.0, False),  # the target's gradient of nearly every token would be rounded alike
        (torch.float16, 0.25, False),  # a small gradient would be zero
    ],
)
def test_a_gradient_that_is_known_is_added_in_forward_where_that_rounds_nothing_more(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gradient: float, in_forward: bool
) -> None:
    monkeypatch.setattr(loss, "matmul_dtype", lambda x: x.dtype)
    x, weight, target = _case(1, 300)
    x, weight = x.detach().to(dtype).requires_grad_(), nn.Parameter(weight.detach().to(dtype))
    wanted_x, wanted = torch.autograd.grad(gradient * _reference_loss(x, weight, target), (x, weight))
    gradients, main, ready = WeightGradients(), torch.ones(weight.shape), []
    gradients.register_main_grad(weight, lambda: main)
    gradients.on_grad_ready = ready.append
    total = gradient * _head(x, weight, target, gradients=gradients, gradient=gradient)
    assert len(ready) == int(in_forward)
    total.backward()
    assert len(ready) == 1
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(main, 1 + wanted.float(), rtol=rtol, atol=10 * rtol)
    torch.testing.assert_close(x.grad, wanted_x, rtol=rtol, atol=10 * rtol)


def test_a_gradient_that_is_not_the_one_said_is_an_error() -> None:
    x, weight, target = _case(1, 9)
    gradients, main = WeightGradients(), torch.zeros_like(weight)
    gradients.register_main_grad(weight, lambda: main)
    loss = 2 * _head(x, weight, target, gradients=gradients, gradient=3.0)
    with pytest.raises(RuntimeError, match=r"the gradient of the loss is 2\.0, expected 3\.0"):
        loss.backward()


def test_a_known_gradient_of_a_weight_that_autograd_has_changes_nothing() -> None:
    x, weight, target = _case(1, 9)
    wanted = torch.autograd.grad(2 * _reference_loss(x, weight, target), (x, weight))
    found = torch.autograd.grad(2 * _head(x, weight, target, gradient=2.0), (x, weight))
    torch.testing.assert_close(found, wanted)


def test_a_tied_weight_is_ready_once_both_its_uses_have_added() -> None:
    x, weight, target = _case(1, 9)
    gradients, main, ready = WeightGradients(), torch.zeros_like(weight), []
    gradients.register_main_grad(gradients.share_weight(weight), lambda: main)
    gradients.on_grad_ready = ready.append
    _head(x, weight, target, gradients=gradients).backward()
    assert not ready
    _head(x, weight, target, gradients=gradients).backward()
    assert len(ready) == 1


def test_a_small_probability_is_not_lost_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(-18) of the second word is less than half of float16's smallest number."""
    monkeypatch.setattr(loss, "matmul_dtype", lambda x: x.dtype)  # also on a CPU that does it in float32
    x, weight = (torch.tensor(values, dtype=torch.float16) for values in ([[1.0]], [[0.0], [-18.0]]))
    gradients, main = WeightGradients(), torch.zeros(2, 1)
    gradients.register_main_grad(weight := nn.Parameter(weight), lambda: main)
    _head(x, weight, torch.tensor([0]), vocab=2, gradients=gradients).backward()
    assert float(main[1]) == pytest.approx(math.exp(-18), rel=2e-3)


def test_rows_of_padding_give_no_probability_and_get_no_gradient() -> None:
    x, weight, target = _case(5, 9)
    probabilities = []
    for padding in (0.0, 1e4, torch.nan):
        with torch.no_grad():
            weight[VOCAB:] = padding
        total = _head(x, weight, target)
        probabilities.append((total, *torch.autograd.grad(total, (x, weight))))
    for total, grad_x, grad_weight in probabilities:
        assert torch.equal(total, probabilities[0][0])
        assert torch.equal(grad_x, probabilities[0][1])
        assert torch.equal(grad_weight, probabilities[0][2])
        assert torch.count_nonzero(grad_weight[VOCAB:]) == 0


def test_a_token_that_does_not_count_has_neither_loss_nor_gradient() -> None:
    x, weight, target = _case(3, 9)
    total = _head(x, weight, target)
    grad_x, grad_weight = torch.autograd.grad(total, (x, weight))
    assert [token for token in range(9) if not grad_x[token].any()] == [3]
    others = torch.arange(9) != 3
    less = _head(x[others], weight, target[others])
    torch.testing.assert_close(total, less)
    torch.testing.assert_close(grad_weight, torch.autograd.grad(less, weight)[0])


def test_a_batch_of_which_no_token_counts_has_no_loss_and_no_gradient() -> None:
    x, weight, target = _case(3, 9)
    total = _head(x, weight, torch.full_like(target, IGNORED))
    assert total.item() == 0
    assert not any(grad.any() for grad in torch.autograd.grad(total, (x, weight)))


@pytest.mark.parametrize("wrong", [19, -1, 1000])
def test_a_target_outside_the_vocabulary_is_refused(wrong: int) -> None:
    x, weight, _ = _case(1, 1)
    with pytest.raises(IndexError, match=f"target {wrong} in a vocabulary of 19"):
        _head(x, weight, torch.tensor([wrong]))


def test_logits_that_are_not_finite_make_a_loss_that_is_not() -> None:
    x, weight, target = _case(1, 9)
    with torch.no_grad():
        x[4] = torch.inf
    assert not bool(torch.isfinite(_head(x, weight, target)))
