"""Files of torch.save read without torch, compared with torch.load; and Megatron's own files."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_ckpt.torch_files.pickle_reader import EnumMember, PickleFile, Record, Unpickler, open_file
from mega_schema.errors import FormatError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
KINDS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def bits(tensor: torch.Tensor) -> bytes:
    """In C order."""
    return tensor.detach().contiguous().view(KINDS.get(tensor.dtype, tensor.dtype)).numpy().tobytes()


def stored_bits(stored: MappedTensor) -> bytes:
    """Taken from the file by hand, of any dtype."""
    width = stored.bytes // max(1, int(np.prod(stored.shape)))
    if stored.bytes == 0:
        return b""
    raw = np.memmap(stored.file, np.uint8, "r")[stored.offset :]
    if stored.strides is None:
        return raw[: stored.bytes].tobytes()
    steps = (*(step * width for step in stored.strides), 1)
    return np.lib.stride_tricks.as_strided(raw, (*stored.shape, width), steps).tobytes()


def count_equal(ours: Any, theirs: Any) -> int:
    """Compare two trees; the count of tensors."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, MappedTensor)
        assert ours.shape == tuple(theirs.shape)
        assert stored_bits(ours) == bits(theirs)
        return 1
    if isinstance(theirs, argparse.Namespace):
        assert isinstance(ours, Record)
        assert ours.kind == "argparse.Namespace"
        return count_equal(ours.fields, vars(theirs))
    if isinstance(theirs, Mapping):
        assert isinstance(ours, dict)
        assert list(ours) == list(theirs)
        return sum(count_equal(ours[key], value) for key, value in theirs.items())
    if isinstance(theirs, list | tuple):
        assert type(ours) is (tuple if isinstance(theirs, tuple) else list)
        assert len(ours) == len(theirs)
        return sum(count_equal(item, value) for item, value in zip(ours, theirs, strict=True))
    if isinstance(theirs, enum.Enum):
        assert isinstance(ours, EnumMember)
        assert (ours.value, ours.name) == (theirs.value, theirs.name)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    elif isinstance(theirs, torch.dtype):
        assert ours == str(theirs)
    elif theirs != theirs:
        assert ours != ours
    else:
        assert ours == theirs
        assert type(ours) is type(theirs)
    return 0


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module in which the pickles of the oracle look for their enum."""
    module = types.ModuleType("megatron.core.enums")
    names = "encoder_or_decoder encoder_and_decoder retro_encoder retro_decoder"
    module.ModelType = enum.Enum("ModelType", names, module=module.__name__)  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.enums", module)


@pytest.mark.usefixtures("megatron")
def test_every_value_of_megatrons_own_files_is_what_torch_loads(golden: Path) -> None:
    files = sorted(golden.glob("legacy_ckpt/*/*/*/model_optim_rng.pt"))
    files += [golden / "torch_dist_sample/common.pt", *golden.parent.glob("data/checkpoints/*/*model.bin")]
    assert len(files) > 12
    seen = 0
    with Unpickler() as unpickler:
        for file in files:
            seen += count_equal(unpickler.open(file).tree, torch.load(file, "cpu", weights_only=False))
    assert seen > 300


def test_a_tensor_is_found_under_its_dotted_name(golden: Path) -> None:
    opened = open_file(golden / "legacy_ckpt/gpt-tp1pp1/iter_0000005/mp_rank_00/model_optim_rng.pt")
    name = "model.language_model.encoder.layers.3.mlp.dense_4h_to_h.weight"
    assert opened.entry(name) == opened.tensors()[name]
    assert opened.entry(name).shape == (24, 96)
    assert opened.entry("args.num_layers") == 4
    assert opened.entry("args.model_type").name == "encoder_or_decoder"


def test_the_tensors_of_a_torch_dist_folder_are_files_in_files(golden: Path) -> None:
    folder = golden / "torch_dist_sample"
    with Unpickler() as unpickler:
        metadata = unpickler.open(folder / ".metadata")
        places, seen = metadata.entry("storage_data").values(), 0
        for place in places:
            begin, length = place.fields["offset"], place.fields["length"]
            file = folder / place.fields["relative_path"]
            opened = unpickler.open(file, begin, length)
            raw = io.BytesIO(file.read_bytes()[begin : begin + length])
            seen += count_equal(opened.tree, torch.load(raw, weights_only=False))
    entries = metadata.entry("state_dict_metadata").values()
    assert seen == sum(len(tensor.fields.get("chunks", ())) for tensor in entries) == 40


def save_and_open(folder: Path, value: Any, **how: Any) -> PickleFile:
    torch.save(value, folder / "file.pt", **how)
    return open_file(folder / "file.pt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves_is_what_is_read(tmp_path: Path, zipped: bool, protocol: int) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(6, 8, generator=generator)
    tree = {
        "kinds": [(whole * 50).to(dtype) for dtype in DTYPES],
        "views": (whole, whole[2], whole[1:3, ::2], whole.T, whole[:, 3], whole[:0]),
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(whole.clone()),
        "module": torch.nn.Linear(3, 2).state_dict(),
        "dtype": torch.bfloat16,
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "default": defaultdict(dict, {1: {"step": 4}}),
        (0, "a key"): [None, True, False, -1, 2**40, -(2**70), 1.5, float("nan"), "ü", b"\x00\xff"],
        "numpy": [np.arange(6, dtype=np.uint32).reshape(2, 3), np.asfortranarray([[1.5, 2], [3, 4]])],
        "args": argparse.Namespace(num_layers=2, params_dtype=torch.float16, name="x"),
        "rng": np.random.RandomState(1).get_state(),
    }  # fmt: skip
    opened = save_and_open(tmp_path, tree, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    assert count_equal(opened.tree, tree) == 21


def test_tensors_that_share_numbers_share_them_in_the_file(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    opened = save_and_open(tmp_path, {"embed": weight, "head": weight, "row": weight[1]})
    assert opened.entry("embed") == opened.entry("head")
    assert opened.entry("row").offset == opened.entry("embed").offset + 8


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32])
def test_numbers_of_newer_types_are_read(tmp_path: Path, kind: torch.dtype) -> None:
    tree = [torch.arange(8).to(kind)[2:6]]
    assert count_equal(save_and_open(tmp_path, tree).tree, tree) == 1


def test_a_number_of_numpy_is_a_number(tmp_path: Path) -> None:
    assert save_and_open(tmp_path, [np.float64(1.5), np.int64(-3), np.bool_(True)]).tree == [1.5, -3, True]


def test_a_set_is_a_set(tmp_path: Path) -> None:
    assert save_and_open(tmp_path, [{1, 2}, frozenset({"a"})]).tree == [{1, 2}, {"a"}]


def test_a_file_from_before_1_6_that_was_written_to_is_refused_or_read(tmp_path: Path) -> None:
    path, rng = tmp_path / "model.pt", random.Random(6)
    tree = {"model": torch.nn.Linear(3, 5).state_dict(), "args": argparse.Namespace(layers=3)}
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    outcomes: Counter[bool] = Counter()
    with Unpickler() as unpickler:
        for _ in range(1000):
            changed = bytearray(raw)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(16, len(raw))] = rng.randrange(256)
            path.write_bytes(changed[: rng.choice([len(raw), len(raw), rng.randrange(16, len(raw))])])
            with contextlib.suppress(FormatError):
                for stored in unpickler.open(path).tensors().values():
                    assert len(stored_bits(stored)) == stored.bytes
                outcomes[True] += 1
                continue
            outcomes[False] += 1
    assert min(outcomes[True], outcomes[False]) > 20
