"""C++ kernels against the reference in float64, and errors if they cannot be compiled."""

from __future__ import annotations

import ctypes
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.kernels import cpp, dispatch, products, reference
from mega_model.kernels.cpp import library
from mega_model.kernels.interface import Visible
from mega_schema import cpp_library

ALONE = Axis("tp")
BF16 = torch.bfloat16


@pytest.fixture
def _require_library() -> None:
    try:
        library.load_kernels()
    except cpp_library.CompileError as error:
        pytest.skip(f"no kernels in C++ here: {error}")


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.usefixtures("_require_library", "_threads")
@pytest.mark.parametrize(
    ("dtype", "rounded"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
@pytest.mark.parametrize(
    ("tokens", "out", "into"),
    [(1, 1, 1), (2, 8, 48), (3, 7, 50), (33, 130, 49), (64, 65, 96), (2049, 17, 97), (5000, 3, 16)],
)
def test_a_product_is_added_in_float32_by_any_number_of_threads(
    tokens: int, out: int, into: int, dtype: torch.dtype, rounded: bool
) -> None:
    grad, x = _random(tokens, out, seed=1).to(dtype), _random(tokens, into, seed=2).to(dtype)
    exact = grad.double().t() @ x.double()
    tolerance = {"rtol": 2**-8, "atol": 1e-4} if rounded else {"rtol": 1e-5, "atol": 1e-4}
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        main = torch.full((out, into), torch.nan)
        cpp.add_product(main, grad, x, first=True, rounded=rounded)
        torch.testing.assert_close(main.double(), exact, **tolerance)
        assert not rounded or torch.equal(main, main.to(BF16).float())
        once = main.clone()
        cpp.add_product(main, grad, x, first=False, rounded=rounded)
        torch.testing.assert_close(
            main, 2 * once, rtol=1e-6, atol=1e-5
        )  # parts of many tokens are summed apart
        results.append(main)
    assert torch.equal(*results)


@pytest.mark.usefixtures("_require_library")
def test_a_product_of_parts_of_larger_tensors_writes_to_its_part_alone() -> None:
    grad, x, main = _random(9, 40)[1:, 5:30], _random(9, 70, seed=3)[:8, 3:60], torch.ones(30, 80)
    wanted = main.clone().double()
    wanted[2:27, 4:61] += grad.double().t() @ x.double()
    cpp.add_product(main[2:27, 4:61], grad, x, first=False, rounded=False)
    torch.testing.assert_close(main.double(), wanted, rtol=1e-5, atol=1e-5)
    turned = torch.zeros(25, 57)
    cpp.add_product(turned, grad.t().contiguous().t(), x, first=True, rounded=False)
    torch.testing.assert_close(turned.double(), wanted[2:27, 4:61] - 1, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_require_library")
@pytest.mark.parametrize("first", [False, True])
def test_a_product_over_no_tokens_is_zero(first: bool) -> None:
    main = torch.ones(4, 3)
    cpp.add_product(main, _random(0, 4), _random(0, 3), first=first, rounded=False)
    assert torch.equal(main, torch.zeros(4, 3) if first else torch.ones(4, 3))


@pytest.mark.usefixtures("_require_library", "_threads")
@pytest.mark.parametrize(
    ("tokens", "into", "out"),
    [(128, 128, 128), (129, 131, 145), (200, 2050, 150), (131, 300, 3100), (1100, 130, 160)],
)
def test_a_linear_layer_and_its_inputs_gradient_by_any_number_of_threads(
    tokens: int, into: int, out: int
) -> None:
    x, weight = _random(tokens, 2, into).float()[:, 1], _random(out, into + 3, seed=1).float()[:, 2:-1]
    bias, grad = _random(out, seed=2).float(), _random(tokens, out, seed=3).float()
    wanted = x.double() @ weight.double().t()
    for weight_argument, turned, exact in (
        ((x, weight, bias), False, wanted + bias.double()),
        ((x, weight, None), False, wanted),
        ((grad, weight.t(), None), True, grad.double() @ weight.double()),
    ):
        found = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(cpp.linear(*weight_argument))
        torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-4, msg=str(turned))
        assert all(torch.equal(found[0], result) for result in found)


@pytest.mark.usefixtures("_require_library")
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others() -> None:
    x, weight = _random(300, 140).float(), _random(150, 140, seed=1).float()
    whole = cpp.linear(x, weight)
    assert torch.equal(cpp.linear(x[100:240], weight), whole[100:240])


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.float32), (127, torch.float32), (128, BF16), (128, torch.float64)]
)
def test_a_small_linear_layer_and_other_dtypes_are_left_to_torch(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        _random(*n, seed=i).to(dtype) for i, n in enumerate([(tokens, 130), (128, 130), (128,)])
    )
    assert torch.equal(cpp.linear(x, weight, bias), products.linear(x, weight, bias))
    square = torch.ones(130, 260)[:, ::2]  # no numbers beside each other
    assert torch.equal(cpp.linear(x.float(), square), products.linear(x.float(), square))


@pytest.mark.parametrize("case", ["weight's dtype", "bias's dtype", "weight's columns", "dimensions"])
def test_a_linear_layer_whose_parts_do_not_fit_is_torchs_to_answer(case: str) -> None:
    x, weight, bias = torch.ones(130, 140), torch.ones(150, 140), torch.ones(150)
    if case == "dimensions":
        assert torch.equal(cpp.linear(x[None], weight, bias)[0], products.linear(x, weight, bias))
        return
    weight = weight.to(BF16) if case == "weight's dtype" else weight
    weight = weight[:, :-1].clone() if case == "weight's columns" else weight
    bias = bias.to(BF16) if case == "bias's dtype" else bias
    with pytest.raises(RuntimeError, match="dtype|shapes"):
        cpp.linear(x, weight, bias)


@pytest.mark.usefixtures("_require_library")
@pytest.mark.parametrize(("vendor", "ours"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_float32_layers_are_ours_on_amds_cpus(
    monkeypatch: pytest.MonkeyPatch, vendor: str, ours: bool
) -> None:
    monkeypatch.setattr(cpp, "cpu_vendor", lambda: vendor)
    assert ("linear" in cpp.build_overrides()) == ours


def test_the_vendor_of_a_cpu_that_does_not_say_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_not_found(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", raise_not_found)
    assert cpp_library.cpu_vendor.__wrapped__() == ""


@pytest.mark.usefixtures("_require_library")
@pytest.mark.parametrize(("out", "into"), [(0, 3), (4, 0), (0, 0)])
def test_a_weight_of_no_rows_or_columns_has_no_gradient(out: int, into: int) -> None:
    """As of the share of a rank of tp that holds padding alone."""
    main = torch.ones(out, into)
    cpp.add_product(main, _random(5, out), _random(5, into), first=True, rounded=False)
    assert main.shape == (out, into)


def _run_attention(kernel: object, inputs: list[Tensor], grad: Tensor, visible: Visible) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = kernel(*leaves, visible)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.usefixtures("_require_library", "_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "queries", "keys", "width", "visible"),
    [
        (2, 4, 2, 32, 32, 16, "before"),
        (1, 1, 1, 2, 2, 2, None),
        (1, 1, 1, 9, 9, 7, "before"),
        (1, 2, 1, 7, 33, 34, "before"),
        (2, 6, 6, 130, 130, 64, "before"),
        (1, 4, 4, 97, 300, 80, None),
        (1, 2, 2, 5, 1500, 128, "before"),
        (1, 1, 1, 40, 4500, 32, "before"),
    ],
)
def test_attention_and_its_gradients_are_the_definitions(
    rows: int,
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    width: int,
    visible: Visible,
    dtype: torch.dtype,
) -> None:
    q = _random(rows, queries, heads, width).transpose(1, 2)
    k = _random(rows, key_heads, keys, width, seed=1)
    v = _random(rows, keys, 2, key_heads, width, seed=2)[:, :, 1].transpose(1, 2)
    grad = _random(rows, heads, queries, width, seed=3)
    wanted = _run_attention(reference.attention, [x.double() for x in (q, k, v)], grad, visible)
    torch.set_num_threads(2)
    found = _run_attention(cpp.attention, [x.to(dtype) for x in (q, k, v)], grad, visible)
    # probabilities and the scores' gradients are rounded before they are multiplied
    share = 2 * torch.finfo(dtype).eps if dtype == BF16 else 1e-6
    for actual, exact in zip(found, wanted, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(
            actual.double(), exact, rtol=share, atol=2 * share * float(exact.abs().max())
        )


@pytest.mark.usefixtures("_require_library")
def test_what_attention_in_cpp_is_not_for_is_left_to_others() -> None:
    q, k, v = (_random(1, 2, 6, 7, seed=i) for i in range(3))  # of an odd width
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    exact = reference.attention(q.double(), k.double(), v.double(), mask)
    for visible in (mask, "before"):
        torch.testing.assert_close(cpp.attention(q, k, v, visible).double(), exact, rtol=0.02, atol=0.02)
    single = cpp.attention(q[:, :, -1:], k, v, "before")
    torch.testing.assert_close(single.double(), exact[:, :, -1:], rtol=0.02, atol=0.02)
    half = [x.half() for x in (q, k, v)]
    torch.testing.assert_close(cpp.attention(*half, "before").double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("_require_library", "_threads")
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 2**-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 16), (7, 300), (129, 128)])
def test_gelu_and_its_gradients_are_the_definitions(
    rows: int, columns: int, with_bias: bool, dtype: torch.dtype, share: float
) -> None:
    x, grad = (4 * _random(rows, columns)).to(dtype), _random(rows, columns, seed=1).to(dtype)
    bias = _random(columns, seed=2).to(dtype) if with_bias else None
    torch.set_num_threads(2)
    leaves = [tensor.requires_grad_() for tensor in (x, bias) if tensor is not None]
    out = cpp.bias_gelu(x, bias, "tanh")
    grads = torch.autograd.grad(out, leaves, grad)
    # the sum of x and bias is rounded in both
    exact = (x if bias is None else x + bias).detach().double().requires_grad_()
    wanted = reference.bias_gelu(exact, None, "tanh")
    (slope,) = torch.autograd.grad(wanted, exact, grad.double())
    torch.testing.assert_close(out.double(), wanted, rtol=share, atol=1e-6)
    torch.testing.assert_close(grads[0].double(), slope, rtol=share, atol=1e-6)
    if with_bias:
        torch.testing.assert_close(
            grads[1].double(), slope.sum(0), rtol=2 * share, atol=3 * share * rows**0.5
        )


@pytest.mark.usefixtures("_require_library")
def test_gelu_of_extremes() -> None:
    x = torch.tensor([torch.nan, torch.inf, 1e30, 200, 0, -200, -1e30]).to(BF16)
    output = cpp.bias_gelu(x[None], None, "tanh")[0]
    assert torch.equal(output.nan_to_num(7), torch.tensor([7, *x[1:5], 0, 0]).to(BF16).nan_to_num(7))
    erf = cpp.bias_gelu(x[None], None, "none")[0]
    assert torch.equal(erf.nan_to_num(7), reference.bias_gelu(x[None], None, "none")[0].nan_to_num(7))


@pytest.mark.usefixtures("_require_library", "_threads")
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 2**-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 17), (40, 500), (5, 4096)])
def test_the_cross_entropy_and_its_gradient_are_the_definitions(
    tokens: int, columns: int, scale: float | None, dtype: torch.dtype, share: float
) -> None:
    logits = (5 * _random(tokens, columns)).to(dtype)
    target = torch.arange(tokens) % columns
    target[-1] = reference.IGNORED if tokens > 1 else 0
    exact, found = logits.double(), logits.clone()
    wanted = reference.cross_entropy(exact, target, ALONE, scale)
    torch.set_num_threads(2)
    kernel = cpp.build_overrides()["cross_entropy"]
    loss = kernel(found, target, ALONE, scale)
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    if scale is not None:
        torch.testing.assert_close(found.double(), exact, rtol=share, atol=1e-6 * share * scale)


@pytest.mark.usefixtures("_require_library")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_makes_a_loss_that_is_none(wrong: float) -> None:
    logits = _random(3, 40)
    logits[1, 7] = wrong
    loss = cpp.build_overrides()["cross_entropy"](logits, torch.tensor([1, 2, 3]), ALONE, 1.0)
    assert loss.isnan().tolist() == [False, True, False]
    assert logits.isnan().all(1).tolist() == [False, True, False]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, on a CPU that has the instructions; programs in `tmp_path` are found first."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(library.INSTRUCTIONS, True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    library.load_kernels.cache_clear()
    yield tmp_path
    library.load_kernels.cache_clear()


def _program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no C\+\+ compiler: .*nosuch is not on PATH; hint: apt-get install g\+\+"),
        ("echo 'x.h:3: error: unknown type' >&2; exit 1", r"failed: x.h:3: error: unknown type"),
        ("exit 1", r"failed: no error message"),
        # writes something that is no library to where -o says
        (
            'while [ "$1" != -o ]; do shift; done; echo no > "$2"',
            r"cannot be loaded: .*invalid ELF header|short",
        ),
    ],
)
def test_without_a_compiler_that_works_the_definitions_compute(
    text: str | None, message: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fresh / "nosuch"
    monkeypatch.setenv("CXX", str(path) if text is None else _program(path, text))
    monkeypatch.setattr(dispatch, "has_native", lambda half: True)
    with pytest.raises(cpp_library.CompileError, match=message):
        library.load_kernels()
    kernels = dispatch.choose_kernels("auto", torch.device("cpu"))
    assert kernels.kernels.add_product is products.add_product
    assert kernels.sources["add_product"] == "reference"
    with pytest.raises(cpp_library.CompileError, match=message):
        raise cpp_library.CompileError(kernels.reasons["add_product"])


def test_a_cpu_without_the_instructions_has_no_kernels_in_cpp(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    with pytest.raises(cpp_library.CompileError, match="no AVX-512 products of bfloat16"):
        library.load_kernels()


@pytest.mark.usefixtures("_require_library")
def test_a_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(library.load_kernels(), ctypes.CDLL)
    (library_file,) = (fresh / "cache" / "mega").iterdir()  # nothing is left beside it
    library.load_kernels.cache_clear()
    monkeypatch.setattr(cpp_library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert isinstance(library.load_kernels(), ctypes.CDLL)
    assert library_file.suffix == ".so"


@pytest.mark.usefixtures("_require_library")
def test_a_cache_that_cannot_be_written_is_no_error_of_a_run(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "cache").write_text("a file", "utf-8")
    with pytest.raises(cpp_library.CompileError, match="cannot be loaded: .*cache"):
        library.load_kernels()
