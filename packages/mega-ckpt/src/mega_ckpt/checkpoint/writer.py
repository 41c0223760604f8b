"""Write a checkpoint into a run's folder, whole or not at all, on all cores."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mega_ckpt.checkpoint.output_dir import other_checkpoints_error
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.parallel_map import Progress, UpdateProgress, no_progress, parallel_map
from mega_ckpt.tensors.row_stream import ReadRows, RowChunk, as_bytes
from mega_schema.arch import table
from mega_schema.atomic_io import disk_errors
from mega_schema.checkpoint import shard_file
from mega_schema.checkpoint.checkpoint_dir import MANIFEST, iteration_folder, iterations, replaced_folder
from mega_schema.checkpoint.reader import MAIN, MODEL, BoxToWrite, boxes_to_write
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output
from mega_schema.parallel_layout import Coordinates, Layout
from mega_schema.sharding import overlap
from mega_schema.spec import ModelSpec

Dtypes = Mapping[str, Mapping[str, str]]  # namespace -> parameter -> safetensors' name of its dtype


@dataclass(frozen=True, slots=True)
class NamespacePlan:
    """A namespace to write: the source namespace of its values, and their dtypes."""

    space: str
    dtypes: Mapping[str, str]


def namespaces_to_write(
    stored: Dtypes, *, optimizer: bool = True, dtype: str | None = None
) -> dict[str, NamespacePlan]:
    """Plan which of the stored namespaces to write.

    With a dtype, the weights are rounded once, from the main weights if there are any. Main weights are
    written only for 16-bit weights.

    Args:
        optimizer: write the optimizer's namespaces too.
        dtype: of the weights, a key of `dtypes.NAMES`; None keeps the dtype of every namespace.
    """
    state = [space for space in stored if space != MODEL] if optimizer else []
    if dtype is None:
        return {space: NamespacePlan(space, stored[space]) for space in (MODEL, *state)}
    precise = MAIN if MAIN in stored else MODEL
    weights_dtype = dtypes.NAMES[dtype]
    plans = {MODEL: NamespacePlan(precise, dict.fromkeys(stored[precise], weights_dtype))}
    if state and weights_dtype != "F32":
        plans[MAIN] = NamespacePlan(precise, dict.fromkeys(stored[precise], "F32"))
    return plans | {space: NamespacePlan(space, stored[space]) for space in state if space != MAIN}


@dataclass(frozen=True, slots=True)
class RankShare:
    """The boxes of a namespace that one rank writes."""

    rank: int
    boxes: tuple[BoxToWrite, ...]


def rank_shares(spec: ModelSpec, layout: Layout, kinds: Mapping[str, str]) -> list[RankShare]:
    """Assign the boxes to write to the ranks of a layout.

    Args:
        kinds: dtype of every parameter to write, by its safetensors name.

    Raises:
        LayoutError: the model cannot be split this way.
    """
    rows = [row for row in table(spec) if row.tied_to is None and row.name in kinds]
    shares = []
    for pp in range(layout.pp):
        stages = [layout.stage(pp, spec.layers, chunk) for chunk in range(layout.vp)]
        stage_rows = [row for stage in stages for row in rows if row.is_on(stage)]
        for tp in range(layout.tp):
            boxes_by_param = [
                boxes_to_write(row.name, row.shape, row.saved_boxes(tp, layout.tp), kinds[row.name])
                for row in stage_rows
            ]
            rank = layout.rank(Coordinates(tp, 0, pp))
            shares.append(RankShare(rank, tuple(box for group in boxes_by_param for box in group)))
    return shares


def check_run_folder(run: Path, iteration: int, *, force: bool) -> None:
    """Refuse a run with other checkpoints; with `force`, replace the same iteration.

    Raises:
        ConfigError: the run has other checkpoints, is a checkpoint itself, or is not a folder.
    """
    check_output("--save", run, "folder", is_ours=lambda _: True)
    if (run / MANIFEST).exists():
        hint = f"--save {run.parent}"
        raise ConfigError("--save", "is a checkpoint", found=run, wanted="the folder of a run", hint=hint)
    if (other_iterations := [i for i in iterations(run) if i != iteration]) and not force:
        raise other_checkpoints_error(iteration_folder(run, other_iterations[-1]))
    existing = [f for f in (iteration_folder(run, iteration), replaced_folder(run, iteration)) if f.exists()]
    if existing and not force:
        raise ConfigError(
            "--save", "there is a checkpoint already", found=existing[0], hint="add --force to replace it"
        )
    for folder in existing:
        if not (folder / MANIFEST).exists():
            message = f"contains something other than a Mega checkpoint: no {MANIFEST}"
            raise ConfigError("--save", message, found=folder, wanted="another folder")


@contextmanager
def saving_checkpoint(run: Path, iteration: int) -> Iterator[CheckpointWriter]:
    """Begin a save; the block writes and commits. If the block fails, the run is left unchanged."""
    is_new = not run.exists()
    save = CheckpointWriter(run, iteration)
    run.mkdir(parents=True, exist_ok=True)
    with lock_run_folder(run):  # before `begin`, which removes half-written files of others
        try:
            save.begin()
            yield save
        except BaseException:  # also after an interruption
            shutil.rmtree(save.folder, ignore_errors=True)
            if is_new:
                with contextlib.suppress(OSError):
                    run.rmdir()
            raise


def write_shares(
    save: CheckpointWriter,
    spaces: Mapping[str, Sequence[RankShare]],
    read_rows: ReadRows,
    progress: Progress = no_progress,
) -> int:
    """Write the boxes of all ranks on all cores, with a few row chunks in memory.

    Args:
        read_rows: reads the rows of a tensor in the dtype of its boxes; called by several threads.
        progress: called with the bytes written.

    Returns:
        the bytes of all boxes.

    Raises:
        MegaError: the disk is full, or refused the write for another reason.
    """
    files = [_RankFileWriter(save.folder, space, share) for space, group in spaces.items() for share in group]
    size = sum(file.bytes for file in files)
    targets: dict[tuple[str, str], list[tuple[_RankFileWriter, int]]] = {}
    for file in files:
        for number, box in enumerate(file.boxes):
            targets.setdefault((file.space, box.name), []).append((file, number))

    def tensor(key: tuple[str, str], update: UpdateProgress) -> None:
        for chunk in read_rows(*key):
            for file, number in targets[key]:
                update(file.put(number, chunk))

    with disk_errors(save.folder), contextlib.ExitStack() as open_files:
        for file in files:
            open_files.callback(file.close)
        with progress(size) as update:
            parallel_map(list(targets), tensor, update)
    return size


class _RankFileWriter:
    """The file of one rank, open only while its values are written: a layout may have thousands of files."""

    def __init__(self, folder: Path, space: str, share: RankShare) -> None:
        self.space = space
        self.boxes = [box for box in share.boxes if not box.slab.is_empty]
        self._folder = folder
        self._rank = share.rank
        self.bytes = self._remaining_bytes = sum(box.bytes for box in self.boxes)
        self._lock = threading.Lock()
        self._file: shard_file.ShardFileWriter | None = None

    def put(self, number: int, chunk: RowChunk) -> int:
        """Write a chunk's part of a box; finish the file after its last byte. Return the bytes written."""
        slab = self.boxes[number].slab
        values = chunk.values
        common = overlap(slab.start, slab.shape, (chunk.first, *(0,) * (values.ndim - 1)), values.shape)
        if common is None:
            return 0
        data = as_bytes(values[common.b])
        with self._lock:
            if self._file is None:
                records = [box.to_record() for box in self.boxes]
                self._file = shard_file.ShardFileWriter(self._folder, self.space, self._rank, records)
        self._file.write(number, data)
        with self._lock:
            self._remaining_bytes -= len(data)
            last = not self._remaining_bytes
        if last:
            self._file.finish()
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
