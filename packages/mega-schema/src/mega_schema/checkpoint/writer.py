"""Write a checkpoint, by one process or by many that share a file system.

    writer = CheckpointWriter(run, iteration)
    writer.begin()                                     # rank 0, then a barrier
    writer.write("model", rank, boxes, values)         # every rank, every namespace, then a barrier
    writer.commit(spec, layout=…, trainer=…)           # rank 0

Until `commit` renames it, the folder has a name that no reader opens. A process killed at any moment leaves
the previous checkpoint intact, and the next `begin` removes the unfinished one. A training run writes in the
background instead (`async_writer`): the same files in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mega_schema.atomic_io import disk_errors
from mega_schema.checkpoint import checkpoint_dir, shard_file
from mega_schema.checkpoint.checkpoint_dir import RUN_CONFIG, TRAINER, partial_folder
from mega_schema.checkpoint.reader import BoxToWrite, BoxValues
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec


class CheckpointWriter:
    """A checkpoint being written.

    Attributes:
        folder: where its files go until it is committed.
    """

    def __init__(self, run: Path, iteration: int) -> None:
        self.run = run
        self.iteration = iteration
        self.folder = partial_folder(run, iteration)

    def begin(self) -> None:
        """Create the folder, and remove the files of an earlier unfinished save."""
        checkpoint_dir.begin(self.run, self.iteration)

    def write(self, namespace: str, rank: int, boxes: Sequence[BoxToWrite], values: BoxValues) -> None:
        """Write this rank's boxes of a namespace as one safetensors file, one box in memory at a time.

        Args:
            values: called once per box, in order; its array has the box's shape and stored dtype.

        Raises:
            MegaError: the disk is full, or refused the write for another reason.
        """
        boxes = [box for box in boxes if not box.slab.is_empty]

        def payload(number: int) -> memoryview:
            box = boxes[number]
            array = np.ascontiguousarray(values(box))
            assert array.shape == box.slab.shape, f"{box.name}: {array.shape} for {box.slab.shape}"
            return array.reshape(-1).view(np.uint8).data

        with disk_errors(self.folder):
            for _ in shard_file.write_shard_file(
                self.folder, namespace, rank, [box.to_record() for box in boxes], payload
            ):
                pass

    def commit(
        self,
        spec: ModelSpec,
        *,
        layout: Layout,
        trainer: Mapping[str, Any],
        tokenizer: Path | None = None,
        run_config: str | None = None,
        replace: bool = False,
    ) -> Path:
        """Assemble what the ranks wrote, and make it the run's latest checkpoint.

        Args:
            layout: the layout that wrote it; informational.
            tokenizer: folder whose files are copied into the checkpoint.
            run_config: the run's configuration as TOML, for people and for `mega-train`.
            replace: replace a checkpoint of this iteration; without it that is an error.

        Returns:
            the checkpoint's folder under its final name.

        Raises:
            MegaError: the disk is full, or refused the write for another reason.
        """
        with disk_errors(self.folder):
            return checkpoint_dir.commit(
                self.run,
                self.iteration,
                manifest_header(spec, layout),
                text_files(trainer, run_config),
                tokenizer,
                replace=replace,
            )


def manifest_header(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Return the manifest's fields besides files and tensors."""
    degrees = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    if layout.vp > 1:
        degrees["vp"] = layout.vp
    return {"model": spec.to_dict(), "layout": degrees}


def text_files(trainer: Mapping[str, Any], run_config: str | None) -> dict[str, str]:
    """Return the text files of a checkpoint, by name."""
    files = {TRAINER: json.dumps(dict(trainer), indent=1)}
    return files if run_config is None else files | {RUN_CONFIG: run_config}
