"""Weight gradients accumulate in float32 main gradients, now or deferred; several ranks: tests/parity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_model.distributed.mesh import Axis
from mega_model.kernels import products
from mega_model.tensor_parallel_ops import column_linear, row_linear, vocab_embedding
from mega_model.weight_gradients import WeightGradients

ALONE = Axis("tp")


def _weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()


def _loss(y: Tensor) -> Tensor:
    return (y.float() * torch.arange(y.numel()).reshape(y.shape) / y.numel()).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_main_gradient_is_the_exact_product_of_the_factors(dtype: torch.dtype) -> None:
    gradients, weight, x = WeightGradients(), _weight(4, 3, dtype=dtype), _x(dtype)
    main = torch.ones(4, 3)
    gradients.register_main_grad(weight, lambda: main)
    y = column_linear(x, weight, None, ALONE, gradients)
    grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(grad)
    assert weight.grad is None
    wanted = 1 + grad.double().t() @ x.detach().double()
    torch.testing.assert_close(main.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("converted", [1, 10, 11, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_in_pieces_replaces_whatever_was_there_or_adds_to_it(
    dtype: torch.dtype, converted: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_CHUNK_GRADIENT", converted)
    generator = torch.Generator().manual_seed(2)
    grad, x = (torch.randn(tokens, width, generator=generator).to(dtype) for width in (7, 3))
    wanted, main = grad.double().t() @ x.double(), torch.full((7, 3), torch.nan)
    for times in (1, 2):
        WeightGradients().accumulate_product(main, grad, x, first=times == 1)
        torch.testing.assert_close(main.double(), times * wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rounded", [1, 6, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_that_is_not_fused_is_rounded_before_it_is_added(
    dtype: torch.dtype, rounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_CHUNK_PRODUCT", rounded)
    generator = torch.Generator().manual_seed(2)
    grad, x = (torch.randn(5, width, generator=generator).to(dtype) for width in (7, 3))
    exact = (grad.double().t() @ x.double()).float()
    wanted, main = exact.to(dtype).float(), torch.full((7, 3), torch.nan)
    for times in (1, 2):
        WeightGradients(fused=False).accumulate_product(main, grad, x, first=times == 1)
        # sums in another order may be rounded to the number beside
        torch.testing.assert_close(main, times * wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(main / times, (main / times).to(dtype).float())
    assert dtype == torch.float32 or not torch.equal(main, 2 * exact)


def test_two_backward_passes_add_up() -> None:
    gradients, weight = WeightGradients(), _weight(4, 3)
    main = torch.zeros(4, 3)
    gradients.register_main_grad(weight, lambda: main)
    for _ in range(2):
        _loss(row_linear(_x(), weight, ALONE, gradients)).backward()
    (once,) = torch.autograd.grad(_loss(_x() @ weight.t()), weight)
    torch.testing.assert_close(main, 2 * once)


def test_without_a_main_gradient_autograd_has_it() -> None:
    gradients, weight = WeightGradients(), _weight(4, 3)
    main = torch.zeros(4, 3)
    gradients.register_main_grad(weight, lambda: main)
    gradients.register_main_grad(weight, None)
    _loss(column_linear(_x(), weight, None, ALONE, gradients)).backward()
    (wanted,) = torch.autograd.grad(_loss(_x() @ weight.t()), weight)
    torch.testing.assert_close(weight.grad, wanted)
    assert not main.any()


@pytest.mark.parametrize("into", [False, True])
def test_a_row_read_twice_gets_both_gradients(into: bool) -> None:
    gradients, table = WeightGradients(), _weight(6, 2)
    main = torch.zeros(6, 2)
    gradients.register_main_grad(table, (lambda: main) if into else None)
    row, own_mask = torch.tensor([4, 1, 4]), torch.ones(3, dtype=torch.bool)
    vocab_embedding(row, own_mask, table, ALONE, gradients).backward(torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    wanted = torch.zeros(6, 2)
    wanted[1], wanted[4] = torch.tensor([3.0, 4]), torch.tensor([6.0, 8])
    gradient = main if into else table.grad
    assert gradient is not None
    assert torch.equal(gradient, wanted)


def test_ready_comes_once_a_pass_and_after_the_last_layer_that_uses_the_weight() -> None:
    gradients, weight = WeightGradients(), _weight(6, 3)
    main, seen = torch.zeros(6, 3), []
    gradients.register_main_grad(weight, lambda: main)
    assert gradients.share_weight(weight) is weight
    gradients.on_grad_ready = lambda w: seen.append((w is weight, main.clone()))
    token, own_mask = torch.tensor([0, 5, 2]), torch.ones(3, dtype=torch.bool)
    for count in (1, 2):
        x = vocab_embedding(token, own_mask, weight, ALONE, gradients)
        _loss(column_linear(x, weight, None, ALONE, gradients)).backward()
        assert len(seen) == count
        assert seen[-1][0]
        assert torch.equal(seen[-1][1], main)


def test_a_deferred_pass_adds_when_it_is_run_and_passes_stay_apart() -> None:
    gradients, weight = WeightGradients(), _weight(4, 3)
    main, ready = torch.zeros(4, 3), []
    gradients.register_main_grad(weight, lambda: main)
    gradients.on_grad_ready = ready.append
    for name, factor in (("first", 1.0), ("second", 10.0)):
        x = _x()
        with gradients.defer(name):
            (factor * _loss(column_linear(x, weight, None, ALONE, gradients))).backward()
        assert x.grad is not None  # what the stage before waits for is there
        assert not main.any()
    (once,) = torch.autograd.grad(_loss(_x() @ weight.t()), weight)
    gradients.run_deferred("second")
    torch.testing.assert_close(main, 10 * once)
    gradients.run_deferred("first")
    torch.testing.assert_close(main, 11 * once)
    assert len(ready) == 2
    assert not gradients.is_deferring


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_computed_again_in_backward_adds_once(reentrant: bool) -> None:
    gradients, weight = WeightGradients(), _weight(4, 3)
    main = torch.zeros(4, 3)
    gradients.register_main_grad(weight, lambda: main)
    x = _x()
    y = checkpoint(
        lambda x: column_linear(x, weight, None, ALONE, gradients).tanh(), x, use_reentrant=reentrant
    )
    _loss(y).backward()
    same = _x()
    wanted_x, wanted = torch.autograd.grad(_loss((same @ weight.t()).tanh()), (same, weight))
    torch.testing.assert_close(main, wanted)
    torch.testing.assert_close(x.grad, wanted_x)
