"""A new checkpoint in a run's folder, or none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mega_schema.commit import Save
from mega_schema.errors import ConfigError
from mega_schema.run_folder import iteration_folder, replaced_folder


def check_free(run: Path, iteration: int, *, overwrite: bool) -> None:
    """Refuse a run that has this iteration already.

    Raises:
        ConfigError: it has, and `overwrite` is not asked for.
    """
    taken = [f for f in (iteration_folder(run, iteration), replaced_folder(run, iteration)) if f.exists()]
    if taken and not overwrite:
        raise ConfigError(
            "--save", "there is a checkpoint already", found=taken[0], hint="add --overwrite to replace it"
        )


@contextmanager
def saving(run: Path, iteration: int) -> Iterator[Save]:
    """A save that has begun; the block writes and commits. A block that fails leaves the run as it was."""
    made = not run.exists()
    save = Save(run, iteration)
    try:
        save.begin()
        yield save
    except BaseException:  # an interruption too must leave nothing behind
        shutil.rmtree(save.folder, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                run.rmdir()
        raise
