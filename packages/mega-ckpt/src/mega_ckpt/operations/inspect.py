"""What is in a checkpoint: of ours from its manifest alone, of another format by its reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import Source
from mega_schema.arch import table
from mega_schema.checkpoint import Checkpoint, Tensor
from mega_schema.params import count
from mega_schema.run_folder import TOKENIZER
from mega_schema.tokenizer import open_folder


def summary(checkpoint: Checkpoint, *, tensors: bool = False) -> dict[str, Any]:
    """A JSON object of what a person asks first.

    Args:
        tensors: say the shape, dtype and pieces of every tensor too.

    Raises:
        FormatError: the tokenizer's folder is not whole.
    """
    folder = checkpoint.folder / TOKENIZER
    told: dict[str, Any] = {
        "folder": str(checkpoint.folder),
        "iteration": checkpoint.iteration,
        "parameters": count(table(checkpoint.spec)),
        "model": checkpoint.spec.to_dict(),
        "written_by": checkpoint.written_by,
        "namespaces": {space: _namespace(entries) for space, entries in checkpoint.tensors.items()},
        "tokenizer": open_folder(folder).identity.to_dict() if folder.is_dir() else None,
        "trainer": checkpoint.trainer,
    }
    if tensors:
        told["tensors"] = {
            space: {name: _tensor(tensor) for name, tensor in entries.items()}
            for space, entries in checkpoint.tensors.items()
        }
    return told


def summary_of(source: Source, form: str, *, tensors: bool = False) -> dict[str, Any]:
    """The same of a checkpoint of another format, in our names; files and pieces are its own affair.

    Args:
        form: name of the format.
        tensors: say the shape and dtype of every tensor too.
    """
    rows = {row.name: row for row in table(source.spec)}
    told: dict[str, Any] = {
        "folder": str(source.where),
        "format": form,
        "iteration": source.iteration,
        "parameters": count(rows.values()),
        "model": source.spec.to_dict(),
        "namespaces": {
            space: {
                "tensors": len(entries),
                "dtypes": sorted(set(entries.values())),
                "bytes": source.size(space),
            }
            for space, entries in source.spaces.items()
        },
        "tokenizer": source.tokenizer.identity.to_dict() if source.tokenizer else None,
        "trainer": dict(source.trainer),
        "left": list(source.left),
    }
    if tensors:
        told["tensors"] = {
            space: {
                name: {"shape": list(rows[name].shape), "dtype": dtype} for name, dtype in entries.items()
            }
            for space, entries in source.spaces.items()
        }
    return told


def _namespace(entries: Mapping[str, Tensor]) -> dict[str, Any]:
    pieces = [piece for tensor in entries.values() for piece in tensor.pieces]
    return {
        "tensors": len(entries),
        "dtypes": sorted({tensor.dtype for tensor in entries.values()}),
        "pieces": len(pieces),
        "files": len({piece.file for piece in pieces}),
        "bytes": sum(piece.bytes for piece in pieces),
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "pieces": [
            {"file": piece.file, "start": list(piece.start), "shape": list(piece.shape)}
            for piece in tensor.pieces
        ],
    }
