"""The Triton kernels, run by Triton's interpreter on the CPU, held against their definitions.

Triton asks for TRITON_INTERPRET as it is imported, which torch may do at any time: `test_triton` runs these
in a process of their own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, no_dropout, token_keys
from mega_model.init import initial_values
from mega_model.kernels import REFERENCE, Kernels
from mega_model.kernels.reference import IGNORED
from mega_model.kernels.triton import TRITON, norm
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.spec import ModelSpec, gpt, llama

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALONE = Axis("tp")


def _randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _agree(
    ours: Callable[..., Any], definition: Callable[..., Any], arguments: Sequence[Tensor], *more: Any
) -> None:
    """Outputs and gradients, as near as roundings of the dtype let them be; the truth is float64's.

    An output's error is some roundings of the largest number there is; a gradient that is summed over rows
    has one for every row.
    """
    exact = [x.double() if x.is_floating_point() else x for x in arguments]
    results = []
    for function, inputs in ((ours, list(arguments)), (definition, exact)):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        # a kernel may overwrite what it is given, which a leaf forbids
        out = function(*(x * 1 if x.is_floating_point() else x for x in leaves), *more)
        outs = out if isinstance(out, tuple) else (out,)
        weights = [_randn(*y.shape, dtype=arguments[0].dtype, seed=i + 5) for i, y in enumerate(outs)]
        total = sum((y * w.to(y.dtype)).sum() for y, w in zip(outs, weights, strict=True))
        grads = torch.autograd.grad(total, [x for x in leaves if x.requires_grad])
        results.append([y.detach() for y in outs] + list(grads))
    step = torch.finfo(arguments[0].dtype).eps
    rows = arguments[0].shape[0]
    for actual, wanted in zip(*results, strict=True):
        assert actual.dtype == arguments[0].dtype
        summed = rows if actual.dim() == 1 else 1
        atol = 12 * step * summed * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 5), (7, 64), (2, 100)])
def test_norms_are_their_definitions(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = _randn(rows, width, dtype=dtype), _randn(rows, width, dtype=dtype, seed=1)
    scale, shift = _randn(width, dtype=dtype, seed=2), _randn(width, dtype=dtype, seed=3)
    eps = 1e-2 if width == 1 else 1e-5  # a single number is its own mean: what is left is noise
    ref = REFERENCE
    _agree(TRITON.rms_norm, ref.rms_norm, (x, scale), eps)
    _agree(TRITON.layer_norm, ref.layer_norm, (x, scale, shift), eps)
    _agree(TRITON.add_rms_norm, ref.add_rms_norm, (x, residual, scale), eps)
    _agree(TRITON.add_layer_norm, ref.add_layer_norm, (x, residual, scale, shift), eps)


def test_a_norm_of_more_rows_than_programs_sums_over_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_MOST_PROGRAMS", 3)
    x, scale, shift = (_randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate([(11, 6), (6,), (6,)]))
    _agree(TRITON.layer_norm, REFERENCE.layer_norm, (x, scale, shift), 1e-5)


def test_of_a_norms_two_outputs_one_may_go_unused() -> None:
    x, residual, scale = (
        _randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate([(3, 6), (3, 6), (6,)])
    )
    _agree(
        lambda *g: TRITON.add_rms_norm(*g)[1],
        lambda *g: REFERENCE.add_rms_norm(*g)[1],
        (x, residual, scale),
        1e-5,
    )
    sums = [k.add_rms_norm(x.requires_grad_(), residual, scale, 1e-5)[0] for k in (TRITON, REFERENCE)]
    actual, wanted = (torch.autograd.grad((s * s).sum(), x)[0] for s in sums)
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 33), (3, 1030)])
def test_bias_and_gelu_are_their_definition(
    rows: int, width: int, approximate: str, dtype: torch.dtype
) -> None:
    x, bias = 2 * _randn(rows, width, dtype=dtype), _randn(width, dtype=dtype, seed=1)
    _agree(TRITON.bias_gelu, REFERENCE.bias_gelu, (x, bias), approximate)
    _agree(TRITON.bias_gelu, REFERENCE.bias_gelu, (x,), None, approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (5, 66), (2, 2060)])
def test_swiglu_is_its_definition(rows: int, width: int, dtype: torch.dtype) -> None:
    _agree(TRITON.swiglu, REFERENCE.swiglu, (2 * _randn(rows, width, dtype=dtype),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "keys", "head", "pairs"), [(1, 1, 2, 1), (4, 2, 8, 4), (3, 3, 10, 3), (20, 1, 6, 3)]
)
def test_rotations_are_their_definitions(
    heads: int, keys: int, head: int, pairs: int, dtype: torch.dtype
) -> None:
    angle = 3 * _randn(5, pairs, dtype=torch.float32, seed=9)
    cos, sin = angle.cos().to(dtype).float(), angle.sin().to(dtype).float()
    widths = (heads * head, keys * head, keys * head)
    qkv = _randn(5, sum(widths), dtype=dtype)
    _agree(
        lambda x: TRITON.apply_rotary_packed(x, widths, head, cos, sin),
        lambda x: REFERENCE.apply_rotary_packed(x, widths, head, cos.double(), sin.double()),
        (qkv,),
    )
    x = _randn(5, heads, head, dtype=dtype)
    _agree(
        lambda x: TRITON.apply_rotary(x, cos, sin),
        lambda x: REFERENCE.apply_rotary(x, cos.double(), sin.double()),
        (x,),
    )


def test_gradients_that_lie_as_attention_leaves_them_are_turned_back() -> None:
    """Heads before tokens, and of one head expanded."""
    angle = _randn(6, 2, dtype=torch.float32)
    grads = []
    for kernels in (TRITON, REFERENCE):
        x = _randn(6, 16, dtype=torch.float32).requires_grad_()
        q, k, v = kernels.apply_rotary_packed(x * 1, (8, 4, 4), 4, angle.cos(), angle.sin())
        out = q.transpose(0, 1).unsqueeze(0) * 2 + k.transpose(0, 1).unsqueeze(0)
        grads.append(torch.autograd.grad(out.square().sum() + v.sum(), x)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "seen", "cost"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 5), (4, 33)])
def test_the_masked_softmax_is_its_definition(queries: int, keys: int, mask: str, dtype: torch.dtype) -> None:
    score = 3 * _randn(2, 3, queries, keys, dtype=dtype)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    masks: dict[str, Tensor | None] = {
        "none": None,
        "seen": torch.stack((seen, torch.ones_like(seen)))[:, None],
        "cost": _randn(3, queries, keys, dtype=dtype, seed=4).masked_fill(~seen, -torch.inf),
    }
    _agree(TRITON.masked_softmax, REFERENCE.masked_softmax, (score,), masks[mask], 0.25)


def _entropy(kernels: Kernels, logits: Tensor, target: Tensor, tp: Any, scale: float | None = 1.0) -> Any:
    logits = logits.clone()
    return kernels.cross_entropy(logits, target, tp, scale), logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 19, 4100])
def test_the_cross_entropy_is_its_definition(columns: int, dtype: torch.dtype) -> None:
    logits = 5 * _randn(4, columns, dtype=dtype)
    target = torch.tensor([0, columns - 1, IGNORED, columns // 2])
    loss, grad = _entropy(TRITON, logits, target, ALONE, 2.0)
    wanted, wanted_grad = _entropy(REFERENCE, logits.float(), target, ALONE, 2.0)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad.float(), wanted_grad, atol=4 * torch.finfo(dtype).eps, rtol=1e-5)
    assert torch.equal(_entropy(TRITON, logits, target, ALONE, None)[0], loss)


def test_huge_logits_do_not_overflow_the_cross_entropy() -> None:
    logits, target = torch.tensor([[3e4, 0.0], [-3e4, 0.0]]), torch.tensor([1, 0])
    loss, grad = _entropy(TRITON, logits, target, ALONE)
    assert loss.tolist() == [3e4, 3e4]
    assert grad.tolist() == [[1, -1], [-1, 1]]


def test_ranks_with_a_slice_each_have_one_cross_entropy(axes: Callable[[int], Sequence[Any]]) -> None:
    """Of the last rank nothing but padding."""
    logits, target = 4 * _randn(5, 12, dtype=torch.float32), torch.tensor([0, 7, 11, IGNORED, 6])
    wanted, wanted_grad = _entropy(REFERENCE, logits, target, ALONE)
    own = [torch.where(target == IGNORED, IGNORED, _mine(target, first_id)) for first_id in (0, 6, 12)]
    one_at_a_time = threading.Lock()  # the interpreter knows one kernel

    def run(logits: Tensor, target: Tensor, tp: Any) -> Any:
        with one_at_a_time:
            return _entropy(TRITON, logits, target, _YieldingAxis(tp, one_at_a_time))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, logits.tensor_split((6, 12), 1), own, axes(3)))
    for loss, _ in found:
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), wanted_grad)


class _YieldingAxis:
    """An axis that lets the others run while it waits for them."""

    def __init__(self, tp: Any, lock: threading.Lock) -> None:
        self.tp, self.lock, self.size = tp, lock, tp.size

    def reduce(self, x: Tensor, how: str = "sum") -> Tensor:
        self.lock.release()
        try:
            return self.tp.reduce(x, how)
        finally:
            self.lock.acquire()


def _mine(target: Tensor, first: int) -> Tensor:
    return torch.where((target >= first) & (target < first + 6), target - first, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("width", [1, 7, 1030])
def test_dropout_and_addition_drop_the_very_elements(
    width: int, probability: float, dtype: torch.dtype
) -> None:
    key = torch.randint(-(1 << 62), 1 << 62, (4,), generator=torch.Generator().manual_seed(3))
    x, residual = _randn(4, width, dtype=dtype), _randn(4, width, dtype=dtype, seed=1)
    results = []
    for kernels in (TRITON, REFERENCE):
        a, b = x.clone().requires_grad_(), residual.clone().requires_grad_()
        out = kernels.dropout_add(a, b, key, probability)
        alone = kernels.dropout_add(a, None, key, probability)
        results.append((out, alone, *torch.autograd.grad((out * 3 + alone).sum(), (a, b))))
    # the interpreter rounds to bfloat16 towards zero
    close = 0.0 if dtype != torch.bfloat16 else 4 * torch.finfo(dtype).eps / (1 - probability)
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, atol=4 * close, rtol=0)
    for (_, actual, *_), (_, wanted, *_) in [results]:
        assert torch.equal(actual == 0, wanted == 0)


SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "vocab": 50, "max_seq_len": 8}


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize(
    "spec",
    [gpt(heads=2, **SIZES), llama(heads=4, kv_heads=2, ffn=24, **SIZES)],
    ids=["gpt", "llama"],
)
def test_a_model_of_them_trains_as_one_of_definitions(spec: ModelSpec, probability: float) -> None:
    token, place = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(1)), torch.arange(8)
    results = []
    for kernels in (TRITON, REFERENCE):
        rt = replace(Runtime.single_process(spec), kernels=kernels)
        model = build_model(rt)
        fill_weights(model, initial_values(table(spec), 1), rt)
        key = token_keys(1, [0, 1], place)
        dropout = Dropout(probability, probability, key, ALONE, kernels.dropout_add) if probability else None
        attend = PackedAttention(2, 8, dropout=dropout, softmax=kernels.masked_softmax)
        loss = model(token, place.repeat(2), attend, dropout or no_dropout, token.roll(-1))
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


def test_the_interpreter_ran() -> None:
    """A test on a machine with a GPU would otherwise hold compiled kernels against CPU tensors."""
    assert type(norm._norm_kernel).__name__ == "InterpretedFunction"
    assert math.isfinite(float(TRITON.swiglu(torch.ones(1, 2)).sum()))
