"""Open files of `torch.save`, and other pickles, without torch and without executing them.

    with Unpickler() as unpickler:                   # a process; for one file: open_file(path)
        opened = unpickler.open(path)
    opened.entry("model.language_model.encoder.layers.0.mlp.dense_h_to_4h.weight").values()

A process without access to files or network (`sandbox.sandbox_process`) reads the pickle and returns its
content. Tensor data stays in the file: a tensor is a `MappedTensor`, mapped at its offset. Tensors that
shared a storage overlap.

    in the file                                  in the tree
    dict, OrderedDict, defaultdict, Counter      dict
    list, tuple, set, bytes, numbers, text       the same
    tensor, parameter, storage                   MappedTensor
    array or number of numpy                     numpy's array, or Python's number
    member of an enum                            EnumMember
    object of an allowed class        Record
    torch.float32, list and the like             GlobalName, a text
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from mega_ckpt.tensors.mapped_tensor import DTYPE_BYTES, MappedTensor
from mega_ckpt.tensors.storage import DAMAGED, Span, Storage, read_blocks
from mega_ckpt.torch_files import zip_reader
from mega_ckpt.torch_files.pickle_values import EnumMember, GlobalName, PickleFile, Record
from mega_ckpt.torch_files.sandbox import allowlist, sandbox_process
from mega_ckpt.torch_files.zip_reader import MAGIC
from mega_schema.errors import FormatError

__all__ = ["EnumMember", "GlobalName", "PickleFile", "Record", "Unpickler", "open_file"]

_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1));"
    "from mega_ckpt.torch_files.sandbox.sandbox_process import main; main()"
)
_SOURCE_FOLDER = str(Path(__file__).resolve().parents[2])
_REPLY_TIMEOUT = 2 * sandbox_process.SECONDS  # seconds to wait for the sandbox process
_MAX_ANSWER = 2 * sandbox_process.LONGEST  # bytes; JSON encodes some characters in six
_MAX_DIMS = 64
_MAX_COMPOSED, _MAX_COMPOSED_WIDTH = 1024, 64  # maximum composed keys of one dict, and values in one key
_MAX_SECONDS = 60  # seconds of CPU time to build the values of one file
_VALUES_PER_CLOCK_CHECK = 1 << 14  # values built between two checks of the clock
_INT64 = range(-(1 << 63), 1 << 64)
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
_NUMPY_CODE = re.compile(r"[<>][biufcSU][1-9]\d*")
_HINT = "if you trust the file: torch.load it, and torch.save only its tensors, dicts, lists and numbers"


def open_file(path: Path, begin: int = 0, length: int | None = None) -> PickleFile:
    """Open one file; see `Unpickler.open`."""
    with Unpickler() as unpickler:
        return unpickler.open(path, begin, length)


class Unpickler:
    """A process that reads the pickles of any number of files; use it in a `with`."""

    def __init__(self) -> None:
        self._order, theirs = socket.socketpair()
        keep = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, _SOURCE_FOLDER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env=keep,  # without the rest of the environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._order.close()
        self._process.wait()

    def open(self, path: Path, begin: int = 0, length: int | None = None) -> PickleFile:
        """Open a file of torch.save, or a bare pickle.

        Args:
            begin, length: byte range of a file within another.

        Raises:
            FormatError: the file is missing, damaged, too large, or names a global that is not allowed.
        """
        if not path.is_file():
            raise FormatError(path, "no such file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = Span(begin, size - begin if length is None else length)
            if begin < 0 or whole.bytes < 0 or whole.end > size:
                raise FormatError(path, "size in bytes", found=size, wanted=f"{whole.end} or more")
            try:
                return PickleFile(path, self._tree(path, file, whole))
            except _BROKEN as error:
                raise FormatError(
                    path, "is not what torch.save writes", found=f"{type(error).__name__} {error}"
                ) from error
            except MemoryError:
                raise FormatError(path, "takes too much memory to read", hint=_HINT) from None

    def _tree(self, path: Path, file: BinaryIO, whole: Span) -> Any:
        file.seek(whole.begin)
        head = file.read(min(512, whole.bytes))
        if zip_reader.is_zip(head):
            archive = zip_reader.read_archive(path, file, whole)
            blocks = zip_reader.read_pickle_blocks(path, file, archive)
            answer = self._ask(path, blocks, archive.pickle.bytes)
            for _ in blocks:  # after the last block the checksum is verified
                pass
            return _TreeBuilder(path, answer["storages"], archive.storages).value(answer["values"][0])
        if zip_reader.is_legacy(head):
            answer = self._ask(path, read_blocks(file, whole), whole.bytes, 5)
            storages = _legacy_storages(path, file, whole, answer)
            return _TreeBuilder(path, answer["storages"], storages).value(answer["values"][3])
        if zip_reader.is_tar(head):
            raise FormatError(path, "was written by torch before 0.2", hint=zip_reader.RESAVE_HINT)
        if not head.startswith(b"\x80"):
            raise FormatError(path, "is not a file of torch.save", found=f"{head[:4]!r} at its beginning")
        answer = self._ask(path, read_blocks(file, whole), whole.bytes)
        return _TreeBuilder(path, answer["storages"], {}).value(answer["values"][0])

    def _ask(self, path: Path, blocks: Iterator[bytes], size: int, pickles: int = 1) -> dict[str, Any]:
        """Send the blocks to the process and return its answer."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_REPLY_TIMEOUT)
            try:
                with theirs:
                    socket.send_fds(
                        self._order, [sandbox_process.ORDER.pack(pickles, size)], [theirs.fileno()]
                    )
                while (word := sandbox_process.receive(ours, 1)) == sandbox_process.MORE:
                    block = next(blocks, b"")
                    ours.sendall(struct.pack("<I", len(block)) + block)
                (length,) = struct.unpack("<Q", sandbox_process.receive(ours, 8))
                if word != sandbox_process.ANSWER or length > _MAX_ANSWER:
                    raise EOFError
                answer = json.loads(sandbox_process.receive(ours, length))
            except (EOFError, OSError, ValueError, RecursionError) as error:
                most = sandbox_process.memory_limit(size)
                limits = f"an answer in {sandbox_process.SECONDS} s and {most:,} bytes of memory"
                raise FormatError(
                    path, "the process that reads pickles ended", found="no answer", wanted=limits
                ) from error
        if "broken" in answer:
            raise FormatError(
                path, "is not a complete pickle", found=_printable(answer["broken"]), hint=DAMAGED
            )
        if "refused" in answer:
            raise FormatError(path, answer["refused"], found=_printable(answer["found"]), hint=_HINT)
        return dict(answer)


def _legacy_storages(
    path: Path, file: BinaryIO, whole: Span, answer: Mapping[str, Any]
) -> dict[str, Storage]:
    """Locate the storages after the pickles, in a file written before torch 1.6."""
    magic, _, system, _, keys = answer["values"]
    order = dict(zip(system[1::2], system[2::2], strict=True)).get("little_endian")
    if magic != ["int", f"{MAGIC:x}"] or order is not True or keys[0] != "list":
        raise FormatError(path, "of the numbers' bytes: little endian", found=order, wanted=True)
    spans = {}
    position = whole.begin + answer["end"]
    for key in keys[1:]:
        file.seek(position)
        head = file.read(8) if position + 8 <= whole.end else b""
        type_, numbers = answer["storages"].get(key, (None, None))
        width = DTYPE_BYTES.get(allowlist.STORAGES.get(type_, ""))
        if len(head) < 8 or width is None or int.from_bytes(head, "little") != numbers:
            raise FormatError(f"{path}: storage {key}", "count of numbers", found=head.hex(), wanted=numbers)
        spans[key] = Storage(position + 8, numbers * width, key)
        position = spans[key].end
    if position > whole.end:
        raise FormatError(path, "size in bytes", found=whole.end, wanted=position)
    return spans


class _TreeBuilder:
    """Builds values from the sandbox process's answer, which is not trusted."""

    def __init__(self, path: Path, storages: Mapping[str, Any], spans: Mapping[str, Storage]) -> None:
        self._path = path
        self._spans = spans
        self._value_count = 0
        self._until = time.thread_time() + _MAX_SECONDS
        for key, (type_, numbers) in storages.items():
            width = DTYPE_BYTES[self._dtype(allowlist.STORAGES, type_)]
            found = spans[key].bytes if key in spans else "none"
            if found != numbers * width:
                raise FormatError(f"{path}: storage {key}", "bytes", found=found, wanted=numbers * width)

    def value(self, node: Any) -> Any:
        self._value_count += 1
        if not self._value_count % _VALUES_PER_CLOCK_CHECK and time.thread_time() > self._until:
            found, wanted = f"{self._value_count:,} values", f"an end within {_MAX_SECONDS} s of a core"
            raise FormatError(self._path, "takes too long to read", found=found, wanted=wanted, hint=_HINT)
        if not isinstance(node, list):
            return node
        tag, *parts = node
        match tag:
            case "list":
                return [self.value(part) for part in parts]
            case "tuple":
                return tuple(self.value(part) for part in parts)
            case "set":
                return set(self._keys(parts))
            case "dict":
                keys = self._keys(parts[::2])
                values = map(self.value, parts[1::2])
                return dict(zip(keys, values, strict=True))
            case "int":
                return int(parts[0], 16)
            case "bytes":
                return base64.b64decode(parts[0])
            case "name":
                return GlobalName(parts[0])
            case "record":
                return _build_record(parts[0][1], *map(self.value, parts[1:]))
            case "dtype":
                return np.dtype(self._code(parts[1] + parts[0]))
            case "array":
                return self._array(*parts)
            case "storage":
                key, type_, first = parts
                width = DTYPE_BYTES[allowlist.STORAGES[type_]]
                return self._tensor(
                    key, type_, first, ["tuple", self._spans[key].bytes // width], ["tuple", 1]
                )
            case "tensor":
                return self._tensor(*parts)
        raise ValueError(f"a {tag}")

    def _keys(self, nodes: list[Any]) -> list[Any]:
        """Build keys, and refuse those whose hashes an attacker could make collide.

        Hashes of texts and bytes are salted; those of integers beyond 64 bits, and of tuples, are not.
        """
        keys = [self.value(node) for node in nodes]
        for key in keys:
            if isinstance(key, int) and key not in _INT64:
                bits = f"{key.bit_length()} bits"
                raise FormatError(self._path, "has a key that is not read", found=bits, wanted="at most 64")
        composed = [key for key in keys if isinstance(key, tuple | EnumMember)]
        if len(composed) > _MAX_COMPOSED:
            wanted = f"at most {_MAX_COMPOSED}"
            raise FormatError(self._path, "tuples as keys of one dict", found=len(composed), wanted=wanted)
        if (widest := max(map(_width, composed), default=0)) > _MAX_COMPOSED_WIDTH:
            wanted = f"at most {_MAX_COMPOSED_WIDTH}"
            raise FormatError(self._path, "values in a key of a dict", found=widest, wanted=wanted)
        return keys

    def _dtype(self, known: Mapping[str, str], type_: str) -> str:
        if type_ not in known:
            raise FormatError(self._path, "has numbers of a type that is not read", found=_printable(type_))
        return known[type_]

    def _tensor(self, key: str, type_: Any, first: int, shape: list[Any], strides: list[Any]) -> MappedTensor:
        if isinstance(type_, list):  # the tensor's dtype, not the storage's
            dtype = self._dtype(allowlist.DTYPES, type_[1])
        else:
            dtype = self._dtype(allowlist.STORAGES, type_)
        counts, steps = _items(shape), _items(strides)
        span = self._spans[key]
        width = DTYPE_BYTES[dtype]
        if any(type(n) is not int or n < 0 for n in (first, *counts, *steps)) or len(counts) > _MAX_DIMS:
            raise ValueError(f"shape {counts}, strides {steps} from {first}")
        dims = list(zip(counts, steps, strict=True))
        numbers = math.prod(counts)
        last = first + sum((n - 1) * step for n, step in dims)
        # a tensor with overlapping elements may be arbitrarily large
        if numbers and (last >= span.bytes // width or numbers > span.bytes // width):
            raise FormatError(
                f"{self._path}: storage {key}",
                "bytes",
                found=span.bytes,
                wanted=f"enough for shape {counts}, strides {steps} from {first}, of {dtype}",
            )
        if not numbers:
            return MappedTensor(self._path, dtype, counts, span.begin)
        whole = all(n == 1 or step == math.prod(counts[dim + 1 :]) for dim, (n, step) in enumerate(dims))
        offset = span.begin + first * width
        return MappedTensor(self._path, dtype, counts, offset, None if whole else steps, span)

    def _code(self, code: str) -> str:
        if not _NUMPY_CODE.fullmatch(code):
            raise FormatError(self._path, "has an array of a type that is not read", found=_printable(code))
        return code

    def _array(self, code: str, shape: list[Any], fortran: bool, raw: str) -> Any:
        flat = np.frombuffer(base64.b64decode(raw), self._code(code))
        counts = _items(shape)
        return flat.reshape(counts, order="F" if fortran else "C") if counts else flat[0].item()


def _width(key: Any) -> int:
    """Count the values in a key, which its hash and comparison visit."""
    if isinstance(key, EnumMember):
        return 1 + _width(key.value)
    return 1 + sum(map(_width, key)) if isinstance(key, tuple) else 1


def _items(node: Any) -> tuple[Any, ...]:
    word, *parts = node
    if word not in ("tuple", "list"):
        raise ValueError(f"a {word}")
    return tuple(parts)


def _build_record(kind: str, args: tuple[Any, ...], state: Any) -> Record | EnumMember:
    enum = kind.rpartition(".")[2]
    if enum in allowlist.ENUMS and len(args) == 1:
        known = dict(enumerate(allowlist.ENUMS[enum], 1))
        return EnumMember(kind, args[0], known.get(args[0], ""))
    if state is None or isinstance(state, dict):
        return Record(kind, args, state or {})
    # the state of a class with slots
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return Record(kind, args, {**(state[0] or {}), **state[1]})
    return Record(kind, args, {"state": state})


def _printable(text: str) -> str:
    return text if text.isprintable() and text.isascii() else ascii(text)
