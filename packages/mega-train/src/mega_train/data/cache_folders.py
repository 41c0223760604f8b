"""The folders in which the order of samples is cached."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mega_schema.remote_files import is_remote
from mega_train.config import DataConfig
from mega_train.data.datasets import Datasets

CACHE_FOLDER = "index-cache"


def cache_folders(data: DataConfig, save: Path | None, datasets: Datasets) -> Sequence[Path]:
    """List the folders to search for a cached sample order; the first writable one stores new ones."""
    if data.cache is not None:
        return [data.cache]
    temporary = Path(tempfile.gettempdir()) / f"mega-{CACHE_FOLDER}-{os.getuid()}"
    prefix = next(iter(datasets.by_prefix))
    folders = [] if data.mock or is_remote(prefix) else [prefix.parent / CACHE_FOLDER]
    if save is not None:
        folders.append(save / CACHE_FOLDER)
    if not temporary.exists() or temporary.stat().st_uid == os.getuid():  # another user may have created it
        folders.append(temporary)
    return folders
