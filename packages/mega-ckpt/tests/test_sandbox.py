"""Pickles with calls, too large ones and broken ones; torch wrote none of them."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import random
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.torch_files import pickle_reader
from mega_ckpt.torch_files.pickle_reader import Record, Unpickler, open_file
from mega_ckpt.torch_files.sandbox.stubs import RefusedError
from mega_ckpt.torch_files.sandbox.unpickler import BROKEN, PickleStream, StubUnpickler
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


FORMS: dict[str, Callable[[Path, bytes], object]] = {
    "alone": lambda path, program: path.write_bytes(bare_pickle(program)),
    "before torch 1.6": lambda path, program: path.write_bytes(legacy_file(program)),
    "zip": lambda path, program: write_zip(program)(path),
}
TOUCH = text("touch canary")
CALLS = [
    "posix.system",
    "os.system",
    "os.popen",
    "os.path.join.__globals__",
    "builtins.eval",
    "builtins.exec",
    "builtins.getattr",
    "builtins.__import__",
    "builtins.type",
    "builtins.open",
    "subprocess.Popen",
    "importlib.import_module",
    "ctypes.CDLL",
    "functools.partial",
    "operator.attrgetter",
    "types.CodeType",
    "types.FunctionType",
    "pickle.loads",
    "runpy._run_code",
    "pty.spawn",
    "timeit.timeit",
    "numpy.load",
    "numpy.testing._private.utils.runstring",
    "torch.load",
    "torch.hub.load",
    "torch.storage._load_from_bytes",
    "torch._utils._rebuild_tensor_v2.__globals__",
    "torch.jit.load",
    "argparse.Namespace.__init__",
    "collections.OrderedDict.fromkeys",
    "copyreg.add_extension",
    "mega_ckpt.torch_files.sandbox.sandbox_process.main",
]


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a pickle creates if its code runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "canary"


@pytest.mark.parametrize("form", FORMS)
def test_what_a_pickle_must_not_call_is_refused_by_name(form: str, tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "model.pt"
    with Unpickler() as unpickler:
        for called in CALLS:
            module, _, last = called.rpartition(".")
            for program in (
                name(called) + TOUCH + b"\x85R.",  # REDUCE
                name(called) + TOUCH + b"\x85\x81.",  # NEWOBJ
                text(module) + text(last) + b"\x93" + TOUCH + b"\x85R.",  # STACK_GLOBAL
                b"(" + TOUCH + f"i{module}\n{last}\n".encode() + b".",  # INST
                b"(" + name(called) + TOUCH + b"o.",  # OBJ
                name("argparse.Namespace") + b")\x81}" + text("a") + name(called) + b"sb.",  # BUILD
            ):
                FORMS[form](path, program)
                line = rf": the pickle names a global that is not allowed: found {re.escape(called)}; hint: "
                with pytest.raises(FormatError, match=line):
                    unpickler.open(path)
    assert not canary.exists()


class Evil:
    """An object whose pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_as_python_writes_it_does_nothing_either(
    protocol: int, tmp_path: Path, canary: Path
) -> None:
    command = f"{Path(canary)!s}"
    for value in (
        Evil(__import__("os").system, (f"touch {command}",)),
        Evil(eval, (f"open({command!r}, 'w')",)),
        [{"model": Evil(getattr, (Evil(__import__, ("os",)), "system"))}],
        argparse.Namespace(hidden=Evil(open, (command, "w"))),
    ):
        raw = pickle.dumps(value, protocol)
        (tmp_path / "model.pt").write_bytes(raw if protocol > 1 else b"\x80\x02" + raw)
        with pytest.raises(FormatError, match="names a global that is not allowed"):
            open_file(tmp_path / "model.pt")
    pickle.loads(pickle.dumps(Evil(open, (command, "w")))).close()
    assert canary.exists()  # the canary would have sung
    canary.unlink()


DIRTY = {
    "a call of what was made": name("collections.OrderedDict") + b")R)R.",
    "a call of a text": text("os.system") + b")R.",
    "a call with arguments that are no tuple": name("argparse.Namespace") + b"]R.",
    "a state for a list": b"]}" + text("__class__") + b"Nsb.",
    "a state for a name": name("argparse.Namespace") + b"}" + text("__init__") + b"Nsb.",
    "items for a name": name("builtins.list") + b"Na.",
    "items for an object": name("argparse.Namespace") + b")\x81Na.",
    "a value that was never kept": b"h\x07.",
    "a name made of a number": text("os") + b"K\x01\x93.",
    "a name from under the mark": text("os") + text("system") + b"(\x93.",
    "two values": b"NN.",
    "no value": b".",
    "a mark that is not there": b"t.",
    "a text that is none": b"X\x02\x00\x00\x00\xff\xfe.",
    "a number that is none": b"Ififty\n.",
    "a number of too many digits": b"I" + b"9" * 5000 + b"\n.",
    "a tensor without a storage": name("torch._utils._rebuild_tensor_v2") + b"(NK\x00))\x89Nt" + b"R.",
    "a tensor of a tensor": b"(" + text("storage") + name("torch.FloatStorage") + text("0") + b"NK\x01tQ0.",
    "a storage without a name": b"(" + text("storage") + b"NNNNtQ.",
    "an array without a type": name("numpy.core.multiarray._reconstruct") + b")R(K\x01)N\x89NtbN.",
    "keys without values": b"}(Nu.",
    "a key that has no hash": b"}(]Nu.",
    "items with a key that has no hash": name("builtins.set") + b"(](lt\x85R.",
    "the end at once": b"",
    "the end in a text": b"X\xff\xff\xff\x7fabc",
    "the end in a name": b"cos",
    "a size of all there is": b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
}
REFUSED = {
    "the pickle has an operation that is not allowed": [b"\x82\x01.", b"Pa\n.", b"\x97.", b"\xff.", b"\x92."],
    "the pickle calls a global that may only be named: found torch.float32": [name("torch.float32") + b")R."],
    "the pickle refers to something other than a storage: found module": [b"(" + text("module") + b"NNNNtQ."],
    "the pickle uses an encoding that is not allowed: found zlib": [
        name("_codecs.encode") + text("a") + text("zlib") + b"\x86R."
    ],
    "the pickle builds a tensor in a way that is not allowed: found argparse.Namespace": [
        name("torch._tensor._rebuild_from_type_v2")
        + name("argparse.Namespace")
        + b"N)t".replace(b"t", b"\x87R.")
    ],
    "the pickle's protocol is later than 5": [b"\x80\x06N."],
}


@pytest.mark.parametrize("what", DIRTY)
def test_a_pickle_that_no_pickler_wrote_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(bare_pickle(DIRTY[what]))
    with pytest.raises(FormatError, match=r"model.pt: .*: found ") as refused:
        open_file(tmp_path / "model.pt")
    assert "\n" not in str(refused.value)
    assert "process that reads pickles ended" not in str(refused.value)


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_is_said(line: str, tmp_path: Path) -> None:
    for program in REFUSED[line]:
        (tmp_path / "model.pt").write_bytes(bare_pickle(program))
        with pytest.raises(FormatError, match=re.escape(line)):
            open_file(tmp_path / "model.pt")


def test_an_operation_that_is_not_on_the_list_is_refused() -> None:
    refused = [code for code in range(256) if code not in StubUnpickler.dispatch]
    for code in refused:
        feed = iter([b"(((((" + bytes([code]) * 20])
        with pytest.raises(RefusedError, match="operation that is not allowed"):
            StubUnpickler(PickleStream(lambda feed=feed: next(feed, b"")), {}).load()
    known = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    assert {known[code] for code in refused if code in known} == {
        *("EXT1", "EXT2", "EXT4", "PERSID", "NEWOBJ_EX", "NEXT_BUFFER", "READONLY_BUFFER")
    }


def test_texts_of_the_first_protocols_are_read(tmp_path: Path) -> None:
    program = b"(U\x02\xff\xfeU\x02\xc3\xbcS'a\\x00\\n'\nVa\\u00e9\nI12\nI01\nL5L\nF1.5\nT\x01\x00\x00\x00bl."
    (tmp_path / "model.pt").write_bytes(bare_pickle(program))
    assert open_file(tmp_path / "model.pt").tree == [b"\xff\xfe", "ü", "a\0\n", "aé", 12, True, 5, 1.5, "b"]


def test_a_state_is_kept_and_not_obeyed(tmp_path: Path) -> None:
    state = {"__class__": 1, "__setstate__": 2, "__reduce__": [3]}
    (tmp_path / "model.pt").write_bytes(
        bare_pickle(name("argparse.Namespace") + b")\x81" + pickle.dumps(state, 2)[2:-1] + b"b.")
    )
    tree = open_file(tmp_path / "model.pt").tree
    assert type(tree) is Record
    assert tree.fields == state


def nested_lists(times: int) -> bytes:
    """A list of two lists of two lists of ..., a few bytes each."""
    return b"]q\x00" + b"".join(b"0](h%ch%ce" % (n, n) + b"q%c" % (n + 1) for n in range(times)) + b"."


def nested_dicts(times: int) -> bytes:
    """A dict that is twice as long each time."""
    begin = b"}(NNuq\x000"
    return begin + (name("collections.defaultdict") + b"h\x00h\x00\x86Rq\x000") * times + b"h\x00."


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (nested_lists(60), "the pickle is too large"),
        (b"(" * 400 + b"t" * 400 + b".", "the pickle has lists in lists too deep"),
        (b"]q\x00h\x00a.", "the pickle has lists in lists too deep"),
        (b"}q\x00Nh\x00s.", "the pickle has lists in lists too deep"),
        (b"}K\x01" + b"2\x86" * 60 + b"Ns.", "the pickle is too large"),  # a key of 2 ** 60 numbers
        (b"(K\x01" + b"2\x86" * 60 + b"\x91.", "the pickle is too large"),
        (b"}N" + b"\x85" * 500_000 + b"Ns.", "the pickle has lists in lists too deep"),
        (b"V" + b"a" * 3_000_000, "the pickle has a line that is too long"),
        (b"(" + b"h\x00" * 10 + b"l.", "is not a complete pickle"),
    ],
)
def test_a_bomb_is_refused_in_one_line(program: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(bare_pickle(program))
    with pytest.raises(FormatError, match=f"model.pt: {line}"):
        open_file(tmp_path / "model.pt")


def test_a_memo_has_room_for_what_is_in_it_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(bare_pickle(b"K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff."))
    assert open_file(tmp_path / "model.pt").tree == 7


def test_a_bomb_takes_its_own_process_and_not_the_next_ones(tmp_path: Path) -> None:
    (tmp_path / "good.pt").write_bytes(bare_pickle(b"K\x07."))
    (tmp_path / "bomb.pt").write_bytes(bare_pickle(nested_dicts(60)))
    with Unpickler() as unpickler:
        with pytest.raises(
            FormatError, match="bomb.pt: the pickle takes too much memory to read: found more than"
        ):
            unpickler.open(tmp_path / "bomb.pt")
        assert unpickler.open(tmp_path / "good.pt").tree == 7


IMPATIENT = """
import sys
sys.path.append(sys.argv[1])
from mega_ckpt.torch_files.sandbox import sandbox_process as server
server.SECONDS = 1
server.main()
"""


def test_a_pickle_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.pt").write_bytes(bare_pickle(b"N0" * 20_000_000))
    monkeypatch.setattr(pickle_reader, "_BOOT", IMPATIENT)
    with pytest.raises(
        FormatError, match=r"the process that reads pickles ended: found no answer, wanted an"
    ):
        open_file(tmp_path / "model.pt")


WAYS_OUT = """
import os, socket, subprocess, sys
sys.path.append(sys.argv[1])
from mega_ckpt.torch_files.sandbox.sandbox_process import limit_process
limit_process(0)
for way in (
    lambda: open("/dev/null"),
    lambda: open("here", "w"),
    socket.socket,
    os.pipe,
    lambda: subprocess.run(["true"]),
    lambda: bytearray(1 << 29),
):
    try:
        way()
    except (OSError, MemoryError):
        continue
    sys.exit(1)
"""


def test_a_process_that_reads_a_pickle_can_open_nothing() -> None:
    where = str(Path(pickle_reader.__file__).parents[2])
    process = subprocess.run([sys.executable, "-I", "-S", "-c", WAYS_OUT, where], check=False, timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_random_program_ends_in_a_value_or_an_error_of_its_own(seed: int) -> None:
    rng = random.Random(seed)
    names = [
        name(n)
        for n in ("argparse.Namespace", "numpy.dtype", "torch.Size", "torch.FloatStorage", "os.system")
    ]
    words = [bytes([code]) for code in range(256)] + [
        b"K\x01",
        b"h\x00",
        b"q\x00",
        text("a"),
        b"(",
        b")",
        *names,
    ]
    values = 0
    for _ in range(5_000):
        program = b"".join(rng.choice(words) for _ in range(rng.randrange(12))) + b"."
        feed = iter([program])
        try:
            StubUnpickler(PickleStream(lambda feed=feed: next(feed, b"")), {}).load()
        except (RefusedError, *BROKEN):
            continue
        values += 1
    assert values > 10
