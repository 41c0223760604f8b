"""A new checkpoint in a run's folder, or none; its files filled from bands, on all cores."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mega_ckpt.checkpoint.output_dir import other_checkpoints
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.parallel_map import Progress, Told, each, silent
from mega_ckpt.tensors.row_stream import Band, Bands, as_bytes
from mega_schema import pieces
from mega_schema.arch import table
from mega_schema.checkpoint import MAIN, MODEL, Box, boxes
from mega_schema.commit import Save
from mega_schema.disk import on_disk
from mega_schema.errors import ConfigError
from mega_schema.layout import Coordinates, Layout
from mega_schema.outputs import check_output
from mega_schema.run_folder import MANIFEST, iteration_folder, iterations, replaced_folder
from mega_schema.run_lock import hold_run_folder
from mega_schema.shard import overlap
from mega_schema.spec import ModelSpec

Dtypes = Mapping[str, Mapping[str, str]]  # namespace -> parameter -> safetensors' name of its dtype


@dataclass(frozen=True, slots=True)
class Taken:
    """A namespace to write: the one that its values come from, and the dtypes that they get."""

    space: str
    dtypes: Mapping[str, str]


def taken(stored: Dtypes, *, optimizer: bool = True, dtype: str | None = None) -> dict[str, Taken]:
    """The namespaces to write of those that are stored.

    With a dtype, the weights are rounded once, from the float32 ones that the optimizer keeps where there are
    such. Beside narrower weights the optimizer's state keeps the float32 ones; beside float32 ones, which are
    the same numbers, it does not.

    Args:
        optimizer: carry the optimizer's namespaces too.
        dtype: of the weights, a key of `dtypes.NAMES`; None writes every namespace as it is.
    """
    state = [space for space in stored if space != MODEL] if optimizer else []
    if dtype is None:
        return {space: Taken(space, stored[space]) for space in (MODEL, *state)}
    precise, want = MAIN if MAIN in stored else MODEL, dtypes.NAMES[dtype]
    found = {MODEL: Taken(precise, dict.fromkeys(stored[precise], want))}
    if state and want != "F32":
        found[MAIN] = Taken(precise, dict.fromkeys(stored[precise], "F32"))
    return found | {space: Taken(space, stored[space]) for space in state if space != MAIN}


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes of a namespace."""

    rank: int
    boxes: tuple[Box, ...]


def shares(spec: ModelSpec, layout: Layout, kinds: Mapping[str, str]) -> list[Share]:
    """What every rank of the layout writes: the boxes it answers for.

    Args:
        kinds: safetensors' name of the dtype of every parameter that is written.

    Raises:
        LayoutError: the model cannot be cut this way.
    """
    rows = [row for row in table(spec) if row.tied_to is None and row.name in kinds]
    found = []
    for pp in range(layout.pp):
        stages = [layout.stage(pp, spec.layers, chunk) for chunk in range(layout.vp)]
        mine = [row for stage in stages for row in rows if row.on(stage)]
        for tp in range(layout.tp):
            cut = [boxes(row.name, row.shape, row.owned(tp, layout.tp), kinds[row.name]) for row in mine]
            rank = layout.rank(Coordinates(tp, 0, pp))
            found.append(Share(rank, tuple(box for some in cut for box in some)))
    return found


def check_free(run: Path, iteration: int, *, force: bool) -> None:
    """Refuse a run that has checkpoints; with `force`, only an iteration that another program wrote.

    Raises:
        ConfigError: it has, or it is a checkpoint itself, or no folder.
    """
    check_output("--save", run, "folder", is_ours=lambda _: True)
    if (run / MANIFEST).exists():
        hint = f"--save {run.parent}"
        raise ConfigError("--save", "is a checkpoint", found=run, wanted="the folder of a run", hint=hint)
    if (others := [i for i in iterations(run) if i != iteration]) and not force:
        raise other_checkpoints(iteration_folder(run, others[-1]))
    taken = [f for f in (iteration_folder(run, iteration), replaced_folder(run, iteration)) if f.exists()]
    if taken and not force:
        raise ConfigError(
            "--save", "there is a checkpoint already", found=taken[0], hint="add --force to replace it"
        )
    for folder in taken:
        if not (folder / MANIFEST).exists():
            said = f"holds something else than a checkpoint of ours: no {MANIFEST}"
            raise ConfigError("--save", said, found=folder, wanted="another folder")


@contextmanager
def saving(run: Path, iteration: int) -> Iterator[Save]:
    """A save that has begun; the block writes and commits. A block that fails leaves the run as it was."""
    made = not run.exists()
    save = Save(run, iteration)
    run.mkdir(parents=True, exist_ok=True)
    with hold_run_folder(run):  # before `begin`, which removes what others left half-written
        try:
            save.begin()
            yield save
        except BaseException:  # an interruption too must leave nothing behind
            shutil.rmtree(save.folder, ignore_errors=True)
            if made:
                with contextlib.suppress(OSError):
                    run.rmdir()
            raise


def fill(save: Save, spaces: Mapping[str, Sequence[Share]], bands: Bands, progress: Progress = silent) -> int:
    """Write what the ranks of a layout write, all cores at it, a few bands in memory.

    Args:
        bands: of every tensor that is in a box, in the dtype of its boxes; called by several threads.
        progress: of the bytes written.

    Returns:
        the bytes of all boxes.

    Raises:
        MegaError: the disk is full, or would not write for another reason.
    """
    files = [_File(save.folder, space, share) for space, some in spaces.items() for share in some]
    size = sum(file.bytes for file in files)
    places: dict[tuple[str, str], list[tuple[_File, int]]] = {}
    for file in files:
        for number, box in enumerate(file.boxes):
            places.setdefault((file.space, box.name), []).append((file, number))

    def tensor(key: tuple[str, str], told: Told) -> None:
        for band in bands(*key):
            for file, number in places[key]:
                told(file.put(number, band))

    with on_disk(save.folder), contextlib.ExitStack() as open_files:
        for file in files:
            open_files.callback(file.close)
        with progress(size) as told:
            each(list(places), tensor, told)
    return size


class _File:
    """One rank's file, open from its first values to its last: a layout may have thousands."""

    def __init__(self, folder: Path, space: str, share: Share) -> None:
        self.space, self.boxes = space, [box for box in share.boxes if not box.slab.empty]
        self._folder, self._rank = folder, share.rank
        self.bytes = self._left = sum(box.bytes for box in self.boxes)
        self._one = threading.Lock()
        self._file: pieces.PieceFile | None = None

    def put(self, number: int, band: Band) -> int:
        """Write what a box has of a band, and end the file with its last; returns the bytes."""
        slab, values = self.boxes[number].slab, band.values
        met = overlap(slab.start, slab.shape, (band.first, *(0,) * (values.ndim - 1)), values.shape)
        if met is None:
            return 0
        taken = as_bytes(values[met.b])
        with self._one:
            if self._file is None:
                records = [box.record() for box in self.boxes]
                self._file = pieces.PieceFile(self._folder, self.space, self._rank, records)
        self._file.put(number, taken)
        with self._one:
            self._left -= len(taken)
            last = not self._left
        if last:
            self._file.finish()
        return len(taken)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
