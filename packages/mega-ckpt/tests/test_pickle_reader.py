"""Files around pickles: other files, damaged files, and wrong answers of the sandbox process."""

from __future__ import annotations

import argparse
import pickle
import random
import re
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import pickle_reader, zip_writer
from mega_ckpt.torch_files.pickle_reader import Record, Unpickler, open_file
from mega_ckpt.torch_files.zip_reader import MAGIC
from mega_schema.errors import FormatError


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(full: str) -> bytes:
    module, _, last = full.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def bare_pickle(program: bytes) -> bytes:
    return b"\x80\x02" + program


def legacy_file(program: bytes) -> bytes:
    parts = (MAGIC, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(part, 2) for part in parts) + bare_pickle(program) + pickle.dumps([], 2)


def write_zip(program: bytes, **members: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", bare_pickle(program))
            for member, raw in members.items():
                archive.writestr(f"a/{member}", raw)

    return write


LIAR = """
import socket, sys
listen = socket.socket(fileno=int(sys.argv[-1]))
_, (descriptor,), _, _ = socket.recv_fds(listen, 1, 1)
socket.socket(fileno=descriptor).sendall(bytes.fromhex({said!r}))
"""


def answer(content: str) -> bytes:
    return b"A" + struct.pack("<Q", len(content)) + content.encode()


def answer_with(value: str, storages: str = "{}") -> bytes:
    return answer(f'{{"values": [{value}], "storages": {storages}, "end": 9}}')


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"X",
        b"A" + struct.pack("<Q", 1 << 62),
        answer("{}"),
        answer("[]"),
        answer("7"),
        answer("nonsense"),
        answer('{"values": [], "storages": {}}'),
        answer('{"refused": 3, "found": {}}'),
        answer("[" * 20_000),
        answer_with('["planet", 3]'),
        answer_with("[]"),
        answer_with('["dict", 1]'),
        answer_with('["record"]'),
        answer_with('["int", "0x"]'),
        answer_with('["bytes", 7]'),
        answer_with('["array", "|O8", ["tuple", 1], false, "AAAAAAAAAAA="]'),
        answer_with('["array", "<f8", ["tuple", 9], false, "AAAAAAAAAAA="]'),
        answer_with('["tensor", "0", "torch.FloatStorage", 0, ["tuple", 1], ["tuple", 1]]'),
        answer_with("1", '{"0": ["torch.FloatStorage", 4]}'),
        answer_with("1", '{"0": ["torch.EvilStorage", 4]}'),
    ],
)
def test_nothing_that_the_process_says_is_taken_on_trust(
    reply: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.pt").write_bytes(bare_pickle(b"N."))
    monkeypatch.setattr(pickle_reader, "_BOOT", LIAR.format(said=reply.hex()))
    with pytest.raises(FormatError, match=r"model.pt: ") as assert_refused:
        open_file(tmp_path / "model.pt")
    assert "\n" not in str(assert_refused.value)


def tensor(offset: int = 0, shape: bytes = b"K\x02\x85", strides: bytes = b"K\x01\x85") -> bytes:
    storage = b"(" + text("storage") + name("torch.FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
    place = b"J" + struct.pack("<i", offset) + shape + strides
    return name("torch._utils._rebuild_tensor_v2") + b"(" + storage + place + b"\x89NtR."


NUMBERS = np.arange(4, dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (tensor(3), "storage 0: bytes: found 16, wanted enough for shape (2,), strides (1,) from 3, of F32"),
        (tensor(-1), "is not what torch.save writes"),
        (tensor(1 << 30), "storage 0: bytes: found 16"),
        (tensor(shape=b"J\xff\xff\xff\xff\x85"), "is not what torch.save writes"),
        (tensor(shape=b"K\x02K\x02\x86"), "is not what torch.save writes"),
        (tensor(shape=b"K\x02K\x02\x86", strides=b"K\x03K\x01\x86"), "storage 0: bytes: found 16"),
        (tensor(shape=b"J\xff\xff\xff\x7f\x85", strides=b"K\x00\x85"), "storage 0: bytes: found 16"),
        (tensor(shape=text("a"), strides=text("b")), "is not what torch.save writes"),
    ],
)
def test_a_tensor_is_within_its_storage(program: bytes, line: str, tmp_path: Path) -> None:
    write_zip(program, **{"data/0": NUMBERS})(tmp_path / "model.pt")
    with pytest.raises(FormatError, match=re.escape(f"model.pt: {line}")):
        open_file(tmp_path / "model.pt")


def test_a_tensor_by_hand_is_read(tmp_path: Path) -> None:
    write_zip(tensor(1, strides=b"K\x02\x85"), **{"data/0": NUMBERS})(tmp_path / "model.pt")
    assert open_file(tmp_path / "model.pt").tree.values().tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ({}, "storage 0: bytes: found none, wanted 16"),
        ({"data/0": NUMBERS[:12]}, "storage 0: bytes: found 12, wanted 16"),
        (
            {"data/0": NUMBERS, "byteorder": b"big"},
            "a/byteorder: of the numbers: found b'big', wanted b'little'",
        ),
        ({"data/0": NUMBERS, "version": b"11\n"}, "a/version: of the file: found b'11', wanted 10 or less"),
        ({"data/0": NUMBERS, "version": b"?"}, "a/version: of the file: found b'?'"),
        (
            {"data/0": NUMBERS, "constants.pkl": b""},
            "is a TorchScript program, and weights are needed; hint: ",
        ),
    ],
)
def test_a_zip_that_is_not_as_torch_writes_it_is_refused(
    members: dict[str, bytes], line: str, tmp_path: Path
) -> None:
    write_zip(tensor(), **members)(tmp_path / "model.pt")
    with pytest.raises(FormatError, match=re.escape(line)):
        open_file(tmp_path / "model.pt")


def test_other_files_are_told_from_those_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def assert_refused(line: str) -> None:
        with pytest.raises(FormatError, match=f"model.pt.*: {line}"):
            open_file(path)

    assert_refused("no such file")
    path.write_bytes(b"")
    assert_refused("is not a file of torch.save: found b'' at its beginning")
    path.write_bytes(b"\x93NUMPY")
    assert_refused("is not a file of torch.save: found b'.x93NUM' at its beginning")
    path.write_bytes(b"storages".ljust(257, b"\0") + b"ustar\x0000")
    assert_refused("was written by torch before 0.2; hint: ")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "")
    assert_refused("is a zip without a pickle of torch: found 0 members NAME/data.pkl, wanted one")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
    assert_refused("is compressed or encrypted; hint: ")
    write_zip(b"N.", **{"data.pk1": b""})(path)
    path.write_bytes(path.read_bytes().replace(b"data.pk1", b"data.pkl"))
    assert_refused("has two members of one name")
    write_zip(b"N.")(path)
    path.write_bytes(path.read_bytes().replace(b"\x80\x02N.", b"\x80\x02\x88."))
    assert_refused("checksum .crc32.: found ")
    path.write_bytes(path.read_bytes()[:-30])
    assert_refused("is not a complete zip: found .*; hint: the file was cut off")
    path.write_bytes(legacy_file(b"N.").replace(b"\x88", b"\x89"))
    assert_refused("of the numbers' bytes: little endian: found False, wanted True")


def test_a_part_of_a_file_must_be_in_it(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"junk" + bare_pickle(b"K\x05.") + b"junk")
    assert open_file(tmp_path / "model.pt", 4, 5).tree == 5
    with pytest.raises(FormatError, match="size in bytes: found 13, wanted 14 or more"):
        open_file(tmp_path / "model.pt", 4, 10)


def mutations(raw: bytes, seed: int, count: int, head: int) -> Iterator[bytes]:
    """The file with a byte or two changed, a part cut out, doubled or cut off; most of it in its head."""
    rng = random.Random(seed)
    for _ in range(count):
        end = head if rng.random() < 0.7 else len(raw)
        changed = bytearray(raw)
        kind = rng.randrange(6)
        begin, length = rng.randrange(end), rng.randrange(1, 20)
        if kind == 0:
            del changed[begin:]
        elif kind == 1:
            del changed[begin : begin + length]
        elif kind == 2:
            changed[begin:begin] = changed[begin : begin + length]
        else:
            for _ in range(kind - 2):
                changed[rng.randrange(end)] = rng.randrange(256)
        yield bytes(changed)


@pytest.mark.parametrize("form", ["zip", "bare_pickle"])
def test_a_file_that_was_written_to_is_refused_or_read_and_nothing_else(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if form == "zip":
        announced = [TensorHeader(f"layers.{n}", "F32", (4, n + 1)) for n in range(4)]
        tree = {
            "model": {t.name: t for t in announced},
            "args": Record("argparse.Namespace", (), {"layers": 4}),
        }
        zip_writer.write(path, tree, lambda tensor: [np.ones(tensor.shape, np.float32)])
    else:
        path.write_bytes(
            pickle.dumps({"args": argparse.Namespace(layers=[4, 2.5]), "rng": (1, b"2", 2**80)}, 4)
        )
    raw = path.read_bytes()
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read, errors = 0, list[str]()
    with Unpickler() as unpickler:
        for changed in mutations(raw, seed=5, count=1000, head=min(1500, len(raw))):
            path.write_bytes(changed)
            try:
                opened = unpickler.open(path)
            except FormatError as refused:
                errors.append(str(refused))
                continue
            read += 1
            for stored in opened.tensors().values():
                assert stored.values().nbytes == stored.bytes
    assert read > 10
    assert len(errors) > 100
    assert not [line for line in errors if "\n" in line or "process that reads" in line]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < begun + 100_000  # kilobytes
