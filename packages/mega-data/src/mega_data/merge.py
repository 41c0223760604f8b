"""Several datasets to one, and one dataset to another form: payloads copied to where they belong.

The place of every byte follows from the sizes of the datasets, so threads copy pieces in any order; on file
systems that share blocks between files nothing is copied at all. The index is computed from the lengths, as
Megatron's `merge_datasets` does: documents of the second dataset follow those of the first.
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

from mega_data.inspect import opened_tokenizer
from mega_schema.atomic_io import disk_errors, write_at
from mega_schema.dataset.atomic_dataset import StagedDataset
from mega_schema.dataset.idx_content import IndexStreams, check_pointers, chunks, code_of
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, sibling, truncated_error
from mega_schema.dataset.indexed_writer import write_index
from mega_schema.errors import ConfigError, FormatError

PIECE = 64 << 20  # bytes of a payload that one thread copies
# options of PREFIX.json by which the same text has other ids or other sequences
SAME_IN_MERGE = ("prefix_ids", "suffix_ids", "parse_special_tokens", "sentence_model")
_NOT_HERE = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # no copy inside this kernel


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written; `differing` are the options that not all of the datasets have alike."""

    form: str
    documents: int
    sequences: int
    tokens: int
    size: int
    seconds: float
    differing: tuple[str, ...] = ()


def prefixes_in(folder: Path) -> list[Path]:
    """The datasets of a folder, in the order of their file names, as Megatron merges them.

    Raises:
        FormatError: there is none, or a file has no partner.
    """
    names = {path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx")}
    found = sorted({name.removesuffix(".idx").removesuffix(".bin") + ".bin" for name in names})
    for name in found:
        for partner in (name, name.removesuffix(".bin") + ".idx"):
            if partner not in names:
                hint = "finish or remove its other half"
                raise FormatError(folder / partner, "no such file", hint=hint)
    if not found:
        raise FormatError(folder, "no datasets", wanted="files that end in .bin and .idx")
    return [folder / name.removesuffix(".bin") for name in found]


def merge(
    datasets: Sequence[IndexedDataset],
    output_prefix: Path,
    *,
    form: str | None = None,
    dtype: np.dtype[Any] | None = None,
    assume_same_tokenizer: bool = False,
    workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> Merged:
    """Write the documents of the datasets, one after the other, to `{output_prefix}.{bin,idx,json}`.

    Args:
        form: of the new index, one of FORMS; None: that of the first dataset.
        dtype: of the new ids; None: that of the datasets, or the nearest that the form has.
        assume_same_tokenizer: take datasets without PREFIX.json for ones of the others' tokenizer.
        workers: threads that copy.
        progress: told the bytes written since it was last called.

    Raises:
        ConfigError: the output is one of the inputs, or there are none.
        FormatError: dtypes or tokenizers differ, an index is not in order, or ids do not fit in `dtype`.
        MegaError: the disk is full.
    """
    if not datasets:
        raise ConfigError("--datasets", "none given", wanted="one prefix or more")
    began, first = time.monotonic(), datasets[0]
    form = form or first.index_format
    dtype = dtype or _nearest(first.dtype, form)
    _check_alike(datasets, output_prefix)
    info, differing = _merged_info(datasets, assume_same_tokenizer)
    sequences, tokens = sum(map(len, datasets)), sum(data.tokens for data in datasets)
    documents = sum(len(data.documents) - 1 for data in datasets)
    if form.startswith("fairseq"):  # its index knows no documents: each sequence reads as one
        documents = sequences
    staged = StagedDataset(output_prefix)
    try:
        with disk_errors(output_prefix):
            payload = staged.open(".bin")
            _write_payload(payload.fileno(), datasets, form, dtype, workers, progress)
            write_index(staged.open(".idx"), form, _index(datasets, form, dtype))
            if info is not None:
                info = dataclasses.replace(info, documents=documents, sequences=sequences, tokens=tokens)
                staged.open(".json").write((json.dumps(info.to_dict(), indent=1) + "\n").encode())
            _save_tokenizer(datasets, output_prefix)
            staged.publish()
    finally:
        staged.discard()
    size = tokens * dtype.itemsize
    return Merged(form, documents, sequences, tokens, size, time.monotonic() - began, differing)


def _nearest(dtype: np.dtype[Any], form: str) -> np.dtype[Any]:
    """The dtype itself, or int32 where the form has no code for it or its readers none."""
    fairseq_cached_uint16 = form == "fairseq-cached" and dtype.name == "uint16"
    fits = code_of(form, dtype) is not None and not fairseq_cached_uint16
    return dtype if fits else np.dtype("<i4")


def _check_alike(datasets: Sequence[IndexedDataset], output_prefix: Path) -> None:
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
                "ids of one form are one higher on disk",
                found=data.index_format,
                wanted=wanted,
                hint=hint,
            )
        check_pointers(path, data.lengths, data.pointers, data.dtype.itemsize)


def _merged_info(
    datasets: Sequence[IndexedDataset], assume_same: bool
) -> tuple[DatasetInfo | None, tuple[str, ...]]:
    """What the datasets say together, and the options that they do not have alike."""
    known = [(data, data.info) for data in datasets if data.info is not None]
    if not known:
        return None, ()
    (one, first), infos = known[0], [info for _, info in known]
    silent = [data for data in datasets if data.info is None]
    if silent and not assume_same:
        path, wanted = sibling(silent[0].prefix, ".json"), f"as {sibling(one.prefix, '.json')}"
        hint = "--assume-same-tokenizer, if the ids are that tokenizer's"
        raise FormatError(path, "no such file, so its tokenizer is not known", wanted=wanted, hint=hint)
    for data, info in known:
        ours, theirs = info.tokenizer, first.tokenizer
        if (ours.sha256, ours.vocab_size, ours.eod) != (theirs.sha256, theirs.vocab_size, theirs.eod):
            path = sibling(data.prefix, ".json")
            hint = "preprocess one of the two again"
            found, wanted = (
                f"{who.type} ({who.vocab_size} ids, eod {who.eod}, sha256 {who.sha256[:12]})"
                for who in (ours, theirs)
            )
            where = f"tokenizer is not that of {one.prefix}"
            raise FormatError(path, where, found=found, wanted=wanted, hint=hint)
        _check_same_ids(data, info, one, first)
    names = sorted({name for info in infos for name in info.options})
    alike = {
        name: first.options[name]
        for name in names
        if all(name in info.options and info.options[name] == first.options.get(name) for info in infos)
    }
    sources = tuple(dict.fromkeys(source for info in infos for source in info.sources))
    differing = tuple(name for name in names if name not in alike)
    return DatasetInfo(first.tokenizer, sources=sources, options=alike), differing


def _check_same_ids(data: IndexedDataset, info: DatasetInfo, one: IndexedDataset, first: DatasetInfo) -> None:
    """Refuse to mix datasets in which the same text has other ids or other sequences."""
    for name in SAME_IN_MERGE:
        ours, theirs = info.options.get(name), first.options.get(name)
        if name == "sentence_model" and None in (ours, theirs):
            continue  # written before the name was recorded, or of lists of sentences
        if (ours or None) != (theirs or None):
            where = f"{name} is not that of {one.prefix}"
            path, hint = sibling(data.prefix, ".json"), "preprocess one of the two again"
            raise FormatError(path, where, found=ours, wanted=theirs, hint=hint)


def _save_tokenizer(datasets: Sequence[IndexedDataset], output_prefix: Path) -> None:
    for data in datasets:
        tokenizer = opened_tokenizer(data)
        if tokenizer is not None:
            tokenizer.save(sibling(output_prefix, ".tokenizer"))
            return


def _index(datasets: Sequence[IndexedDataset], form: str, dtype: np.dtype[Any]) -> IndexStreams:
    def lengths() -> Iterator[NDArray[Any]]:
        for data in datasets:
            yield from chunks(data.lengths)

    def documents() -> Iterator[NDArray[Any]]:
        yield np.zeros(1, np.int64)
        before = 0
        for data in datasets:
            for part in chunks(data.documents[1:]):
                yield part + before
            before += len(data)

    def modes() -> Iterator[NDArray[Any]]:
        for data in datasets:
            assert data.modes is not None
            yield from chunks(data.modes)

    multimodal = datasets[0].modes is not None and form == "mmap"
    boundaries = 1 + sum(len(data.documents) - 1 for data in datasets)
    sequences = sum(map(len, datasets))
    return IndexStreams(dtype, sequences, boundaries, lengths, documents, modes if multimodal else None)


def _write_payload(
    target: int,
    datasets: Sequence[IndexedDataset],
    form: str,
    dtype: np.dtype[Any],
    workers: int,
    progress: Callable[[int], object],
) -> None:
    shift, at = int(form == "fairseq-cached"), 0
    os.ftruncate(target, sum(data.tokens for data in datasets) * dtype.itemsize)
    with ThreadPoolExecutor(workers) as pool:
        jobs = []
        for data in datasets:
            path = sibling(data.prefix, ".bin")
            same = data.dtype == dtype.newbyteorder("<") and data.shift == shift
            step = PIECE // data.dtype.itemsize
            for first in range(0, data.tokens, step):
                last = min(first + step, data.tokens)
                to = at + first * dtype.itemsize
                if same:
                    size = (last - first) * dtype.itemsize
                    jobs.append(pool.submit(_copy, path, first * dtype.itemsize, target, to, size))
                else:
                    jobs.append(pool.submit(_translate, data, first, last, shift, dtype, target, to))
            at += data.tokens * dtype.itemsize
        try:
            for done in as_completed(jobs):
                progress(done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _copy(path: Path, start: int, target: int, to: int, size: int) -> int:
    """Copy `size` bytes between two files; opened here, because thousands at once would be too many."""
    with path.open("rb") as file:
        if _copied(file.fileno(), start, target, to, size) < size:
            raise truncated_error(path, start + size)
    return size


def _copied(source: int, start: int, target: int, to: int, size: int) -> int:
    """How many bytes were there to copy; in the kernel where it can."""
    done, in_kernel = 0, True
    while done < size:
        if in_kernel:
            try:
                moved = os.copy_file_range(source, target, size - done, start + done, to + done)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                in_kernel = False
                continue
        else:
            part = os.pread(source, min(1 << 20, size - done), start + done)
            moved = os.pwrite(target, part, to + done)
        if not moved:
            break
        done += moved
    return done


def _translate(
    data: IndexedDataset, first: int, last: int, shift: int, dtype: np.dtype[Any], target: int, to: int
) -> int:
    """Write the ids `first` to `last` in another dtype, or as much higher as the form wants."""
    limits, done = np.iinfo(dtype), 0
    for at in range(first, last, 1 << 18):
        ids = data.copy_range(at, min(at + (1 << 18), last))
        low, high = int(ids.min()), int(ids.max()) + shift
        if ids.dtype.kind not in "iu" or low < limits.min or high > limits.max:
            wanted = f"{limits.min} to {limits.max - shift}, which {dtype} can hold"
            raise FormatError(
                sibling(data.prefix, ".bin"), "ids", found=f"{low} to {high - shift}", wanted=wanted
            )
        part = (ids.astype(dtype.newbyteorder("<")) + dtype.type(shift)).tobytes()
        write_at(target, memoryview(part), to + done)
        done += len(part)
    return done
