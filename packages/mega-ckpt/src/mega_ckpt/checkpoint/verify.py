"""Whether a checkpoint is what its manifest says, byte for byte, and a whole one of its model.

Opening a checkpoint checks the manifest and the sizes of the files. What costs more is here: the table, the
cover of every tensor by its pieces, the headers of the files, the checksums, the tokenizer.
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
from mega_ckpt.tensors.mapped_tensor import Stored
from mega_ckpt.tensors.parallel_map import Progress, Told, each, silent
from mega_ckpt.tensors.row_stream import BAND, PieceReader, rows_at_once, stored_bands
from mega_schema.arch import table
from mega_schema.checkpoint import MAIN, MODEL, MOMENTS, Checkpoint, Piece
from mega_schema.errors import FormatError
from mega_schema.pieces import piece_key
from mega_schema.run_folder import MANIFEST, PIECE_FORMAT, RUN_CONFIG, TOKENIZER, TRAINER
from mega_schema.shard import Shape, overlap
from mega_schema.tokenizer import open_folder

# where the parameters are that a namespace of Muon's has not
_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "optim.momentum": "optim.exp_avg",
        "optim.exp_avg": "optim.momentum",
        "optim.exp_avg_sq": "optim.momentum",
    }
)


class _Lying(Protocol):
    """A box of a tensor."""

    @property
    def start(self) -> Shape: ...

    @property
    def shape(self) -> Shape: ...


Lying = TypeVar("Lying", bound=_Lying)


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at, all of it sound."""

    tensors: int
    pieces: int
    bytes: int


def verify(
    checkpoint: Checkpoint, progress: Progress = silent, spaces: Collection[str] | None = None
) -> Verified:
    """Check everything.

    Args:
        progress: of the bytes read.
        spaces: the namespaces whose numbers are read; None for all.

    Raises:
        FormatError: the first fault that is found, cheap ones first.
    """
    check(checkpoint)
    spaces = {*checkpoint.tensors} if spaces is None else spaces
    check_sums(checkpoint, spaces, progress)
    every = [piece for space, *_, piece in checkpoint.pieces() if space in spaces]
    tensors = sum(len(checkpoint.tensors[space]) for space in spaces)
    return Verified(tensors, len(every), sum(piece.bytes for piece in every))


def check(checkpoint: Checkpoint) -> None:
    """Check all but the numbers.

    Raises:
        FormatError: the first fault that is found.
    """
    check_table(checkpoint)
    check_cover(checkpoint)
    check_headers(checkpoint)
    check_companions(checkpoint)


def check_table(checkpoint: Checkpoint) -> None:
    """Every namespace holds every parameter of the model, whole shape as in the table, and nothing else.

    A tied parameter is not on disk. An optimizer's namespace has the rows of the model's; where one keeps
    momentum of some parameters and moments of the others, each of them is in either.
    """
    every = {row.name: row.shape for row in table(checkpoint.spec) if row.tied_to is None}
    manifest = checkpoint.folder / MANIFEST
    if MODEL not in checkpoint.tensors:
        raise FormatError(manifest, "namespace missing", found=sorted(checkpoint.tensors), wanted=MODEL)
    for one, other_one in (MOMENTS, MOMENTS[::-1]):
        if one in checkpoint.tensors and other_one not in checkpoint.tensors:
            raise FormatError(manifest, "namespace missing", found=f"{one} alone", wanted=other_one)
    for space, entries in checkpoint.tensors.items():
        other = checkpoint.tensors.get(_OTHERS.get(space, ""), {})
        wanted = {name: shape for name, shape in every.items() if name not in other}
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
                raise FormatError(manifest, f"{space} has a tensor that the model has not", found=name)


def check_cover(checkpoint: Checkpoint) -> None:
    """The pieces of every tensor cover it, and no two of them meet."""
    for space, entries in checkpoint.tensors.items():
        for name, tensor in entries.items():
            where = f"{checkpoint.folder / MANIFEST}: {space} {name}"
            if (met := meeting(tensor.pieces)) is not None:
                a, b = met
                raise FormatError(where, "two pieces overlap", found=f"{a.file} and {b.file}")
            covered = sum(math.prod(piece.shape) for piece in tensor.pieces)
            if covered != math.prod(tensor.shape):
                raise FormatError(
                    where, "elements covered by pieces", found=covered, wanted=math.prod(tensor.shape)
                )


def meeting(pieces: Sequence[Lying]) -> tuple[Lying, Lying] | None:
    """Two pieces that share an element, if there are any."""
    if len(pieces) < 2:
        return None
    # a sweep along the dimension that is cut most often meets few candidates per piece
    dim = max(range(len(pieces[0].start)), key=lambda d: len({piece.start[d] for piece in pieces}))
    open_ones: list[Lying] = []
    for piece in sorted(pieces, key=lambda piece: piece.start[dim]):
        open_ones = [p for p in open_ones if p.start[dim] + p.shape[dim] > piece.start[dim]]
        for other in open_ones:
            if overlap(other.start, other.shape, piece.start, piece.shape) is not None:
                return other, piece
        open_ones.append(piece)
    return None


def check_headers(checkpoint: Checkpoint) -> None:
    """Every file is a safetensors file that says of its pieces what the manifest says."""
    said: dict[str, dict[str, Stored]] = {name: {} for name in checkpoint.files}
    for _, name, tensor, piece in checkpoint.pieces():
        file = checkpoint.folder / piece.file
        key = piece_key(name, tensor.shape, piece.start, piece.shape)
        said[piece.file][key] = Stored(file, tensor.dtype, piece.shape, piece.offset)
    for name, wanted in said.items():
        path = checkpoint.folder / name
        header = safetensors_io.read(path)
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


def check_sums(checkpoint: Checkpoint, spaces: Collection[str], progress: Progress = silent) -> None:
    """The bytes of every piece have the checksum they were written with, and narrow weights are the
    optimizer's, rounded. All cores read, and each byte is read once.

    Args:
        spaces: the namespaces that are read.
        progress: of the bytes read.
    """

    def piece(space: str, name: str, piece: Piece, told: Told) -> None:
        part = np.empty(min(BAND, piece.bytes), np.uint8).data
        with contextlib.closing(PieceReader(checkpoint, space, name, piece)) as reader:
            for begin in range(0, piece.bytes, BAND):
                taken = part[: piece.bytes - begin]
                reader.take(taken)
                told(len(taken))
            reader.end()

    every = [job for job in checkpoint.pieces() if job[0] in spaces]
    pairs = _rounded(checkpoint) if {MODEL, MAIN} <= {*spaces} else []
    alone = [job for job in every if job[0] not in (MODEL, MAIN) or job[1] not in pairs]
    alone.sort(key=lambda job: (job[3].file, job[3].offset))  # as they lie on the disk
    jobs: list[Callable[[Told], None]] = [partial(_check_rounded, checkpoint, name) for name in pairs]
    jobs += [partial(piece, space, name, one) for space, name, _, one in alone]
    with progress(sum(one.bytes for *_, one in every)) as told:
        each(jobs, lambda job, told: job(told), told)


def _rounded(checkpoint: Checkpoint) -> list[str]:
    """The weights that are narrower than those that the optimizer keeps."""
    main = checkpoint.tensors.get(MAIN, {})
    return [
        name for name, t in checkpoint.tensors[MODEL].items() if name in main and t.dtype in ("BF16", "F16")
    ]


def _check_rounded(checkpoint: Checkpoint, name: str, told: Told) -> None:
    """A narrow weight is the optimizer's, rounded; and both have their checksums."""
    tensor = checkpoint.tensors[MODEL][name]
    rows = rows_at_once(tensor.shape, "F32")
    both = (stored_bands(checkpoint, space, name, rows) for space in (MODEL, MAIN))
    for narrow, main in zip(*both, strict=True):
        wanted = dtypes.rounded(main.values, tensor.dtype)
        told(narrow.values.nbytes + main.values.nbytes)
        if narrow.values.tobytes() == wanted.tobytes():
            continue
        found, want = (dtypes.as_float32(values, tensor.dtype) for values in (narrow.values, wanted))
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
    """trainer.json is of this iteration, run.toml is TOML, the tokenizer is whole and its ids fit."""
    told = checkpoint.trainer.get("iteration", checkpoint.iteration)
    if told != checkpoint.iteration:
        raise FormatError(checkpoint.folder / TRAINER, "iteration", found=told, wanted=checkpoint.iteration)
    try:
        tomllib.loads(checkpoint.run_config or "")
    except tomllib.TOMLDecodeError as error:
        raise FormatError(checkpoint.folder / RUN_CONFIG, "is not TOML", found=error) from error
    folder = checkpoint.folder / TOKENIZER
    if not folder.exists():
        return
    identity = open_folder(folder).identity
    if identity.vocab_size > checkpoint.spec.vocab:
        raise FormatError(
            folder, "ids", found=identity.vocab_size, wanted=f"at most the model's {checkpoint.spec.vocab}"
        )
