"""Tensor-parallel products in one process against torch's; several ranks: tests/parity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_model.distributed.mesh import Axis
from mega_model.tensor_parallel_ops import column_linear, row_linear, vocab_embedding
from mega_model.weight_gradients import WeightGradients

ALONE = Axis("tp")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_gradients_are_those_of_finite_differences() -> None:
    gradients, bias = WeightGradients(), _random(4).requires_grad_()
    x, weight, table = (
        _random(5, 3).requires_grad_(),
        nn.Parameter(_random(4, 3)),
        nn.Parameter(_random(6, 3)),
    )
    token, own_mask = torch.tensor([3, 0, 3]), torch.ones(3, dtype=torch.bool)
    check = torch.autograd.gradcheck
    assert check(lambda x, w, b: column_linear(x, w, b, ALONE, gradients), (x, weight, bias))
    assert check(lambda x, w: row_linear(x, w, ALONE, gradients), (x, weight))
    assert check(lambda w: vocab_embedding(token, own_mask, w, ALONE, gradients), (table,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("native", [False, True])
def test_values_and_gradients_are_torchs_up_to_one_rounding(
    dtype: torch.dtype, tokens: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_model.matmul_precision.has_native", lambda half: native)
    x, weight, bias = (t.to(dtype) for t in (_random(tokens, 3), _random(4, 3), _random(4)))
    exact = F.linear(x.double(), weight.double(), bias.double())
    rounding = torch.finfo(dtype).eps
    parameter = nn.Parameter(weight)
    x.requires_grad_()
    y = column_linear(x, parameter, bias, ALONE, WeightGradients())
    torch.testing.assert_close(y.double(), exact, rtol=rounding, atol=4 * rounding)
    y = row_linear(x, parameter, ALONE, WeightGradients())
    torch.testing.assert_close(y.double(), exact - bias.double(), rtol=rounding, atol=4 * rounding)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    wanted = weight.double().sum(0).expand(tokens, 3)
    torch.testing.assert_close(x.grad.double(), wanted, rtol=rounding, atol=4 * rounding)


def test_a_torch_without_onednn_multiplies_half_precision_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    x, weight = _random(5, 3).bfloat16(), nn.Parameter(_random(4, 3).bfloat16())
    wanted = F.linear(x.float(), weight.float()).bfloat16()
    assert torch.equal(row_linear(x, weight, ALONE, WeightGradients()), wanted)


def test_only_what_is_asked_for_is_computed() -> None:
    x, weight = _random(5, 3), nn.Parameter(_random(4, 3), requires_grad=False)
    assert not column_linear(x, weight, None, ALONE, WeightGradients()).requires_grad
    x.requires_grad_()
    column_linear(x, weight, None, ALONE, WeightGradients()).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_gives_the_bits_of_training(dtype: torch.dtype) -> None:
    x, weight, bias = _random(5, 3).to(dtype), nn.Parameter(_random(4, 3).to(dtype)), _random(4).to(dtype)
    trained = column_linear(x, weight, bias, ALONE, WeightGradients())
    rowwise = row_linear(x, weight, ALONE, WeightGradients())
    with torch.inference_mode():
        assert torch.equal(column_linear(x, weight, bias, ALONE, WeightGradients()), trained)
        assert torch.equal(row_linear(x, weight, ALONE, WeightGradients()), rowwise)


def test_a_layer_keeps_its_input_and_nothing_else() -> None:
    x, weight = _random(5, 3).requires_grad_(), nn.Parameter(_random(4, 3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        column_linear(x, weight, None, ALONE, WeightGradients())
        row_linear(x, weight, ALONE, WeightGradients())
    assert [t.data_ptr() for t in saved] == [x.data_ptr()] * 2
