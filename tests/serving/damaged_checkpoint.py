"""A copy of a checkpoint whose weights are not those that were written."""

from __future__ import annotations

import shutil
from pathlib import Path

from mega_schema.checkpoint.reader import Checkpoint


def copy_damaged(run: Path, folder: Path) -> Path:
    """Copy a run's newest checkpoint, flip one bit of its weights, and return their file.

    Args:
        folder: of the copy; it must not exist.
    """
    shutil.copytree(Checkpoint.open(run).folder, folder)
    (weights,) = folder.glob("model-*")
    content = bytearray(weights.read_bytes())
    content[-100] ^= 0x40
    weights.write_bytes(content)
    return weights
