"""Packed weights against F.linear; loading a checkpoint into them; the folder of compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.kernels.numba import NumbaKernels, load_kernels
from mega_model.runtime import Runtime
from mega_schema.app.kernel_cache import check_private_folder, has_compiled_kernels
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, CorruptFileError
from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.engine_factory import build_engine
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import Int8Linear, PackedLinear, choose_packing
from mega_serve.execution.weight_loading import LoadReport, compute_dtype, load_weights
from tests.serving.cpu_products import needs_int8
from tests.serving.damaged_checkpoint import copy_damaged

SHAPES = [(64, 192), (576, 64), (40, 100), (96, 131), (1088, 70)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> NumbaKernels:
    return load_kernels()


def _case(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(inputs * outputs + rows)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_packed_products_equal_linear(
    kernels: NumbaKernels, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for rows in (1, 2, 3, 4, 9, 130):
        x, weight, bias = _case(inputs, outputs, rows, dtype)
        packed = PackedLinear(weight, kernels)
        for b in (bias, None):
            torch.testing.assert_close(
                packed(x, weight, b), F.linear(x, weight, b), rtol=tolerance, atol=tolerance
            )


def test_an_input_of_another_width_or_dtype_is_refused(kernels: NumbaKernels) -> None:
    x, weight, bias = _case(64, 128, 2, torch.float32)
    packed = PackedLinear(weight, kernels)
    for wrong in (x[:, :32], x.bfloat16()):
        with pytest.raises(AssertionError, match="inputs of"):
            packed(wrong, weight, bias)


@needs_int8
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int8_products_have_an_error_below_two_percent(inputs: int, outputs: int) -> None:
    for rows in (1, 5, 40):
        x, weight, bias = _case(inputs, outputs, rows, torch.float32)
        x[0] = 0.0
        expected = F.linear(x, weight, bias)
        error = Int8Linear(weight)(x, weight, bias) - expected
        assert float(error.norm() / expected.norm()) < 0.02
        assert torch.equal(error[0], torch.zeros(outputs))


@pytest.mark.parametrize("has_products", [pytest.param(True, marks=needs_int8), False])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (1201, 64)])
def test_int8_products_are_exact_sums_of_integers(
    kernels: NumbaKernels,
    inputs: int,
    outputs: int,
    has_products: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mega_serve.execution.packed_weights.has_int8_products", lambda: has_products)
    for rows in (1, 3, 8, 9, 40):
        x, weight, bias = _case(inputs, outputs, rows, torch.bfloat16)
        weight[0] = weight[0].abs()
        x[-1] = x[-1].abs()  # sums near the largest that these integers have
        scale_x, scale_w = (t.float().abs().amax(1) / 127 for t in (x, weight))
        integers_x, integers_w = (
            (t.float() / scale[:, None]).round().long() for t, scale in ((x, scale_x), (weight, scale_w))
        )
        sums = (integers_x @ integers_w.T).float()
        expected = (sums * scale_w * scale_x[:, None]).bfloat16()
        actual = Int8Linear(weight, kernels)(x, weight)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=0.0)  # a rounding of bfloat16
        assert float((actual == expected).float().mean()) > 0.99
        with_bias = Int8Linear(weight, kernels)(x, weight, bias)
        torch.testing.assert_close(with_bias.float(), expected.float() + bias, rtol=1e-2, atol=1e-2)


@needs_int8
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int8_products_by_numba_equal_those_by_torch(
    kernels: NumbaKernels, inputs: int, outputs: int
) -> None:
    for rows in (1, 2, 3, 5, 40):
        x, weight, bias = _case(inputs, outputs, rows, torch.bfloat16)
        assert Int8Linear(weight, kernels).panels is not None
        x[0] = 0.0
        for b in (bias, None):
            expected = Int8Linear(weight)(x, weight, b)
            assert torch.equal(Int8Linear(weight, kernels)(x, weight, b), expected)


def test_batch_invariance_without_numba_is_refused() -> None:
    with pytest.raises(ConfigError, match="--batch-invariant: needs the numba kernels, on a CPU"):
        choose_packing("float32", None, batch_invariant=True)


def test_batch_invariance_with_int8_is_refused(kernels: NumbaKernels) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_packing("int8", kernels, batch_invariant=True)
    assert str(caught.value) == (
        "--batch-invariant: training has no products of 8-bit integers: found --dtype int8, wanted "
        "float32 | bfloat16"
    )


def test_int8_without_numba_on_a_cpu_whose_products_overflow_is_refused(
    kernels: NumbaKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_serve.execution.packed_weights.has_int8_products", lambda: False)
    assert choose_packing("int8", kernels) is not None
    with pytest.raises(ConfigError, match=r"needs the numba kernels: found int8; hint: .*mega-serve\[cpu\]"):
        choose_packing("int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_checkpoint_computes_the_logits_of_the_whole_model(
    checkpoint: Path, kernels: NumbaKernels, dtype: str
) -> None:
    source = Checkpoint.open(checkpoint)
    number = compute_dtype(dtype)  # type: ignore[arg-type]
    rt = Runtime.single_process(source.spec, dtype=number)
    model, report = load_weights(source, rt, dtype=dtype, kernels=kernels)  # type: ignore[arg-type]
    assert report.bytes == sum(file.stat().st_size for file in source.folder.glob("model-*")) - _header(
        source
    )
    assert "checksums verified in" in str(report)
    runner = TorchModelRunner(model, RunnerOptions(kv_memory=1 << 20))
    ids = list(range(20))
    logits = runner.run([Chunk(ids, 0, [3, 1], 0)]).logits
    expected = load_model(source.spec, source.model_slab, dtype=number)
    with torch.inference_mode():
        wanted = expected(torch.tensor(ids), torch.arange(20), PackedAttention(1, 20))
    tolerance = 1e-4 if number == torch.float32 else 0.1
    torch.testing.assert_close(logits, wanted[:, : source.spec.vocab].float(), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (LoadReport(400_000, 0.001, 0.03), "0.4 MB of weights ready in 0.03 s"),
        (LoadReport(99_999_999, 0.05, 0.2), "100 MB of weights ready in 0.20 s"),
        (
            LoadReport(100_000_000, 0.1, 0.15, 0.05),
            "100 MB of weights ready in 0.15 s, 1.50 times the 0.10 s of reading them; "
            "checksums verified in 0.05 s",
        ),
    ],
)
def test_the_time_to_ready_is_compared_with_reading_where_reading_counts(
    report: LoadReport, line: str
) -> None:
    assert str(report) == line


def test_a_cache_of_kernels_is_empty_until_numba_has_written_an_index(tmp_path: Path) -> None:
    assert not has_compiled_kernels(tmp_path / "missing")
    (tmp_path / "kernels_1").mkdir()
    assert not has_compiled_kernels(tmp_path)
    (tmp_path / "kernels_1/products.f-1.py311.nbi").touch()
    assert has_compiled_kernels(tmp_path)


def test_a_flipped_bit_in_the_weights_is_refused_unless_verifying_is_off(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = copy_damaged(checkpoint, tmp_path / "copy").parent
    source = Checkpoint.open(folder)
    rt = Runtime.single_process(source.spec)
    with pytest.raises(CorruptFileError, match="values are not those that were written: crc32"):
        load_weights(source, rt, dtype="float32")
    _, report = load_weights(source, rt, dtype="float32", verify=False)
    assert report.verify_seconds is None
    assert "checksums" not in str(report)
    with pytest.raises(CorruptFileError, match="crc32"):
        build_engine({"load": str(folder), "device": "cpu"})
    assert build_engine({"load": str(folder), "device": "cpu", "verify": False}).model.iteration == 7


def _header(source: Checkpoint) -> int:
    pieces = [piece for space, _, _, piece in source.pieces() if space == "model"]
    return min(piece.offset for piece in pieces)


def test_a_cache_folder_that_others_can_use_is_refused(tmp_path: Path) -> None:
    private = tmp_path / "a" / "private"
    check_private_folder(private)
    assert private.stat().st_mode & 0o777 == 0o700
    check_private_folder(private)
    for mode in (0o770, 0o702, 0o750):
        private.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 700"):
            check_private_folder(private)
    private.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(private)
    with pytest.raises(ConfigError, match="not a folder"):
        check_private_folder(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="owner"):
        check_private_folder(folder)


def test_a_pool_without_room_for_a_page_is_refused(checkpoint: Path) -> None:
    source = Checkpoint.open(checkpoint)
    model, _ = load_weights(source, Runtime.single_process(source.spec), dtype="float32")
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        TorchModelRunner(model, RunnerOptions(kv_memory=100))


def test_chunks_outside_their_pages_are_refused(checkpoint: Path) -> None:
    source = Checkpoint.open(checkpoint)
    model, _ = load_weights(source, Runtime.single_process(source.spec), dtype="float32")
    runner = TorchModelRunner(model, RunnerOptions(kv_memory=1 << 20))
    for chunk in (
        Chunk([1] * 17, 0, [0], 0),
        Chunk([1], 16, [0], 0),
        Chunk([1], 0, [-1], 0),
        Chunk([1], 0, [runner.num_pages], 0),
        Chunk([], 0, [0], 0),
        Chunk([1], -1, [0], 0),
    ):
        with pytest.raises(AssertionError):
            runner.run([chunk])
