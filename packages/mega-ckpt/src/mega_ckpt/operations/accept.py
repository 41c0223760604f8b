"""Accept edited side files of a checkpoint: rewrite their checksums."""

from __future__ import annotations

import json
from pathlib import Path

from mega_ckpt.checkpoint.verify import check_metadata
from mega_schema.atomic_io import disk_errors, sync_folder
from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.checkpoint.side_files import (
    DIGEST,
    MANIFEST,
    describe_side_files,
    digest_line,
    read_regular,
    rewrite_checksums,
)
from mega_schema.checkpoint.tracker import latest_checkpoint
from mega_schema.errors import CorruptFileError, MegaError


def accept_edits(path: Path) -> list[str]:
    """Rewrite the checksums of a checkpoint's side files and of its manifest.

    Args:
        path: a checkpoint's folder, or a run's folder for its latest checkpoint.

    Returns:
        the files whose checksums changed; none if no file was edited.

    Raises:
        MegaError: the checkpoint would not be valid. Then nothing is changed.
    """
    folder = path if (path / MANIFEST).is_file() else latest_checkpoint(path)
    before = read_regular(folder / MANIFEST)
    try:
        manifest = json.loads(before)
        recorded = dict(manifest.get("side_files", {}))
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise CorruptFileError(
            folder / MANIFEST,
            "is not a manifest",
            found=error,
            hint="restore the file, or use another iteration",
        ) from error
    side_files = describe_side_files(folder)
    changed = sorted(name for name in {*side_files, *recorded} if side_files.get(name) != recorded.get(name))
    digest = folder / DIGEST
    old_digest = digest.read_bytes() if digest.is_file() else b""
    if old_digest != digest_line(before).encode():
        changed.append(MANIFEST)
    if not changed and manifest.get("format") == FORMAT:
        return []
    with lock_run_folder(folder.parent, named_by="FOLDER"), disk_errors(folder):
        rewrite_checksums(folder, FORMAT)
        sync_folder(folder)
        try:
            check_metadata(Checkpoint(folder))
        except MegaError:
            (folder / MANIFEST).write_bytes(before)
            digest.write_bytes(old_digest)
            if not old_digest:
                digest.unlink()
            raise
    return changed
