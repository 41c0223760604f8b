"""Verify a checkpoint against its manifest and its model, byte for byte.

Opening a checkpoint checks the manifest and the sizes of the files. This module does the costly checks: the
parameter table, the cover of every tensor by its pieces, the file headers, the checksums, the tokenizer.
"""

from __future__ import annotations

import contextlib
import math
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np

from mega_ckpt.tensors import dtypes, safetensors_io
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_ckpt.tensors.parallel_map import Progress, UpdateProgress, no_progress, parallel_map
from mega_ckpt.tensors.row_stream import CHUNK_BYTES, PieceReader, rows_per_chunk, stream_rows
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import MANIFEST, PIECE_FORMAT, RUN_CONFIG, TOKENIZER, TRAINER
from mega_schema.checkpoint.reader import MAIN, MODEL, MOMENTS, Checkpoint, TensorPiece
from mega_schema.checkpoint.shard_file import piece_key
from mega_schema.errors import FormatError
from mega_schema.sharding import Shape, overlap
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder

# the namespace with the parameters that a namespace of Muon lacks
_COMPLEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "optim.momentum": "optim.exp_avg",
        "optim.exp_avg": "optim.momentum",
        "optim.exp_avg_sq": "optim.momentum",
    }
)


class _Box(Protocol):
    """A box of a tensor."""

    @property
    def start(self) -> Shape: ...

    @property
    def shape(self) -> Shape: ...


BoxT = TypeVar("BoxT", bound=_Box)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The numbers of verified tensors, pieces and bytes."""

    tensors: int
    pieces: int
    bytes: int


def verify(
    checkpoint: Checkpoint, progress: Progress = no_progress, spaces: Collection[str] | None = None
) -> VerifyResult:
    """Verify metadata and checksums.

    Args:
        progress: called with the bytes read.
        spaces: the namespaces whose data is read; None: all.

    Raises:
        FormatError: the first fault; cheap checks run first.
    """
    check_metadata(checkpoint)
    spaces = {*checkpoint.tensors} if spaces is None else spaces
    verify_checksums(checkpoint, spaces, progress)
    pieces = [piece for space, *_, piece in checkpoint.pieces() if space in spaces]
    tensors = sum(len(checkpoint.tensors[space]) for space in spaces)
    return VerifyResult(tensors, len(pieces), sum(piece.bytes for piece in pieces))


def check_metadata(checkpoint: Checkpoint) -> None:
    """Check everything but the tensor data.

    Raises:
        FormatError: the first fault.
    """
    check_table(checkpoint)
    check_cover(checkpoint)
    check_headers(checkpoint)
    check_companions(checkpoint)


def check_table(checkpoint: Checkpoint) -> None:
    """Check that every namespace has the model's parameters, in their shapes, and no others.

    A tied parameter is not on disk. An optimizer's namespace has the rows of the model; with Muon, each
    parameter has either a momentum or the two moments of Adam.
    """
    shapes = {row.name: row.shape for row in table(checkpoint.spec) if row.tied_to is None}
    manifest = checkpoint.folder / MANIFEST
    if MODEL not in checkpoint.tensors:
        raise FormatError(manifest, "namespace missing", found=sorted(checkpoint.tensors), wanted=MODEL)
    for moment, partner in (MOMENTS, MOMENTS[::-1]):
        if moment in checkpoint.tensors and partner not in checkpoint.tensors:
            raise FormatError(manifest, "namespace missing", found=f"{moment} alone", wanted=partner)
    for space, entries in checkpoint.tensors.items():
        complement = checkpoint.tensors.get(_COMPLEMENTS.get(space, ""), {})
        wanted = {name: shape for name, shape in shapes.items() if name not in complement}
        for name, shape in wanted.items():
            if name not in entries:
                raise FormatError(manifest, f"{space} has no tensor", wanted=name)
            if entries[name].shape != shape:
                raise FormatError(
                    f"{manifest}: {space} {name}", "shape", found=entries[name].shape, wanted=shape
                )
        for name, tensor in entries.items():
            if space != MODEL and tensor.dtype != "F32":
                raise FormatError(f"{manifest}: {space} {name}", "dtype", found=tensor.dtype, wanted="F32")
            if name not in wanted:
                raise FormatError(manifest, f"{space} has a tensor that is not in the model", found=name)


def check_cover(checkpoint: Checkpoint) -> None:
    """Check that the pieces of every tensor cover it without overlap."""
    for space, entries in checkpoint.tensors.items():
        for name, tensor in entries.items():
            where = f"{checkpoint.folder / MANIFEST}: {space} {name}"
            if (overlapping := find_overlap(tensor.pieces)) is not None:
                a, b = overlapping
                raise FormatError(where, "two pieces overlap", found=f"{a.file} and {b.file}")
            covered = sum(math.prod(piece.shape) for piece in tensor.pieces)
            if covered != math.prod(tensor.shape):
                raise FormatError(
                    where, "elements covered by pieces", found=covered, wanted=math.prod(tensor.shape)
                )


def find_overlap(pieces: Sequence[BoxT]) -> tuple[BoxT, BoxT] | None:
    """Return two pieces that share an element; None if there are none."""
    if len(pieces) < 2:
        return None
    # sweep along the dimension with the most splits: few candidates per piece
    dim = max(range(len(pieces[0].start)), key=lambda d: len({piece.start[d] for piece in pieces}))
    active: list[BoxT] = []
    for piece in sorted(pieces, key=lambda piece: piece.start[dim]):
        active = [p for p in active if p.start[dim] + p.shape[dim] > piece.start[dim]]
        for earlier in active:
            if overlap(earlier.start, earlier.shape, piece.start, piece.shape) is not None:
                return earlier, piece
        active.append(piece)
    return None


def check_headers(checkpoint: Checkpoint) -> None:
    """Check that the safetensors header of every file agrees with the manifest."""
    expected: dict[str, dict[str, MappedTensor]] = {name: {} for name in checkpoint.files}
    for _, name, tensor, piece in checkpoint.pieces():
        file = checkpoint.folder / piece.file
        key = piece_key(name, tensor.shape, piece.start, piece.shape)
        expected[piece.file][key] = MappedTensor(file, tensor.dtype, piece.shape, piece.offset)
    for name, wanted in expected.items():
        path = checkpoint.folder / name
        header = safetensors_io.read_header(path)
        if header.metadata != {"format": f"mega {PIECE_FORMAT}"}:
            said_format = f"format mega {PIECE_FORMAT}"
            raise FormatError(path, "metadata", found=dict(header.metadata), wanted=said_format)
        for key in sorted(wanted.keys() ^ header.entries.keys()):
            whose = MANIFEST if key in wanted else "its header"
            raise FormatError(path, "header and manifest disagree", found=f"{key} only in {whose}")
        for key, entry in wanted.items():
            if header.entries[key] != entry:
                found, want = (f"{e.dtype} {e.shape} at {e.offset}" for e in (header.entries[key], entry))
                raise FormatError(f"{path}: {key}", "header and manifest disagree", found=found, wanted=want)


def verify_checksums(
    checkpoint: Checkpoint, spaces: Collection[str], progress: Progress = no_progress
) -> None:
    """Verify the checksum of every piece, and that 16-bit weights equal the rounded main weights.

    All cores read, and each byte is read once.

    Args:
        spaces: the namespaces that are read.
        progress: called with the bytes read.
    """

    def piece(space: str, name: str, piece: TensorPiece, update: UpdateProgress) -> None:
        part = np.empty(min(CHUNK_BYTES, piece.bytes), np.uint8).data
        with contextlib.closing(PieceReader(checkpoint, space, name, piece)) as reader:
            for begin in range(0, piece.bytes, CHUNK_BYTES):
                block = part[: piece.bytes - begin]
                reader.read_into(block)
                update(len(block))
            reader.finish()

    every = [job for job in checkpoint.pieces() if job[0] in spaces]
    pairs = _rounded_weights(checkpoint) if {MODEL, MAIN} <= {*spaces} else []
    alone = [job for job in every if job[0] not in (MODEL, MAIN) or job[1] not in pairs]
    alone.sort(key=lambda job: (job[3].file, job[3].offset))  # in disk order
    jobs: list[Callable[[UpdateProgress], None]] = [
        partial(_check_rounded, checkpoint, name) for name in pairs
    ]
    jobs += [partial(piece, space, name, entry) for space, name, _, entry in alone]
    with progress(sum(entry.bytes for *_, entry in every)) as update:
        parallel_map(jobs, lambda job, update: job(update), update)


def _rounded_weights(checkpoint: Checkpoint) -> list[str]:
    """Return the 16-bit weights that have float32 main weights."""
    main = checkpoint.tensors.get(MAIN, {})
    return [
        name for name, t in checkpoint.tensors[MODEL].items() if name in main and t.dtype in ("BF16", "F16")
    ]


def _check_rounded(checkpoint: Checkpoint, name: str, update: UpdateProgress) -> None:
    """Check that a 16-bit weight equals the rounded main weight; verify both checksums."""
    tensor = checkpoint.tensors[MODEL][name]
    rows = rows_per_chunk(tensor.shape, "F32")
    streams = (stream_rows(checkpoint, space, name, rows) for space in (MODEL, MAIN))
    for weights, main in zip(*streams, strict=True):
        wanted = dtypes.round_float32(main.values, tensor.dtype)
        update(weights.values.nbytes + main.values.nbytes)
        if weights.values.tobytes() == wanted.tobytes():
            continue
        found, want = (dtypes.as_float32(values, tensor.dtype) for values in (weights.values, wanted))
        differs = (found != want) & ~(np.isnan(found) & np.isnan(want))
        if differs.any():
            raise FormatError(
                f"{checkpoint.folder}: {MODEL} {name}",
                f"is not {MAIN} rounded to {tensor.dtype}",
                found=float(found[differs][0]),
                wanted=float(want[differs][0]),
                hint="mega-ckpt reshard --dtype makes the weights again from the optimizer's",
            )


def check_companions(checkpoint: Checkpoint) -> None:
    """Check trainer.json, run.toml and the tokenizer against the manifest and the model."""
    iteration = checkpoint.trainer.get("iteration", checkpoint.iteration)
    if iteration != checkpoint.iteration:
        raise FormatError(
            checkpoint.folder / TRAINER, "iteration", found=iteration, wanted=checkpoint.iteration
        )
    try:
        tomllib.loads(checkpoint.run_config or "")
    except tomllib.TOMLDecodeError as error:
        raise FormatError(checkpoint.folder / RUN_CONFIG, "is not TOML", found=error) from error
    folder = checkpoint.folder / TOKENIZER
    if not folder.exists():
        return
    identity = open_tokenizer_folder(folder).identity
    if identity.vocab_size > checkpoint.spec.vocab:
        raise FormatError(
            folder, "ids", found=identity.vocab_size, wanted=f"at most the model's {checkpoint.spec.vocab}"
        )
