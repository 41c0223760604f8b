"""Writing a checkpoint, by one process or by many that share a file system.

    save = Save(run, iteration)
    save.begin()                                       # rank 0, then a barrier
    save.write("model", rank, boxes, values)           # every rank, every namespace, then a barrier
    save.commit(spec, layout=…, trainer=…)             # rank 0

Until `commit` renames it, the folder has a name no reader looks at. A process killed at any moment leaves the
checkpoint before it as it was, and the next `begin` clears away what was left.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mega_schema.checkpoint import (
    FORMAT,
    LATEST,
    MANIFEST,
    RUN_CONFIG,
    TOKENIZER,
    TRAINER,
    Box,
    Values,
    iteration_folder,
    piece_key,
    replaced_folder,
)
from mega_schema.layout import Layout
from mega_schema.spec import ModelSpec
from mega_schema.staging import on_disk


class Save:
    """One checkpoint being written.

    Attributes:
        folder: where its files go until it is committed.
    """

    def __init__(self, run: Path, iteration: int) -> None:
        self.run, self.iteration = run, iteration
        self.folder = run / f".iter_{iteration:07d}.partial"

    def begin(self) -> None:
        """Make room. What an earlier save left half-written is removed."""
        self.run.mkdir(parents=True, exist_ok=True)
        for left in self.run.glob(".iter_*.replaced"):
            final = self.run / left.stem.removeprefix(".")
            if final.exists():
                shutil.rmtree(left)
            else:
                left.rename(final)
        for left in self.run.glob(".iter_*.partial"):
            shutil.rmtree(left)
        self.folder.mkdir()

    def write(self, namespace: str, rank: int, boxes: Sequence[Box], values: Values) -> None:
        """Write this rank's boxes of a namespace as one safetensors file, one box in memory at a time.

        Args:
            values: called once per box, in order; its array has the box's shape and stored dtype.

        Raises:
            MegaError: the disk is full, or would not write for another reason.
        """
        boxes = [box for box in boxes if not box.slab.empty]
        if not boxes:
            return
        name = f"{namespace}-{rank:05d}"
        file = self.folder / f"{name}.safetensors"
        records = []
        with on_disk(self.folder), file.open("wb") as out:
            out.write(_header(boxes))
            for box in boxes:
                array = np.ascontiguousarray(values(box))
                assert array.shape == box.slab.shape, f"{box.name}: {array.shape} for {box.slab.shape}"
                assert array.nbytes == box.bytes, f"{box.name}: {array.dtype} for {box.dtype}"
                payload = array.reshape(-1).view(np.uint8).data
                records.append(
                    {
                        "name": box.name,
                        "whole": box.whole,
                        "dtype": box.dtype,
                        "file": file.name,
                        "offset": out.tell(),
                        "bytes": box.bytes,
                        "start": box.slab.start,
                        "shape": box.slab.shape,
                        "crc32": zlib.crc32(payload),
                    }
                )
                out.write(payload)
            _flush(out.fileno())
        record = {"namespace": namespace, "file": file.name, "size": file.stat().st_size, "pieces": records}
        _write(self.folder / f"{name}.pieces", json.dumps(record))

    def commit(
        self,
        spec: ModelSpec,
        *,
        layout: Layout,
        trainer: Mapping[str, Any],
        tokenizer: Path | None = None,
        run_config: str | None = None,
    ) -> Path:
        """Put together what the ranks wrote, and make it the run's latest checkpoint.

        Args:
            layout: the layout that wrote it, for people to read.
            tokenizer: folder whose files travel with the checkpoint.
            run_config: the run's configuration as TOML, for people and for `mega-train`.

        Returns:
            the checkpoint's folder under its final name.

        Raises:
            MegaError: the disk is full, or would not write for another reason.
        """
        parts = sorted(self.folder.glob("*.pieces"))
        records = [json.loads(part.read_bytes()) for part in parts]
        manifest = {
            "format": FORMAT,
            "iteration": self.iteration,
            "model": spec.to_dict(),
            "layout": {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp},
            "files": {record["file"]: record["size"] for record in records},
            "tensors": _tensors(records),
        }
        _write(self.folder / TRAINER, json.dumps(dict(trainer), indent=1))
        if run_config is not None:
            _write(self.folder / RUN_CONFIG, run_config)
        if tokenizer is not None:
            shutil.copytree(tokenizer, self.folder / TOKENIZER)
            for copied in (self.folder / TOKENIZER).iterdir():
                with copied.open("rb") as file:
                    _flush(file.fileno())
        for part in parts:
            part.unlink()
        _write(self.folder / MANIFEST, json.dumps(manifest))
        _flush_folder(self.folder)
        final = iteration_folder(self.run, self.iteration)
        if final.exists():
            # a folder cannot be renamed onto another; between the two renames `latest` finds the replaced one
            replaced = replaced_folder(self.run, self.iteration)
            final.rename(replaced)
            self.folder.rename(final)
            shutil.rmtree(replaced)
        else:
            self.folder.rename(final)
        _flush_folder(self.run)
        with replacing(self.run / LATEST) as tracker:
            tracker.write_text(f"{self.iteration}\n", "utf-8")
        return final


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under; it becomes `path` when the block ends well, else it goes."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as written:
            _flush(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(boxes: Sequence[Box]) -> bytes:
    """safetensors' header: the length of a JSON text as u64, and the text, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": f"mega {FORMAT}"}}
    at = 0
    for box in boxes:
        key = piece_key(box.name, box.whole, box.slab.start, box.slab.shape)
        entries[key] = {"dtype": box.dtype, "shape": box.slab.shape, "data_offsets": [at, at + box.bytes]}
        at += box.bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensors(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    spaces: dict[str, dict[str, Any]] = {}
    for record in records:
        entries = spaces.setdefault(record["namespace"], {})
        for piece in record["pieces"]:
            whole, dtype, name = piece.pop("whole"), piece.pop("dtype"), piece.pop("name")
            entry = entries.setdefault(name, {"shape": whole, "dtype": dtype, "pieces": []})
            entry["pieces"].append(piece)
    for space, entries in spaces.items():
        for name, entry in entries.items():
            written = sum(math.prod(piece["shape"]) for piece in entry["pieces"])
            assert written == math.prod(entry["shape"]), f"{space} {name}: {written} elements written"
    return spaces


def _write(path: Path, text: str) -> None:
    with on_disk(path.parent), path.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        _flush(out.fileno())


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with on_disk(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
