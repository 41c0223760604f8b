"""Damaged checkpoints are detected: wrong sizes and manifests when opened, other damage by verify."""

from __future__ import annotations

import contextlib
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.tensors import safetensors_io as ours
from mega_schema.checkpoint.checkpoint_dir import LATEST, MANIFEST, TRAINER
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.checkpoint.side_files import replace_manifest
from mega_schema.checkpoint.tracker import latest_checkpoint
from mega_schema.errors import FormatError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, gpt

Json = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, small_gpt: ModelSpec, random_whole: Any, save_whole: Any) -> Path:
    """A checkpoint of a 2 x 2 layout with optimizer state."""
    whole = random_whole(small_gpt, optimizer=True)
    run: Path = save_whole(tmp_path, small_gpt, whole, layout=Layout(tp=2, pp=2), iteration=4)
    return run


def _edit(folder: Path, change: Callable[[Json], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    replace_manifest(folder, json.dumps(manifest))


def _piece(manifest: Json) -> Json:
    piece: Json = manifest["tensors"][MODEL]["layers.1.up.weight"]["pieces"][0]
    return piece


def test_the_safetensors_library_reads_our_files(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    seen = 0
    for name in checkpoint.files:
        theirs = safetensors.numpy.load_file(folder / name)
        own_entries = ours.read_header(folder / name).entries
        assert theirs.keys() == own_entries.keys()
        for key, array in theirs.items():
            assert array.tobytes() == own_entries[key].values().tobytes()
            seen += array.nbytes
    assert seen == sum(piece.bytes for *_, piece in checkpoint.pieces())


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(3, np.float16)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"who": "them"})
    file = ours.read_header(tmp_path / "x.safetensors")
    assert file.metadata == {"who": "them"}
    assert {name: entry.values().tolist() for name, entry in file.entries.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_a_sound_checkpoint_is_found_sound(folder: Path) -> None:
    result = verify(Checkpoint.open(folder.parent))
    assert result.bytes == sum(p.bytes for *_, p in Checkpoint(folder).pieces())
    assert result.tensors == 4 * 40


ON_OPEN: dict[str, tuple[Callable[[Json], object], str]] = {
    "format of tomorrow": (lambda m: m.update(format=3), "format: found 3, wanted 1 or 2"),
    "format that is true": (lambda m: m.update(format=True), "format: found True, wanted 1 or 2"),
    "format that is no integer": (lambda m: m.update(format=1.0), "format: found 1.0, wanted 1 or 2"),
    "unknown namespace": (lambda m: m["tensors"].update(evil={}), "unknown namespace: found evil"),
    "no format": (lambda m: m.pop("format"), "format: found None"),
    "piece beyond the file": (lambda m: _piece(m).update(offset=10**9), "end of a piece"),
    "offset before the file": (lambda m: _piece(m).update(offset=-8), "-8"),
    "offset that is a text": (lambda m: _piece(m).update(offset="8"), "is not a manifest"),
    "offset that is infinite": (lambda m: _piece(m).update(offset=float("inf")), "is not a manifest"),
    "piece beyond the tensor": (lambda m: _piece(m).update(start=[60, 0]), "at (60, 0) of a tensor (64, 16)"),
    "piece of other dimensions": (lambda m: _piece(m).update(start=[0]), "is not a manifest"),
    "piece of fewer bytes": (lambda m: _piece(m).update(bytes=4), "bytes of a piece: found 4"),
    "empty piece": (lambda m: _piece(m).update(shape=[0, 16], bytes=0), "a piece (0, 16)"),
    "file that is a path": (
        lambda m: m["files"].update({"../x": 8}),
        "name outside the checkpoint: found ../x",
    ),
    "file that is the parent": (lambda m: m["files"].update({"..": 8}), "name outside the checkpoint"),
    "piece in a file of no list": (
        lambda m: _piece(m).update(file="../../x"),
        "is not listed: found ../../x",
    ),
    "namespace that is a path": (lambda m: m["tensors"].update({"../x": {}}), "name outside"),
    "file that is missing": (lambda m: m["files"].update({"more.safetensors": 8}), "missing file"),
    "size that is a text": (
        lambda m: m["files"].update({"model-00000.safetensors": "8"}),
        "is not a manifest",
    ),
    "unknown dtype": (lambda m: m["tensors"][MODEL]["embed.weight"].update(dtype="Q4"), "dtype Q4"),
    "no tensors": (lambda m: m.pop("tensors"), "is not a manifest: found KeyError 'tensors'"),
    "tensors in a list": (lambda m: m.update(tensors=[]), "is not a manifest"),
    "iteration below 0": (lambda m: m.update(iteration=-1), "is not a manifest"),
    "unknown key of the model": (lambda m: m["model"].update(hiden=3), "did you mean hidden?"),
    "layers without end": (lambda m: m["model"].update(layers=2**70), "more layers than tensors"),
    "model without layers": (lambda m: m["model"].update(layers=0), "model.layers: not a count"),
    "eps that is a text": (lambda m: m["model"].update(norm_eps="small"), "model.norm_eps: not a number"),
}


@pytest.mark.parametrize("what", ON_OPEN)
def test_a_manifest_that_was_tampered_with_is_refused_on_open(folder: Path, what: str) -> None:
    change, message = ON_OPEN[what]
    _edit(folder, change)
    with pytest.raises(FormatError) as caught:
        Checkpoint.open(folder.parent)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def _swap(manifest: Json) -> None:
    a, b = manifest["tensors"][MODEL]["layers.1.up.weight"]["pieces"]
    a["start"], b["start"] = b["start"], a["start"]


def _twice(manifest: Json) -> None:
    a, b = manifest["tensors"][MODEL]["layers.1.up.weight"]["pieces"]
    b["start"] = [16, 0]


ON_VERIFY: dict[str, tuple[Callable[[Json], object], str]] = {
    "tensor that is missing": (
        lambda m: m["tensors"][MODEL].pop("final_norm.bias"),
        "model has no tensor: wanted final_norm.bias",
    ),
    "tensor that is missing from the optimizer": (
        lambda m: m["tensors"]["optim.exp_avg"].pop("position.weight"),
        "optim.exp_avg has no tensor: wanted position.weight",
    ),
    "tensor that is extra": (
        lambda m: m["tensors"][MODEL].update(more=m["tensors"][MODEL]["embed.weight"]),
        "has a tensor that is not in the model: found more",
    ),
    "tensor of another shape": (
        lambda m: m["tensors"][MODEL]["embed.weight"].update(shape=[40, 16]),
        "model embed.weight: shape: found (40, 16), wanted (37, 16)",
    ),
    "no model": (lambda m: m["tensors"].pop(MODEL), "namespace missing"),
    "pieces that overlap": (_twice, "two pieces overlap: found model-00000.safetensors and model-00001"),
    "pieces that leave a hole": (
        lambda m: m["tensors"][MODEL]["layers.1.up.weight"]["pieces"].pop(),
        "elements covered by pieces: found 512, wanted 1024",
    ),
    "pieces that were exchanged": (_swap, "header and manifest disagree"),
    "dtype of the same width": (
        lambda m: m["tensors"][MODEL]["embed.weight"].update(dtype="I32"),
        "header and manifest disagree: found F32",
    ),
    "checksum": (lambda m: _piece(m).update(crc32=1), "crc32: found"),
    "first moments without the second": (
        lambda m: m["tensors"].pop("optim.exp_avg_sq"),
        "namespace missing: found optim.exp_avg alone, wanted optim.exp_avg_sq",
    ),
    "second moments without the first": (
        lambda m: m["tensors"].pop("optim.exp_avg"),
        "namespace missing: found optim.exp_avg_sq alone, wanted optim.exp_avg",
    ),
    "moments that are integers": (
        lambda m: m["tensors"]["optim.exp_avg"]["embed.weight"].update(dtype="I32"),
        "optim.exp_avg embed.weight: dtype: found I32, wanted F32",
    ),
}


@pytest.mark.parametrize("what", ON_VERIFY)
def test_verify_detects_a_wrong_manifest(folder: Path, what: str) -> None:
    change, message = ON_VERIFY[what]
    _edit(folder, change)
    with pytest.raises(FormatError) as caught:
        verify(Checkpoint.open(folder.parent))
    assert message in str(caught.value)


ODD = [None, True, -1, 0, 1, 2**70, 1e308, float("nan"), "x", "", [], {}, [1], {"a": 1}, "../x", [None], -0.5]


MUTATIONS = 5000  # of manifests and headers, half of each


@pytest.fixture
def smallest(tmp_path: Path, random_whole: Any, save_whole: Any) -> Path:
    """A checkpoint of one layer and its weights, which is quickly verified."""
    spec = gpt(layers=1, hidden=8, heads=2, vocab=11, max_seq_len=4)
    run: Path = save_whole(tmp_path / "run", spec, random_whole(spec), layout=Layout(tp=2), iteration=4)
    return run


def test_no_manifest_makes_a_traceback_or_takes_memory(smallest: Path) -> None:
    file, rng = smallest / MANIFEST, random.Random(5)
    text, refused = file.read_text("utf-8"), 0
    places = list(_places(json.loads(text)))[1:]
    short = [place for place in places if len(place) < 4]
    with _little_memory():
        for turn in range(MUTATIONS // 2):
            if turn % 5 == 4:
                changed = _garble(text.encode(), rng)
            else:
                manifest = node = json.loads(text)
                *way, last = rng.choice(short if turn % 2 else places)
                for key in way:
                    node = node[key]
                node[last] = rng.choice(ODD)
                changed = json.dumps(manifest).encode()
            file.write_bytes(changed)
            refused += _fault(smallest) is not None  # anything but a MegaError is a traceback, and fails here
    assert refused > MUTATIONS * 0.35


def test_no_header_makes_a_traceback_or_takes_memory(smallest: Path) -> None:
    file, rng = smallest / "model-00001.safetensors", random.Random(6)
    before = file.read_bytes()
    length = 8 + int.from_bytes(before[:8], "little")
    entries = json.loads(before[8:length])
    places = list(_places(entries))[1:]
    refused = 0
    with _little_memory():
        for turn in range(MUTATIONS // 2):
            if turn % 2:
                header = _garble(before[:length], rng)
            else:
                changed = node = json.loads(json.dumps(entries))
                *way, last = rng.choice(places)
                for key in way:
                    node = node[key]
                node[last] = rng.choice(ODD)
                text = json.dumps(changed).encode()
                header = len(text).to_bytes(8, "little") + text
            file.write_bytes(header + before[length:])
            with contextlib.suppress(FormatError):
                ours.read_header(file)
                continue
            refused += 1
    assert refused > MUTATIONS * 0.35


def _garble(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, left out, doubled, or cut off."""
    begin, length = rng.randrange(len(data)), rng.randrange(1, 9)
    match rng.randrange(4):
        case 0:
            return data[:begin] + rng.randbytes(length) + data[begin + length :]
        case 1:
            return data[:begin] + data[begin + length :]
        case 2:
            return data[: begin + length] + data[begin:]
        case _:
            return data[:begin]


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """The block may take 100 MB more than there is taken now."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    bytes_taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert bytes_taken < 100_000, f"{bytes_taken} KiB more"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _places(value[key], (*place, key))


@pytest.mark.parametrize("name", [MANIFEST, TRAINER])
@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=name):
        Checkpoint.open(folder.parent)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_file_is_refused_on_open(folder: Path, cut: int) -> None:
    file = folder / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(FormatError, match=r"model-00001.safetensors: size in bytes: found \d+, wanted \d+"):
        Checkpoint.open(folder.parent)


@pytest.mark.parametrize("name", ["model-00001.safetensors", TRAINER])
def test_a_missing_file_is_refused_on_open(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FormatError, match=f"{name}: missing"):
        Checkpoint.open(folder.parent)


def test_any_flipped_byte_of_the_values_is_found(folder: Path) -> None:
    checkpoint, rng = Checkpoint(folder), np.random.default_rng(3)
    pieces = list(checkpoint.pieces())
    for number in rng.choice(len(pieces), 40):
        _, name, _, piece = pieces[number]
        with _FlippedByte(
            folder / piece.file, piece.offset + int(rng.integers(piece.bytes)), int(rng.integers(1, 256))
        ):
            with pytest.raises(FormatError) as caught:
                verify(Checkpoint(folder))
            assert f"{piece.file}: " in str(caught.value)
            assert name in str(caught.value)
    verify(checkpoint)


def test_a_flipped_byte_of_a_header_is_found_unless_it_says_the_same(folder: Path) -> None:
    file, rng = folder / "model-00003.safetensors", np.random.default_rng(4)
    before = ours.read_header(file)
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    found_count = 0
    for offset in (*range(8), *rng.integers(8, length, 60).tolist()):
        with _FlippedByte(file, offset, int(rng.integers(1, 256))):
            fault = _fault(folder)
            if fault is None:  # white space for white space
                assert ours.read_header(file) == before
            else:
                assert file.name in fault
                found_count += 1
    assert found_count > 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "content"),
        ("release", "content"),
        ("4x", "content"),
        ("²", "content"),
        ("9" * 5000, "content"),
        ("5", "iter_0000005"),
    ],
)
def test_a_tracker_that_names_no_checkpoint_is_refused(folder: Path, text: str, message: str) -> None:
    (folder.parent / LATEST).write_text(text, "utf-8")
    with pytest.raises(FormatError) as caught:
        latest_checkpoint(folder.parent)
    assert message in str(caught.value)


def _fault(folder: Path) -> str | None:
    try:
        verify(Checkpoint(folder))
    except MegaError as error:
        return str(error)
    return None


class _FlippedByte:
    """One byte of a file is another while the block runs."""

    def __init__(self, path: Path, offset: int, mask: int) -> None:
        self.path, self.offset, self.mask = path, offset, mask

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            old = file.read(1)[0]
            file.seek(self.offset)
            file.write(bytes([old ^ self.mask]))
