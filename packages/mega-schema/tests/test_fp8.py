"""FP8 products against exact ones, within the rounding error; several ranks: tests/parity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_model import fp8
from mega_model.build import build_model, fill_weights
from mega_model.distributed.mesh import Axis, Mesh
from mega_model.fp8 import E4M3, E5M2, column_linear, matmul, quantize, row_linear, transpose
from mega_model.init import initial_values
from mega_model.layers import ColumnLinear, RowLinear
from mega_model.runtime import Runtime
from mega_model.weight_gradients import WeightGradients
from mega_schema.fp8_recipe import Fp8Recipe
from mega_schema.spec import gpt

ALONE = Axis("tp")
T, IN, OUT = 24, 32, 48  # tokens are no multiple of 16
HYBRID, PLAIN = Fp8Recipe("hybrid"), Fp8Recipe("e4m3")
# half a step between two numbers, as a share of them; and below the smallest of full precision, of the scale
HALF_STEP = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Over several magnitudes, as activations and gradients are."""
    random = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=random) * torch.randn(shape, generator=random).mul(2).exp()
    return x.to(dtype)


def _rounding_bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that rounding x to FP8, once scaled, can move each of its elements; in float64."""
    share, least = HALF_STEP[dtype]
    scale = float(x.abs().max()) / torch.finfo(dtype).max
    # float32's own roundings of scale and quotient come on top of the half step
    return torch.maximum(x.double().abs() * share, torch.tensor(least * scale).double()) * (1 + 2.0**-20)


def _product_bound(a_MK: Tensor, a: torch.dtype, b_NK: Tensor, b: torch.dtype) -> Tensor:
    """Of every element of a bᵀ: Σ |a| δb + δa |b| + δa δb, and float32's roundings of the sum."""
    x, y, dx, dy = (
        a_MK.double().abs(),
        b_NK.double().abs(),
        _rounding_bound(a_MK, a),
        _rounding_bound(b_NK, b),
    )
    return (x @ dy.t() + dx @ y.t() + dx @ dy.t()) * (1 + 2.0**-18) + 2.0**-20 * (x @ y.t())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_number_is_rounded_to_the_nearest_and_the_largest_is_kept(dtype: torch.dtype) -> None:
    x = _random(T, IN)
    values, scale = quantize(x, dtype)
    assert values.dtype == dtype
    off = (values.double() * scale.double() - x.double()).abs()
    assert bool((off <= _rounding_bound(x, dtype)).all())
    assert float(off.max()) > 0.1 * float(_rounding_bound(x, dtype).max()), "nothing was rounded"
    largest = int(x.abs().argmax())
    assert float(values.float().flatten()[largest].abs()) == torch.finfo(dtype).max


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_tensor_of_any_size_uses_the_whole_range(size: float) -> None:
    x = _random(T, IN)
    wanted = quantize(x, E4M3)
    quantized = quantize((x.double() * size).float(), E4M3)
    same = (quantized.values.float() == wanted.values.float()).float().mean()
    assert float(same) > 0.99, "but for ties, the same numbers"


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    values, scale = quantize(torch.zeros(4, 16), E4M3)
    assert values.float().abs().max() == 0
    assert torch.isfinite(scale)
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 16)
        x[0, 0] = bad
        a = quantize(x, E4M3)
        assert not torch.isfinite(matmul(a, quantize(torch.ones(16, 16), E4M3), torch.float32)[0]).any()


@pytest.mark.parametrize("rows", [1, 16, 24])
def test_turning_is_transposing_with_zeros_behind(rows: int) -> None:
    a = quantize(_random(rows, 32), E5M2)
    back = transpose(a)
    assert back.values.is_contiguous()
    assert back.values.shape == (32, -(-rows // 16) * 16)
    assert torch.equal(back.values.float()[:, :rows], a.values.float().t())
    assert back.values.float()[:, rows:].abs().sum() == 0


def _run_linear(
    linear: object, recipe: Fp8Recipe, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, gradient of the output; output, gradient of the input, main gradient of the weight."""
    x, weight = _random(T, IN, dtype=dtype).requires_grad_(), nn.Parameter(_random(OUT, IN, dtype=dtype))
    grad, gradients, main = _random(T, OUT, seed=5, dtype=dtype), WeightGradients(), torch.ones(OUT, IN)
    gradients.register_main_grad(weight, lambda: main)
    y = linear(x, weight, ALONE, gradients, recipe)  # type: ignore[operator]
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is None
    return x.detach(), weight.detach(), grad, y.detach(), x.grad, main - 1


@pytest.mark.parametrize("linear", [column_linear, row_linear])
@pytest.mark.parametrize(("recipe", "of_gradients"), [(HYBRID, E5M2), (PLAIN, E4M3)])
def test_output_and_both_gradients_are_within_what_rounding_their_factors_allows(
    linear: object, recipe: Fp8Recipe, of_gradients: torch.dtype
) -> None:
    x, weight, grad, y, grad_x, grad_weight = _run_linear(linear, recipe)
    products = {
        "output": (y, x, E4M3, weight, E4M3),
        "input's gradient": (grad_x, grad, of_gradients, weight.t(), E4M3),
        "weight's gradient": (grad_weight, grad.t(), of_gradients, x.t(), E4M3),
    }
    for name, (actual, a, a_dtype, b, b_dtype) in products.items():
        off = (actual.double() - a.double() @ b.double().t()).abs()
        bound = _product_bound(a, a_dtype, b, b_dtype) + 2.0**-23  # the main gradient began at 1
        assert bool((off <= bound).all()), name
        assert float(off.sum() / bound.sum()) > 0.01, f"{name} was not rounded"


def test_gradients_are_e5m2_in_hybrid_and_e4m3_in_e4m3() -> None:
    grad, weight = _random(T, OUT, seed=5), _random(OUT, IN)
    for recipe, dtype in ((HYBRID, E5M2), (PLAIN, E4M3)):
        *_, grad_x, _ = _run_linear(column_linear, recipe)
        wanted = matmul(quantize(grad, dtype), transpose(quantize(weight, E4M3)), torch.float32)
        assert torch.equal(grad_x, wanted)


@pytest.mark.parametrize("linear", [column_linear, row_linear])
def test_without_fp8_weight_gradients_theirs_is_the_exact_product(linear: object) -> None:
    x, _, grad, y, grad_x, grad_weight = _run_linear(linear, Fp8Recipe("hybrid", weight_gradients=False))
    torch.testing.assert_close(grad_weight.double(), grad.double().t() @ x.double(), rtol=1e-5, atol=1e-4)
    *_, their_y, their_grad_x, their_grad_weight = _run_linear(linear, HYBRID)
    assert torch.equal(y, their_y)
    assert torch.equal(grad_x, their_grad_x)
    assert not torch.allclose(grad_weight, their_grad_weight, rtol=1e-3)


@pytest.mark.parametrize("linear", [column_linear, row_linear])
def test_a_main_gradient_is_added_to_in_float32_whatever_the_dtype_of_the_model(linear: object) -> None:
    x, weight, grad, y, grad_x, grad_weight = _run_linear(linear, HYBRID, torch.bfloat16)
    assert (y.dtype, grad_x.dtype) == (torch.bfloat16, torch.bfloat16)
    factors = transpose(quantize(grad, E5M2)), transpose(quantize(x, E4M3))
    wanted = matmul(*factors, torch.float32)
    torch.testing.assert_close(grad_weight, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(grad_weight, grad_weight.bfloat16().float())


def test_a_weight_without_a_main_gradient_gets_autograds_and_one_put_off_waits() -> None:
    x, weight, gradients = _random(T, IN), nn.Parameter(_random(OUT, IN)), WeightGradients()
    column_linear(x, weight, ALONE, gradients, HYBRID).sum().backward()
    assert weight.grad is not None
    wanted, main = weight.grad.clone(), torch.zeros(OUT, IN)
    gradients.register_main_grad(weight, lambda: main)
    y = column_linear(x, weight, ALONE, gradients, HYBRID)
    with gradients.defer("pass"):
        y.sum().backward()
    assert not main.any()
    gradients.run_deferred("pass")
    assert torch.equal(main, wanted)


def test_what_is_computed_again_has_the_same_bits() -> None:
    x, weight = _random(T, IN).requires_grad_(), nn.Parameter(_random(OUT, IN))
    results = []
    for is_recomputed in (False, True):
        x.grad = weight.grad = None
        run = lambda x: column_linear(x, weight, ALONE, WeightGradients(), HYBRID).tanh()  # noqa: E731
        y = checkpoint(run, x, use_reentrant=False) if is_recomputed else run(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_only_what_is_asked_for_is_computed() -> None:
    x, weight = _random(T, IN), nn.Parameter(_random(OUT, IN), requires_grad=False)
    with torch.inference_mode():
        alone = column_linear(x, weight, ALONE, WeightGradients(), HYBRID)
    x.requires_grad_()
    y = column_linear(x, weight, ALONE, WeightGradients(), HYBRID)
    assert torch.equal(y, alone)
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is None


SPEC = gpt(layers=2, hidden=32, heads=2, vocab=40, max_seq_len=16)


def test_the_products_of_layers_are_in_fp8_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def seen(a: fp8.Fp8Tensor, b: fp8.Fp8Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        shapes.append((*a.values.shape, b.values.shape[0]))
        return matmul(a, b, dtype, fast=fast)

    monkeypatch.setattr(fp8, "matmul", seen)
    rt = Runtime.from_mesh(Mesh(), SPEC, dtype=torch.bfloat16, fp8=HYBRID)
    model = build_model(rt)
    fill_weights(model, initial_values(rt.table.values(), 1), rt)
    inside = [m for m in model.modules() if isinstance(m, ColumnLinear | RowLinear) and m.fp8 is not None]
    assert len(inside) == 4 * SPEC.layers
    layer = model.layers["0"]
    assert isinstance(layer, nn.Module)
    x = _random(16, 32, dtype=torch.bfloat16)
    y = layer.qkv(x)
    assert shapes == [(16, 32, 96)]
    assert layer.qkv.bias is not None
    assert torch.equal(y, layer.qkv.matmul(x) + layer.qkv.bias)
    model.head(x)
    assert len(shapes) == 2
