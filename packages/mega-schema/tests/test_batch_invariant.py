"""Batch-invariant kernels: a row's bits in any batch; values and gradients of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention import RotaryTable, rotary_angles
from mega_model.attention_backends import PackedAttention
from mega_model.batch_invariant_attention import BatchInvariantAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Axis
from mega_model.init import initial_values
from mega_model.kernels import REFERENCE, Kernels
from mega_model.kernels.batch_invariant import build_kernels
from mega_model.kernels.log_probabilities import LogProbabilities
from mega_model.kernels.numba import NumbaKernels, load_kernels
from mega_model.kernels.ordered_linear import PackedOrderedLinear, TrainedOrderedLinear
from mega_model.kernels.verify import check_kernels
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.spec import ModelSpec, gpt, llama

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 70
CPU = torch.device("cpu")
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 131, "max_seq_len": 96, "init_std": 0.15}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=96, sliding_window=21),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True, kv_heads=1, head_dim=24, bias=True),
    "erf": replace(gpt(**SIZES), activation="gelu_erf", positions="sinusoidal"),
    "geglu": replace(llama(**SIZES, kv_heads=4, ffn=96), activation="geglu", qk_norm=True),
}


@pytest.fixture(scope="module")
def numba() -> NumbaKernels:
    return load_kernels()


@pytest.fixture(scope="module")
def kernels(numba: NumbaKernels) -> Kernels:
    return build_kernels(REFERENCE, numba)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_those_of_the_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    for result in check_kernels(kernels, CPU, dtype):
        assert not result.failure, result
        assert result.error < 1, result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 70, 200])
def test_a_row_has_the_same_bits_among_any_rows(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, scale, bias = (_random(n, width, dtype=dtype, seed=n) * 3 for n in (ROWS, 1, 2))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda x: kernels.rms_norm(x, scale[0], 1e-5),
        "layer_norm": lambda x: kernels.layer_norm(x, scale[0], bias[0], 1e-5),
        "add_rms_norm": lambda x: kernels.add_rms_norm(x, x * 2, scale[0], 1e-5)[1],
        "add_layer_norm": lambda x: kernels.add_layer_norm(x, x * 2, scale[0], bias[0], 1e-5)[1],
        "gelu_tanh": lambda x: kernels.bias_gelu(x, bias[1], "tanh"),
        "gelu_erf": lambda x: kernels.bias_gelu(x, None, "none"),
        "swiglu": kernels.swiglu,
    }
    for name, function in functions.items():
        whole = function(x)
        for rows in range(1, ROWS):
            assert torch.equal(function(x[:rows]), whole[:rows]), (name, rows)
            assert torch.equal(function(x[rows:]), whole[rows:]), (name, rows)


def test_a_position_has_the_same_angles_among_any_positions(kernels: Kernels) -> None:
    spec = SPECS["llama"]
    table = RotaryTable(spec, angles=kernels.angles)
    for rows in range(1, ROWS):
        position = torch.arange(rows, 96)
        for part, whole in zip(rotary_angles(position, spec, kernels.angles), table(position), strict=True):
            assert torch.equal(part, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (576, 64), (40, 100), (97, 131), (1088, 70)])
def test_products_are_those_of_linear_and_ignore_other_rows(
    numba: NumbaKernels, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, bias = _random(37, inputs, dtype=dtype), _random(outputs, dtype=dtype, seed=3)
    weight = (_random(outputs, inputs, seed=2) / inputs**0.5).to(dtype)
    packed, trained = PackedOrderedLinear(weight, numba), TrainedOrderedLinear(numba)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    products = {
        "with bias": lambda linear, x: linear(x, weight, bias),
        "without": lambda linear, x: linear(x, weight),
        "reduced": lambda linear, x: linear.reduce_product(x, weight, Axis("tp")),
    }
    for name, product in products.items():
        whole = product(packed, x)
        wanted = F.linear(x, weight, bias if name == "with bias" else None)
        torch.testing.assert_close(whole, wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(product(trained, x), whole)
        for rows in range(1, 37):
            assert torch.equal(product(packed, x[rows:]), whole[rows:])
            assert torch.equal(product(packed, x[:rows]), whole[:rows])


def test_two_threads_change_no_bits(numba: NumbaKernels, kernels: Kernels) -> None:
    x, weight = _random(9, 192, dtype=torch.bfloat16), _random(640, 192, dtype=torch.bfloat16, seed=2)
    packed = PackedOrderedLinear(weight, numba)
    log_softmax = LogProbabilities(numba).log_softmax
    functions: list[Callable[[], Tensor]] = [
        lambda: packed(x, weight),
        lambda: packed.reduce_product(x, weight, Axis("tp")),
        lambda: kernels.bias_gelu(x, None, "tanh"),
        lambda: kernels.rms_norm(x, weight[0], 1e-5),
        lambda: kernels.swiglu(x),
        lambda: log_softmax(x),
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [function() for function in functions]
        torch.set_num_threads(2)
        for function, wanted in zip(functions, expected, strict=True):
            assert torch.equal(function(), wanted)
    finally:
        torch.set_num_threads(threads)


def test_an_input_of_another_width_or_dtype_is_refused(numba: NumbaKernels) -> None:
    x, weight = _random(2, 64), _random(128, 64)
    packed = PackedOrderedLinear(weight, numba)
    for wrong in (x[:, :32], x.bfloat16()):
        with pytest.raises(AssertionError, match="inputs of"):
            packed(wrong, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_are_the_negated_log_probabilities(
    numba: NumbaKernels, kernels: Kernels, dtype: torch.dtype
) -> None:
    logits, target = _random(ROWS, 211, dtype=dtype) * 5, torch.arange(ROWS) * 3
    target[4] = -100
    log_softmax = LogProbabilities(numba).log_softmax
    whole = log_softmax(logits.float())
    torch.testing.assert_close(whole, logits.double().log_softmax(-1).float(), rtol=1e-6, atol=1e-6)
    losses = kernels.cross_entropy(logits.clone(), target, Axis("tp"), None)
    assert losses[4] == 0
    chosen = target >= 0
    assert torch.equal(-losses[chosen], whole[chosen].gather(1, target[chosen, None])[:, 0])
    for rows in range(1, ROWS):
        assert torch.equal(log_softmax(logits[rows:]), whole[rows:])


def test_a_logit_that_is_not_finite_gives_nan_or_certainty(numba: NumbaKernels) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, -inf, -inf], [0.0, 1.0, 2.0]])
    logprobs = LogProbabilities(numba).log_softmax(logits)
    assert logprobs[0].isnan().all()
    assert logprobs[1].tolist() == [0.0, -inf, -inf]
    assert logprobs[2].isfinite().all()


def _build(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype) -> Decoder:
    rt = replace(Runtime.single_process(spec, dtype=dtype), kernels=kernels)
    model = build_model(rt)
    fill_weights(model, initial_values(table(spec), seed=5), rt)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("documents", [False, True])
def test_a_training_pass_has_the_loss_and_gradients_of_the_reference(
    numba: NumbaKernels, kernels: Kernels, name: str, dtype: torch.dtype, documents: bool
) -> None:
    spec = SPECS[name]
    rows, length = 3, 40
    generator = torch.Generator().manual_seed(2)
    token, target = torch.randint(spec.vocab, (2, rows * length), generator=generator)
    position = torch.arange(length).repeat(rows)
    document = torch.arange(length).expand(rows, length) // 17 if documents else None
    results = []
    for chosen, attend in (
        (REFERENCE, PackedAttention(rows, length, document)),
        (kernels, BatchInvariantAttention(numba, rows, length, document)),
    ):
        model = _build(spec, chosen, dtype)
        loss = model(token, position, attend, target_T=target)
        loss.backward()
        losses = model.token_losses(token, position, attend, target)
        torch.testing.assert_close(losses.sum(), loss.detach(), rtol=1e-5, atol=0.0)
        results.append((loss.detach() / len(token), {n: p.grad for n, p in model.named_parameters()}))
    (wanted_loss, wanted), (loss, grads) = results
    is_float = dtype == torch.float32
    assert abs(float(loss - wanted_loss)) < (1e-5 if is_float else 0.02)
    for key, grad in grads.items():
        assert grad is not None
        assert wanted[key] is not None
        error = float((grad.float() - wanted[key].float()).norm() / wanted[key].float().norm())
        assert error < (1e-4 if is_float else 0.05), key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_a_token_has_the_same_loss_in_any_batch(
    numba: NumbaKernels, kernels: Kernels, name: str, dtype: torch.dtype
) -> None:
    spec = SPECS[name]
    model = _build(spec, kernels, dtype)
    token = torch.randint(spec.vocab, (5, 41), generator=torch.Generator().manual_seed(2))
    attend = partial(BatchInvariantAttention, numba)
    position = torch.arange(40)
    losses = model.token_losses(
        token[:, :-1].flatten(), position.repeat(5), attend(5, 40), token[:, 1:].flatten()
    ).view(5, 40)
    for row, length in ((0, 40), (2, 1), (3, 17), (4, 33)):
        alone = model.token_losses(
            token[row, :length], position[:length], attend(1, length), token[row, 1 : length + 1]
        )
        assert torch.equal(alone, losses[row, :length])
