"""Files of torch.save written without torch, checked with torch.load."""

from __future__ import annotations

import argparse
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import GlobalName, Record, open_file
from mega_schema.checkpoint.reader import DTYPES

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
CRC32 = torch.serialization.get_crc32_options()
SAFE = [argparse.Namespace]


def numbers(tensor: TensorHeader) -> np.ndarray:
    """Any bits; those of NaNs among them."""
    width = DTYPES[tensor.dtype].itemsize
    rng = np.random.default_rng(len(tensor.name))
    raw = rng.integers(0, 256, (*tensor.shape, width), np.uint8)
    return raw.view(DTYPES[tensor.dtype])[..., 0]


def row_bands(tensor: TensorHeader) -> Iterator[np.ndarray]:
    """A row at a time."""
    whole = numbers(tensor)
    yield from (whole[row : row + 1] for row in range(len(whole))) if tensor.shape else [whole]


def same_bits(theirs: torch.Tensor, tensor: TensorHeader) -> bool:
    assert theirs.dtype == TORCH[tensor.dtype]
    assert theirs.shape == tensor.shape
    assert theirs.is_contiguous()
    return theirs.flatten().view(torch.uint8).numpy().tobytes() == numbers(tensor).tobytes()


@pytest.fixture
def tensors() -> list[TensorHeader]:
    shapes = [(5, 3), (1,), (), (0, 4), (2, 3, 4), (130,), (7, 1)]
    return [TensorHeader(f"tensor {kind}", kind, shape) for kind, shape in zip(TORCH, shapes, strict=True)]


@pytest.mark.parametrize("how", [{"weights_only": True}, {"weights_only": False}, {"mmap": True}])
def test_torch_loads_what_was_written(tmp_path: Path, tensors: list[TensorHeader], how: Any) -> None:
    tree = {
        "model": OrderedDict((tensor.name, tensor) for tensor in tensors),
        "list": [
            1,
            -2,
            300,
            70_000,
            -(2**31),
            2**31,
            -(2**63),
            2**200,
            1.5,
            float("-inf"),
            True,
            False,
            None,
        ],
        "tuple": ((), (1,), ("ü", ""), []),
        (0, 1): {2: {"deep": GlobalName("torch.bfloat16")}},
        "args": Record(
            "argparse.Namespace", (), {"num_layers": 2, "params_dtype": GlobalName("torch.float16")}
        ),
        "device": Record("torch.device", ("cpu",), {}),
        "bytes": b"\x00\xff",
        "set": {1, 2},
    }
    zip_writer.write(tmp_path / "f.pt", tree, row_bands)
    with torch.serialization.safe_globals(SAFE):
        theirs = torch.load(tmp_path / "f.pt", "cpu", **how)
    model = theirs.pop("model")
    assert type(model) is OrderedDict
    assert [same_bits(model[tensor.name], tensor) for tensor in tensors] == [True] * len(tensors)
    args = argparse.Namespace(num_layers=2, params_dtype=torch.float16)
    nested = {"deep": torch.bfloat16}
    assert theirs == {
        **{key: tree[key] for key in ("list", "tuple", "bytes", "set")},
        (0, 1): {2: nested},
        "args": args,
        "device": torch.device("cpu"),
    }


def test_what_was_written_is_what_is_read_again(tmp_path: Path, tensors: list[TensorHeader]) -> None:
    rng = np.random.RandomState(1).get_state()
    tree = {"tensors": tensors, "rng": list(rng), "enum": [], "order": np.arange(6).reshape(2, 3).T}
    zip_writer.write(tmp_path / "f.pt", tree, row_bands)
    opened = open_file(tmp_path / "f.pt")
    for number, tensor in enumerate(tensors):
        stored = opened.entry(f"tensors.{number}")
        assert (stored.dtype, stored.shape, stored.strides) == (tensor.dtype, tensor.shape, None)
        assert stored.values().tobytes() == numbers(tensor).tobytes()
        assert stored.offset % 64 == 0
    np.testing.assert_array_equal(opened.entry("order"), tree["order"])
    np.testing.assert_array_equal(opened.entry("rng.1"), rng[1])
    reloaded = torch.load(tmp_path / "f.pt", weights_only=False)
    np.testing.assert_array_equal(reloaded["order"], tree["order"])


def test_one_announcement_at_two_places_is_one_tensor_in_memory(tmp_path: Path) -> None:
    tied = TensorHeader("embed", "F32", (3, 2))
    zip_writer.write(tmp_path / "f.pt", {"embed": tied, "head": tied}, row_bands)
    theirs = torch.load(tmp_path / "f.pt")
    assert theirs["embed"].data_ptr() == theirs["head"].data_ptr()


def test_a_rebuilt_file_of_megatrons_is_the_file(golden: Path, tmp_path: Path) -> None:
    opened = open_file(golden / "legacy_ckpt/gpt-tp1pp1/iter_0000005/mp_rank_00/model_optim_rng.pt")
    stored = opened.tensors()
    announced = {place: TensorHeader(name, place.dtype, place.shape) for name, place in stored.items()}

    def replace_tensors(value: Any) -> Any:
        if isinstance(value, MappedTensor):
            return announced[value]
        if isinstance(value, dict):
            return {key: replace_tensors(child) for key, child in value.items()}
        return value

    zip_writer.write(
        tmp_path / "f.pt", replace_tensors(opened.tree), lambda tensor: [stored[tensor.name].values()]
    )
    reloaded = open_file(tmp_path / "f.pt")
    assert reloaded.entry("args").fields == opened.entry("args").fields
    assert reloaded.entry("args.model_type").name == "encoder_or_decoder"
    written = reloaded.tensors()
    assert list(written) == list(stored)
    for name, tensor in stored.items():
        assert written[name].values().tobytes() == tensor.values().tobytes()


def test_a_file_beyond_four_bytes_of_size_is_read_by_all(
    tmp_path: Path, tensors: list[TensorHeader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 40)  # a few gigabytes say the same and take a disk
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 3)
    zip_writer.write(tmp_path / "f.pt", tensors, row_bands)
    monkeypatch.undo()
    for theirs, tensor in zip(torch.load(tmp_path / "f.pt"), tensors, strict=True):
        assert same_bits(theirs, tensor)
    for number, stored in open_file(tmp_path / "f.pt").tensors().items():
        assert stored.offset % 64 == 0
        assert stored.values().tobytes() == numbers(tensors[int(number)]).tobytes()
    assert zipfile.ZipFile(tmp_path / "f.pt").testzip() is None


def test_the_same_values_make_the_same_file(tmp_path: Path, tensors: list[TensorHeader]) -> None:
    for name in ("a", "b"):
        zip_writer.write(tmp_path / name, tensors, lambda tensor: [numbers(tensor)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_has_no_place_in_a_pickle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a pickle of object"):
        zip_writer.write(tmp_path / "f.pt", {"a": object()}, row_bands)
    assert not (tmp_path / "f.pt").exists()


def test_a_file_whose_checksums_torch_was_told_to_leave_out_is_read(tmp_path: Path) -> None:
    tree = {"weight": torch.arange(6, dtype=torch.float32)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, tmp_path / "f.pt")
    finally:
        torch.serialization.set_crc32_options(CRC32)
    assert open_file(tmp_path / "f.pt").entry("weight").values().tolist() == tree["weight"].tolist()
