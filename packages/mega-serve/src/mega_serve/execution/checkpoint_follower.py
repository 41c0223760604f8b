"""Follow a training run: load newer checkpoints in a thread, while the engine serves the present one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.tracker import latest_iteration
from mega_schema.errors import FormatError, MegaError, escape_controls
from mega_schema.spec import ModelSpec

logger = logging.getLogger("mega.serve.engine")

_POLL_SECONDS = 2.0  # between two looks at the run for a newer checkpoint
# they change no result of a trained model
_INITIAL_VALUES = frozenset({"family", "init", "init_std", "vocab_multiple"})

LoadedT = TypeVar("LoadedT")
_FileStamp = tuple[str, int, int]


class CheckpointFollower(Generic[LoadedT]):
    """Loads newer checkpoints of a run.

    Two sets of weights are in memory from the start of a load to the swap. A checkpoint that cannot be served
    is reported once and not read again before its files change.

    Args:
        run: the folder of the run.
        served: the checkpoint that is served already.
        load: loads what replaces the present weights.
    """

    def __init__(self, run: Path, served: Checkpoint, load: Callable[[Checkpoint], LoadedT]) -> None:
        self._run = run
        self._spec = served.spec
        self._tokenizer = open_checkpoint_tokenizer(served).identity
        self._iteration = served.iteration
        self._load = load
        self._loaded: LoadedT | None = None
        self._lock = threading.Lock()
        self._reported: set[tuple[int | None, str]] = set()
        self._refused: tuple[_FileStamp, ...] = ()  # the files of a checkpoint that could not be served

    def start(self, seconds: float = _POLL_SECONDS) -> None:
        """Poll in a thread that ends with the process.

        Args:
            seconds: between two polls.
        """

        def follow() -> None:
            while True:
                time.sleep(seconds)
                self.poll()

        threading.Thread(target=follow, name="follow", daemon=True).start()

    def take(self) -> LoadedT | None:
        """Return a newer checkpoint's weights, once."""
        with self._lock:
            loaded, self._loaded = self._loaded, None
        return loaded

    def poll(self) -> None:
        """Look at the run once, and load its latest checkpoint if it is another than the served one."""
        stamps: tuple[_FileStamp, ...] = ()
        try:
            checkpoint = Checkpoint.open(self._run)
            if checkpoint.iteration == self._iteration:
                return
            stamps = _read_stamps(checkpoint.folder)
            if stamps == self._refused:
                return
            self._check_model(checkpoint)
            logger.info("loading iteration %d", checkpoint.iteration)
            loaded = self._load(checkpoint)
        # OSError: the run removed the checkpoint meanwhile; RuntimeError: torch has too little memory
        except (MegaError, OSError, RuntimeError, MemoryError) as error:
            self._refused = stamps
            self._warn(error)
            return
        self._refused = ()
        self._reported.clear()
        self._iteration = checkpoint.iteration
        with self._lock:
            self._loaded = loaded

    def _check_model(self, checkpoint: Checkpoint) -> None:
        """Refuse a model that cannot take the place of the served one.

        Raises:
            FormatError: its shape or its tokenizer is another.
        """
        where = checkpoint.folder
        hint = "start a server of its own for it"
        for name in ModelSpec.__dataclass_fields__:
            before, after = getattr(self._spec, name), getattr(checkpoint.spec, name)
            if before != after and name not in _INITIAL_VALUES:
                what = f"is another model: {name}"
                raise FormatError(where, what, found=after, wanted=before, hint=hint)
        identity = open_checkpoint_tokenizer(checkpoint).identity
        if identity != self._tokenizer:
            digests = [f"sha256 {digest[:12]}" for digest in (identity.sha256, self._tokenizer.sha256)]
            raise FormatError(where, "has another tokenizer", found=digests[0], wanted=digests[1], hint=hint)

    def _warn(self, error: Exception) -> None:
        """Log why there is no newer checkpoint, once for each kind of problem of an iteration.

        While a checkpoint is being copied, the sizes and the file in the message change.
        """
        if isinstance(error, MegaError):
            what, line = error.what, str(error)
        else:
            what = type(error).__name__
            line = f"{what}: {escape_controls(str(error))}"
        problem = (self._find_iteration(), what)
        if problem not in self._reported:
            self._reported.add(problem)
            logger.warning("iteration %d is still served: %s", self._iteration, line)

    def _find_iteration(self) -> int | None:
        """Return the iteration that the run names as its latest; None if it names none."""
        try:
            return latest_iteration(self._run)
        except (MegaError, OSError):
            return None


def _read_stamps(folder: Path) -> tuple[_FileStamp, ...]:
    """Return name, size and time of change of each file of a checkpoint."""
    stats = ((path, path.lstat()) for path in sorted(folder.rglob("*")))
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
