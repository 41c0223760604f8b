"""Merge several datasets into one, or convert one: payloads are copied to their offsets.

The offset of every byte follows from the sizes of the datasets, so threads copy in any order. File systems
with shared blocks (reflinks) copy nothing. The index is computed from the lengths, as in Megatron's
`merge_datasets`: documents of the second dataset follow those of the first.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.inspect import open_dataset_tokenizer
from mega_schema.atomic_io import disk_errors, write_at
from mega_schema.dataset.atomic_dataset import StagedDataset
from mega_schema.dataset.idx_content import IndexStreams, check_pointers, chunks, code_of
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, sibling, truncated_error
from mega_schema.dataset.indexed_writer import write_index
from mega_schema.errors import ConfigError, FormatError

COPY_BYTES = 64 << 20  # of a payload per task of a thread
# options of PREFIX.json that change the ids or the sequences of a text
SAME_IN_MERGE = ("prefix_ids", "suffix_ids", "parse_special_tokens", "sentence_model")
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # no copy_file_range


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge; `differing` are the options in which the datasets differ."""

    index_format: str
    documents: int
    sequences: int
    tokens: int
    size: int
    seconds: float
    differing: tuple[str, ...] = ()


def find_prefixes(folder: Path) -> list[Path]:
    """Return the datasets of a folder in the order of their file names, as Megatron merges them.

    Raises:
        FormatError: there is no dataset, or a file has no partner.
    """
    names = {path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    payloads = sorted({name.removesuffix(".idx").removesuffix(".bin") + ".bin" for name in names})
    for name in payloads:
        for partner in (name, name.removesuffix(".bin") + ".idx"):
            if partner not in names:
                hint = "complete or remove its other file"
                raise FormatError(folder / partner, "no such file", hint=hint)
    if not payloads:
        raise FormatError(folder, "no datasets", wanted="files that end in .bin and .idx")
    return [folder / name.removesuffix(".bin") for name in payloads]


def merge_datasets(
    datasets: Sequence[IndexedDataset],
    output_prefix: Path,
    *,
    index_format: str | None = None,
    dtype: np.dtype[Any] | None = None,
    assume_same_tokenizer: bool = False,
    workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> MergeResult:
    """Write the documents of the datasets, one after the other, to `{output_prefix}.{bin,idx,json}`.

    Args:
        index_format: format of the new index; None is that of the first dataset.
        dtype: dtype of the new ids; None is that of the datasets, or the nearest that the format supports.
        assume_same_tokenizer: assume that datasets without PREFIX.json have the tokenizer of the others.
        workers: threads that copy.
        progress: called with the bytes written since its last call.

    Raises:
        ConfigError: the output is one of the inputs, or there are no inputs.
        FormatError: dtypes or tokenizers differ, an index is invalid, or ids do not fit in `dtype`.
        MegaError: the disk is full.
    """
    if not datasets:
        raise ConfigError("--datasets", "none given", wanted="one prefix or more")
    started_at = time.monotonic()
    first = datasets[0]
    index_format = index_format or first.index_format
    dtype = dtype or _supported_dtype(first.dtype, index_format)
    check_compatible(datasets, output_prefix)
    info, differing_options = merge_info(datasets, assume_same_tokenizer)
    sequences = sum(map(len, datasets))
    tokens = sum(data.tokens for data in datasets)
    documents = sum(len(data.documents) - 1 for data in datasets)
    if index_format.startswith("fairseq"):  # its index has no documents: each sequence is one
        documents = sequences
    staging = StagedDataset(output_prefix)
    try:
        with disk_errors(output_prefix):
            payload = staging.open(".bin")
            _write_payload(payload.fileno(), datasets, index_format, dtype, workers, progress)
            write_index(staging.open(".idx"), index_format, _index_contents(datasets, index_format, dtype))
            if info is not None:
                info = dataclasses.replace(info, documents=documents, sequences=sequences, tokens=tokens)
                staging.open(".json").write((json.dumps(info.to_dict(), indent=1) + "\n").encode())
            save_tokenizer(datasets, output_prefix)
            staging.publish()
    finally:
        staging.discard()
    size = tokens * dtype.itemsize
    return MergeResult(
        index_format, documents, sequences, tokens, size, time.monotonic() - started_at, differing_options
    )


def _supported_dtype(dtype: np.dtype[Any], index_format: str) -> np.dtype[Any]:
    """Return the dtype itself, or int32 if the format or its readers do not support it."""
    fairseq_cached_uint16 = index_format == "fairseq-cached" and dtype.name == "uint16"
    fits = code_of(index_format, dtype) is not None and not fairseq_cached_uint16
    return dtype if fits else np.dtype("<i4")


def check_compatible(datasets: Sequence[IndexedDataset], output_prefix: Path) -> None:
    """Check that the datasets can be parts of one.

    Raises:
        ConfigError: the output is one of them.
        FormatError: dtypes or index formats differ, or an index is invalid.
    """
    first = datasets[0]
    for data in datasets:
        path = sibling(data.prefix, ".idx")
        if data.prefix.resolve() == output_prefix.resolve():
            hint = "write to another prefix, and outside the folder of --input"
            raise ConfigError("--output-prefix", "is one of the inputs", found=output_prefix, hint=hint)
        if data.dtype != first.dtype:
            wanted = f"{first.dtype} as {first.prefix}"
            hint = f"mega-data convert {data.prefix} --dtype {first.dtype} --output-prefix ..."
            raise FormatError(path, "dtype", found=data.dtype, wanted=wanted, hint=hint)
        if (data.modes is None) != (first.modes is None):
            raise FormatError(path, "modes", wanted="of all datasets or of none")
        if data.shift != first.shift:
            wanted = f"{first.index_format} as {first.prefix}"
            hint = f"mega-data convert {data.prefix} --to {first.index_format} --output-prefix ..."
            raise FormatError(
                path,
                "ids have another offset on disk",
                found=data.index_format,
                wanted=wanted,
                hint=hint,
            )
        check_pointers(path, data.lengths, data.pointers, data.dtype.itemsize)


def merge_info(
    datasets: Sequence[IndexedDataset], assume_same: bool
) -> tuple[DatasetInfo | None, tuple[str, ...]]:
    """Merge the PREFIX.json of the datasets; return it and the options in which they differ.

    Args:
        assume_same: assume that datasets without PREFIX.json have the tokenizer of the others.

    Raises:
        FormatError: tokenizers differ, or one is not known.
    """
    known = [(data, data.info) for data in datasets if data.info is not None]
    if not known:
        return None, ()
    first_dataset, first = known[0]
    infos = [info for _, info in known]
    without_info = [data for data in datasets if data.info is None]
    if without_info and not assume_same:
        path, wanted = (
            sibling(without_info[0].prefix, ".json"),
            f"as {sibling(first_dataset.prefix, '.json')}",
        )
        hint = "--assume-same-tokenizer, if the ids are that tokenizer's"
        raise FormatError(path, "no such file, so its tokenizer is not known", wanted=wanted, hint=hint)
    for data, info in known:
        identity, wanted_identity = info.tokenizer, first.tokenizer
        if (identity.sha256, identity.vocab_size, identity.eod) != (
            wanted_identity.sha256,
            wanted_identity.vocab_size,
            wanted_identity.eod,
        ):
            path = sibling(data.prefix, ".json")
            hint = "preprocess one of the two again"
            found, wanted = (
                f"{side.type} ({side.vocab_size} ids, eod {side.eod}, sha256 {side.sha256[:12]})"
                for side in (identity, wanted_identity)
            )
            where = f"tokenizer is not that of {first_dataset.prefix}"
            raise FormatError(path, where, found=found, wanted=wanted, hint=hint)
        _check_same_ids(data, info, first_dataset, first)
    names = sorted({name for info in infos for name in info.options})
    common = {
        name: first.options[name]
        for name in names
        if all(name in info.options and info.options[name] == first.options.get(name) for info in infos)
    }
    sources = tuple(dict.fromkeys(source for info in infos for source in info.sources))
    differing = tuple(name for name in names if name not in common)
    return DatasetInfo(first.tokenizer, sources=sources, options=common), differing


def _check_same_ids(
    data: IndexedDataset, info: DatasetInfo, first_dataset: IndexedDataset, first: DatasetInfo
) -> None:
    """Refuse to mix datasets that encode or split the same text differently."""
    for name in SAME_IN_MERGE:
        value, wanted_value = info.options.get(name), first.options.get(name)
        if name == "sentence_model" and None in (value, wanted_value):
            continue  # written before the name was recorded, or from lists of sentences
        if (value or None) != (wanted_value or None):
            where = f"{name} is not that of {first_dataset.prefix}"
            path, hint = sibling(data.prefix, ".json"), "preprocess one of the two again"
            raise FormatError(path, where, found=value, wanted=wanted_value, hint=hint)


def save_tokenizer(datasets: Sequence[IndexedDataset], output_prefix: Path) -> None:
    """Write the tokenizer of the datasets to `{output_prefix}.tokenizer`, if one of them stores it."""
    for data in datasets:
        tokenizer = open_dataset_tokenizer(data)
        if tokenizer is not None:
            tokenizer.save(sibling(output_prefix, ".tokenizer"))
            return


def _index_contents(
    datasets: Sequence[IndexedDataset], index_format: str, dtype: np.dtype[Any]
) -> IndexStreams:
    def lengths() -> Iterator[NDArray[Any]]:
        for data in datasets:
            yield from chunks(data.lengths)

    def documents() -> Iterator[NDArray[Any]]:
        yield np.zeros(1, np.int64)
        sequences_before = 0
        for data in datasets:
            for part in chunks(data.documents[1:]):
                yield part + sequences_before
            sequences_before += len(data)

    def modes() -> Iterator[NDArray[Any]]:
        for data in datasets:
            assert data.modes is not None
            yield from chunks(data.modes)

    multimodal = datasets[0].modes is not None and index_format == "mmap"
    boundaries = 1 + sum(len(data.documents) - 1 for data in datasets)
    sequences = sum(map(len, datasets))
    return IndexStreams(dtype, sequences, boundaries, lengths, documents, modes if multimodal else None)


def _write_payload(
    target: int,
    datasets: Sequence[IndexedDataset],
    index_format: str,
    dtype: np.dtype[Any],
    workers: int,
    progress: Callable[[int], object],
) -> None:
    shift = int(index_format == "fairseq-cached")
    offset = 0
    os.ftruncate(target, sum(data.tokens for data in datasets) * dtype.itemsize)
    with ThreadPoolExecutor(workers) as pool:
        jobs = []
        for data in datasets:
            path = sibling(data.prefix, ".bin")
            is_copy = data.dtype == dtype.newbyteorder("<") and data.shift == shift
            step = COPY_BYTES // data.dtype.itemsize
            for first in range(0, data.tokens, step):
                last = min(first + step, data.tokens)
                target_offset = offset + first * dtype.itemsize
                if is_copy:
                    size = (last - first) * dtype.itemsize
                    jobs.append(
                        pool.submit(_copy_range, path, first * dtype.itemsize, target, target_offset, size)
                    )
                else:
                    jobs.append(
                        pool.submit(_convert_range, data, first, last, shift, dtype, target, target_offset)
                    )
            offset += data.tokens * dtype.itemsize
        try:
            for future in as_completed(jobs):
                progress(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _copy_range(path: Path, start: int, target: int, target_offset: int, size: int) -> int:
    """Copy `size` bytes between two files; opens the source only for the copy, to limit open files."""
    with path.open("rb") as file:
        if copy_bytes(file.fileno(), start, target, target_offset, size) < size:
            raise truncated_error(path, start + size)
    return size


def copy_bytes(source: int, start: int, target: int, target_offset: int, size: int) -> int:
    """Copy up to `size` bytes, in the kernel if possible; return how many were copied."""
    copied = 0
    in_kernel = True
    while copied < size:
        if in_kernel:
            try:
                count = os.copy_file_range(
                    source, target, size - copied, start + copied, target_offset + copied
                )
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                in_kernel = False
                continue
        else:
            part = os.pread(source, min(1 << 20, size - copied), start + copied)
            count = os.pwrite(target, part, target_offset + copied)
        if not count:
            break
        copied += count
    return copied


def _convert_range(
    data: IndexedDataset,
    first: int,
    last: int,
    shift: int,
    dtype: np.dtype[Any],
    target: int,
    target_offset: int,
) -> int:
    """Write the ids `first` to `last` in another dtype, with the offset that the format wants."""
    limits = np.iinfo(dtype)
    written = 0
    for start in range(first, last, 1 << 18):
        ids = data.copy_range(start, min(start + (1 << 18), last))
        low, high = int(ids.min()), int(ids.max()) + shift
        if ids.dtype.kind not in "iu" or low < limits.min or high > limits.max:
            wanted = f"{limits.min} to {limits.max - shift}, which {dtype} can hold"
            raise FormatError(
                sibling(data.prefix, ".bin"), "ids", found=f"{low} to {high - shift}", wanted=wanted
            )
        part = (ids.astype(dtype.newbyteorder("<")) + dtype.type(shift)).tobytes()
        write_at(target, memoryview(part), target_offset + written)
        written += len(part)
    return written
