"""The indexed dataset: `PREFIX.bin`, `PREFIX.idx`, and what we add beside them.

The pair is Megatron's mmap format byte for byte, all little endian, no padding (docs/formats/dataset.md):

    PREFIX.idx   9 bytes   magic "MMIDIDX\\0\\0"
                 u64       version, 1
                 u8        dtype code, CODES
                 u64       N, sequences
                 u64       D, documents + 1
                 int32[N]  tokens of each sequence
                 int64[N]  byte at which each begins in .bin
                 int64[D]  sequence at which each document begins; last entry N
                 int8[N]   modes, in multimodal datasets only: nothing in the file says so
    PREFIX.bin   the sequences end to end, no header
    PREFIX.json  DatasetInfo; files of Megatron's own have none
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mega_schema.errors import FormatError
from mega_schema.tokenizer_identity import TokenizerIdentity

MAGIC: Final = b"MMIDIDX\x00\x00"
CACHED_MAGIC: Final = b"TNTIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
_FAIRSEQ_HEADER: Final = struct.Struct("<9sQBQ")

# 6 and 7 as NVIDIA's core writes them; older writers used 7 for float64 too. Text is always 4 or 8.
CODES: Final = MappingProxyType(
    {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
)
INFO_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What `PREFIX.json` says of a dataset.

    Attributes:
        tokenizer: which one made the ids.
        documents, sequences, tokens: counts; IndexedWriter fills them in.
        sources: the files the text came from.
        options: what else decided the content (the key of the text, whether an eod was appended, ...).
        format: number of the form of this file.
    """

    tokenizer: TokenizerIdentity
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    sources: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    format: int = INFO_FORMAT

    def to_dict(self) -> dict[str, object]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        options, sources = dict(self.options), list(self.sources)
        return {**values, "tokenizer": self.tokenizer.to_dict(), "sources": sources, "options": options}

    @classmethod
    def from_dict(cls, values: object, where: object) -> DatasetInfo:
        """The info with these fields.

        Raises:
            FormatError: a field is missing, unknown, or not what it should be.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        number = values.get("format") if isinstance(values, dict) else None
        if number != INFO_FORMAT:
            raise FormatError(where, "format number", found=number, wanted=INFO_FORMAT)
        assert isinstance(values, dict)
        if set(values) != names:
            raise FormatError(where, "keys", found=sorted(values), wanted=sorted(names))
        for name in ("documents", "sequences", "tokens"):
            if type(values[name]) is not int or values[name] < 0:
                raise FormatError(f"{where}: {name}", "not a count", found=values[name])
        if not isinstance(values["options"], dict) or not isinstance(values["sources"], list):
            raise FormatError(where, "options and sources", wanted="an object and a list")
        tokenizer = TokenizerIdentity.from_dict(values["tokenizer"], f"{where}: tokenizer")
        return cls(**{**values, "tokenizer": tokenizer, "sources": tuple(map(str, values["sources"]))})


def beside(prefix: Path, suffix: str) -> Path:
    """`PREFIX.idx` and its like; the prefix may have dots of its own."""
    return prefix.with_name(prefix.name + suffix)


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """What Megatron's writers choose: uint16 under 65,500 ids, else int32, also where it is not known."""
    return np.dtype("uint16" if vocab_size is not None and vocab_size < 65500 else "int32")


class IndexedDataset:
    """Sequences of token ids, read where they lie on disk.

    Attributes:
        lengths: (N,) int32, tokens of each sequence.
        pointers: (N,) int64, byte at which each begins in the .bin.
        documents: (D,) int64, sequence at which each document begins; the last entry is N.
        dtype: of the ids.
        modes: (N,) int8 of a multimodal dataset, else None.
        info: what PREFIX.json says, None without one.
    """

    def __init__(self, prefix: Path, *, multimodal: bool = False) -> None:
        """Open and check `PREFIX.idx` against its own header, against `PREFIX.bin` and `PREFIX.json`.

        Args:
            multimodal: the index ends with a mode per sequence. The file does not say, so the caller must.

        Raises:
            FormatError: a file is missing, cut off, of another format, or does not fit the others.
        """
        self.prefix = prefix
        index_path, payload_path = beside(prefix, ".idx"), beside(prefix, ".bin")
        if not index_path.is_file():
            named = prefix.suffix in (".idx", ".bin")
            hint = f"give the prefix alone: {prefix.with_suffix('')}" if named else ""
            raise FormatError(index_path, "no such file", hint=hint)
        if not payload_path.is_file():
            raise FormatError(
                payload_path, "no such file", wanted=f"the tokens that {index_path.name} describes"
            )
        self.dtype, sequences, boundaries = _read_header(index_path, multimodal)
        raw = np.memmap(index_path, np.uint8, "r")

        def view(dtype: str, count: int, offset: int) -> NDArray[Any]:
            return np.frombuffer(raw, dtype, count, offset)

        # 34 is no multiple of 4 or 8, so these views are unaligned: numpy reads them, C code must copy first
        at = HEADER.size
        self.lengths: NDArray[np.int32] = view("<i4", sequences, at)
        self.pointers: NDArray[np.int64] = view("<i8", sequences, at + 4 * sequences)
        self.documents: NDArray[np.int64] = view("<i8", boundaries, at + 12 * sequences)
        at += 12 * sequences + 8 * boundaries
        self.modes: NDArray[np.int8] | None = view("<i1", sequences, at) if multimodal else None
        tokens = self._checked_tokens(index_path, payload_path)
        payload: NDArray[Any] = (
            np.memmap(payload_path, self.dtype, "r") if tokens else np.empty(0, self.dtype)
        )
        self._payload = payload.view(np.ndarray)
        self.info = self._checked_info(beside(prefix, ".json"), tokens)

    def __reduce__(self) -> tuple[object, ...]:
        # a process that is sent a dataset opens the files: sent by value, a memory map would be all of them
        return _reopen, (self.prefix, self.modes is not None)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[Any]:
        """Sequence `i`, (lengths[i],): a view of the file, not a copy."""
        return self.read(i)

    def read(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` tokens of sequence `i` from `offset` on (to its end where None), as a view of the file.

        Raises:
            IndexError: there is no such sequence, or it has not so many tokens.
            FormatError: the pointer of the sequence leads out of the file.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        whole, pointer = int(self.lengths[i]), int(self.pointers[i])
        length = whole - offset if length is None else length
        if not 0 <= offset <= offset + length <= whole:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {i}, which has {whole}")
        first, rest = divmod(pointer, self.dtype.itemsize)
        if rest or not 0 <= first <= first + whole <= len(self._payload):
            path = beside(self.prefix, ".idx")
            wanted = f"multiples of {self.dtype.itemsize} up to {self._payload.nbytes}"
            raise FormatError(path, f"pointer of sequence {i}", found=pointer, wanted=wanted)
        return self._payload[first + offset : first + offset + length]

    def _checked_tokens(self, index_path: Path, payload_path: Path) -> int:
        """Tokens in the .bin, once index and payload are known to fit."""
        bounds, sequences = self.documents, len(self)
        if bounds[0] != 0 or bounds[-1] != sequences or (bounds[1:] < bounds[:-1]).any():
            wanted = f"ascending from 0 to {sequences}, the number of sequences"
            found = f"{bounds[0]} to {bounds[-1]}"
            raise FormatError(index_path, "document index", found=found, wanted=wanted)
        end = 0
        if sequences:
            if (shortest := int(self.lengths.min())) < 0:
                raise FormatError(index_path, "length of a sequence", found=shortest, wanted="0 or more")
            end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if (size := payload_path.stat().st_size) != end or end % self.dtype.itemsize:
            wanted = f"{end}, where the last sequence of {index_path.name} ends"
            hint = "both files must come from one run; copy or preprocess them again"
            raise FormatError(payload_path, "size in bytes", found=size, wanted=wanted, hint=hint)
        return end // self.dtype.itemsize

    def _checked_info(self, path: Path, tokens: int) -> DatasetInfo | None:
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_bytes())
        except ValueError as error:
            raise FormatError(path, "not JSON", found=str(error)) from None
        info = DatasetInfo.from_dict(values, path)
        told = (info.documents, info.sequences, info.tokens)
        counted = (len(self.documents) - 1, len(self), tokens)
        if told != counted:
            hint = "all files of a dataset must come from one run; copy or preprocess them again"
            raise FormatError(path, "documents, sequences, tokens", found=told, wanted=counted, hint=hint)
        return info


def _reopen(prefix: Path, multimodal: bool) -> IndexedDataset:
    return IndexedDataset(prefix, multimodal=multimodal)


class IndexedWriter:
    """Writes an indexed dataset that appears whole when the `with` block ends well, and otherwise not at all.

        with IndexedWriter(prefix, smallest_dtype(vocab)) as writer:
            writer.add(ids)
            writer.end_document()

    Tokens go to disk as they come; kept in memory are 4 bytes a sequence and 8 a document. An earlier dataset
    of the same prefix stays until then, and is replaced so that no reader sees parts of both as one.

    Args:
        info: what to write to PREFIX.json, its counts filled in; None writes none, as Megatron.
        multimodal: write the mode of each sequence at the end of the index.
    """

    def __init__(
        self, prefix: Path, dtype: DTypeLike, info: DatasetInfo | None = None, *, multimodal: bool = False
    ) -> None:
        self.prefix, self.dtype, self.info, self.multimodal = prefix, np.dtype(dtype), info, multimodal
        self._code = next(code for code, name in CODES.items() if name == self.dtype.name)
        self._lengths, self._modes, self._documents = array("i"), array("b"), array("q", [0])
        self._tokens = 0
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._payload = self._temporary(".bin").open("wb", buffering=1 << 20)

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return self._tokens

    def add(self, ids: ArrayLike, mode: int = 0) -> None:
        """Write one sequence.

        Args:
            ids: one-dimensional, each in the range of the writer's dtype.
            mode: what kind of sequence this is; kept in multimodal datasets only.
        """
        values = np.asarray(ids)
        if values.size and values.dtype != self.dtype and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = values.min(), values.max()
            if values.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise ValueError(f"ids from {low} to {high} do not fit in {self.dtype}")
        if values.ndim != 1:
            raise ValueError(f"a sequence has one dimension, not shape {values.shape}")
        self._payload.write(values.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
        self._lengths.append(len(values))
        if self.multimodal:
            self._modes.append(mode)
        self._tokens += len(values)

    def end_document(self) -> None:
        """End the document that the sequences since the last call make; without any, it is an empty one."""
        self._documents.append(len(self._lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._payload.close()
            for suffix in (".bin", ".json", ".idx"):
                self._temporary(suffix).unlink(missing_ok=True)

    def _commit(self) -> None:
        if self._documents[-1] != len(self._lengths):
            raise ValueError("sequences after the last end_document() belong to no document")
        _sync(self._payload)
        self._payload.close()
        self._write_index()
        if self.info is not None:
            documents, sequences = len(self._documents) - 1, len(self._lengths)
            info = dataclasses.replace(
                self.info, documents=documents, sequences=sequences, tokens=self._tokens
            )
            with self._temporary(".json").open("w", encoding="utf-8") as file:
                file.write(json.dumps(info.to_dict(), indent=1) + "\n")
                _sync(file)
        # The index is what readers open first: without one there is no dataset. So the old one goes
        # before the new payload comes, and the new one comes last.
        for suffix in (".idx", ".json"):
            beside(self.prefix, suffix).unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            if self._temporary(suffix).exists():
                self._temporary(suffix).replace(beside(self.prefix, suffix))
        _sync_folder(self.prefix.parent)

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        pointers = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= self.dtype.itemsize
        with self._temporary(".idx").open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents)))
            file.write(lengths.astype("<i4", copy=False).tobytes())
            file.write(pointers.astype("<i8", copy=False).tobytes())
            file.write(np.frombuffer(self._documents, np.int64).astype("<i8", copy=False).tobytes())
            if self.multimodal:
                file.write(self._modes.tobytes())
            _sync(file)

    def _temporary(self, suffix: str) -> Path:
        return beside(self.prefix, f"{suffix}.{os.getpid()}.tmp")


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` outlast a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _read_header(path: Path, multimodal: bool) -> tuple[np.dtype[Any], int, int]:
    """dtype, N and D of an index whose size agrees with them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(CACHED_MAGIC):
        hint = "preprocess the text again with `mega-data preprocess`; its .bin and .idx replace these"
        raise FormatError(path, "Megatron's older cached format (TNTIDX), which is not read", hint=hint)
    if not head.startswith(MAGIC):
        raise FormatError(path, "not an index: magic", found=head[: len(MAGIC)], wanted=MAGIC)
    if len(head) >= _FAIRSEQ_HEADER.size:
        _, _, _, sequences = _FAIRSEQ_HEADER.unpack(head[: _FAIRSEQ_HEADER.size])
        if size == _FAIRSEQ_HEADER.size + 12 * sequences:
            hint = "it has no document index; preprocess the text again with `mega-data preprocess`"
            raise FormatError(
                path,
                "size in bytes is that of fairseq's variant, which is not read (or the file was cut there)",
                found=size,
                wanted=f"{HEADER.size} + 12 per sequence + 8 per document boundary",
                hint=hint,
            )
    if len(head) < HEADER.size:
        raise FormatError(path, "size in bytes", found=size, wanted=f"{HEADER.size} or more")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise FormatError(path, "version", found=version, wanted=VERSION)
    if code not in CODES:
        wanted = ", ".join(f"{code} ({name})" for code, name in CODES.items())
        raise FormatError(path, "dtype code", found=code, wanted=wanted)
    if boundaries < 1:
        raise FormatError(path, "document boundaries", found=boundaries, wanted="documents + 1")
    plain = HEADER.size + 12 * sequences + 8 * boundaries
    want = plain + (sequences if multimodal else 0)
    if size != want:
        counts = f"{sequences} sequences and {boundaries - 1} documents"
        hint = "the file was cut off or written to; copy or preprocess it again"
        if size == plain + sequences:
            hint = "its size is that of a multimodal dataset: open it as one"
        elif multimodal and size == plain:
            hint = "it has no modes: open it as a dataset of text"
        raise FormatError(path, "size in bytes", found=size, wanted=f"{want} for {counts}", hint=hint)
    return np.dtype(CODES[code]).newbyteorder("<"), sequences, boundaries
