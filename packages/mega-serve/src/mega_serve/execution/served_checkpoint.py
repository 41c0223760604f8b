"""Choose the checkpoint of an engine that is started again: the one that it served before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mega_schema.checkpoint.checkpoint_dir import MANIFEST, iteration_folder, iterations
from mega_schema.errors import MegaError

logger = logging.getLogger("mega.serve.engine")

LoadedT = TypeVar("LoadedT")


def load_served(
    run: Path, iteration: int | None, load: Callable[[Path], LoadedT], *, follow: bool
) -> LoadedT:
    """Load the checkpoint of `iteration`, whatever the run has written since.

    Args:
        run: folder of a run, or of one checkpoint, which is then loaded.
        iteration: None: the latest of the run.
        load: loads a checkpoint, or the latest of a run.
        follow: if the run has removed or damaged that checkpoint, load the newest one that can be read.

    Raises:
        MegaError: there is none; the message is about the checkpoint of `iteration`.
    """
    if iteration is None or (run / MANIFEST).is_file():
        return load(run)
    try:
        return load(iteration_folder(run, iteration))
    except (MegaError, OSError) as error:
        if not follow:
            raise
        logger.warning("the served checkpoint cannot be loaded again: %s", error)
        problem = error
    for number in reversed(iterations(run)):
        if number == iteration:
            continue
        try:
            return load(iteration_folder(run, number))
        except (MegaError, OSError) as error:
            logger.warning("iteration %d cannot be loaded: %s", number, error)
    raise problem
