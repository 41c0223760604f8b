"""Summarize a checkpoint: a Mega checkpoint from its manifest alone, others with their reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint, TensorEntry
from mega_schema.params import count_params
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder


def summarize_checkpoint(checkpoint: Checkpoint, *, tensors: bool = False) -> dict[str, Any]:
    """Summarize a Mega checkpoint as a JSON object.

    Args:
        tensors: include the shape, dtype and pieces of every tensor.

    Raises:
        FormatError: the tokenizer's folder is incomplete.
    """
    folder = checkpoint.folder / TOKENIZER
    summary: dict[str, Any] = {
        "folder": str(checkpoint.folder),
        "iteration": checkpoint.iteration,
        "parameters": count_params(table(checkpoint.spec)),
        "model": checkpoint.spec.to_dict(),
        "written_by": checkpoint.written_by,
        "namespaces": {space: _summarize_namespace(entries) for space, entries in checkpoint.tensors.items()},
        "tokenizer": open_tokenizer_folder(folder).identity.to_dict() if folder.is_dir() else None,
        "trainer": checkpoint.trainer,
    }
    if tensors:
        summary["tensors"] = {
            space: {name: _summarize_tensor(tensor) for name, tensor in entries.items()}
            for space, entries in checkpoint.tensors.items()
        }
    return summary


def summarize_source(source: CheckpointSource, format_name: str, *, tensors: bool = False) -> dict[str, Any]:
    """Summarize a checkpoint of another format under Mega's names, without files and pieces.

    Args:
        format_name: name of the format.
        tensors: include the shape and dtype of every tensor.
    """
    rows = {row.name: row for row in table(source.spec)}
    summary: dict[str, Any] = {
        "folder": str(source.path),
        "format": format_name,
        "iteration": source.iteration,
        "parameters": count_params(rows.values()),
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
        "left": list(source.dropped),
    }
    if tensors:
        summary["tensors"] = {
            space: {
                name: {"shape": list(rows[name].shape), "dtype": dtype} for name, dtype in entries.items()
            }
            for space, entries in source.spaces.items()
        }
    return summary


def _summarize_namespace(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    pieces = [piece for tensor in entries.values() for piece in tensor.pieces]
    return {
        "tensors": len(entries),
        "dtypes": sorted({tensor.dtype for tensor in entries.values()}),
        "pieces": len(pieces),
        "files": len({piece.file for piece in pieces}),
        "bytes": sum(piece.bytes for piece in pieces),
    }


def _summarize_tensor(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "pieces": [
            {"file": piece.file, "start": list(piece.start), "shape": list(piece.shape)}
            for piece in tensor.pieces
        ],
    }
