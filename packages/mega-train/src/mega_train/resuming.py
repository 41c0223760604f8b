"""What a run goes on from: the newest checkpoint that is sound, on which all ranks agree.

Opening a checkpoint finds what is missing, cut short or not what its names say; what costs reading every byte
is shared between the ranks once they have met.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mega_model.mesh import Mesh, World
from mega_schema.checkpoint import MODEL, Checkpoint, Piece, Tensor, latest, latest_iteration
from mega_schema.errors import ConfigError, DamageError, FormatError
from mega_schema.run_folder import LATEST, MANIFEST, TRAINER, iteration_folder, iterations
from mega_train.config import Run
from mega_train.optim import STATE, Name
from mega_train.precision import LossScale
from mega_train.rates import Courses
from mega_train.resolve.begins import takes_optimizer
from mega_train.store import weights_space

_HINT = "--finetune begins anew with its weights"
_CHUNK = 1 << 24  # bytes

log = logging.getLogger("mega.train")

Found = tuple[Run, Checkpoint | None, Courses | None]


def found(run: Run, world: World, before: int | None = None) -> Found:
    """What the run begins with, and the courses it goes on with; the run says so where that is
    --pretrained-checkpoint.

    Args:
        before: of a run's folder, an older checkpoint than that of this iteration.

    Raises:
        FormatError: there is none that is sound.
    """
    load, save, pretrained = run.checkpoint.load, run.checkpoint.save, run.checkpoint.pretrained
    if load is not None and load == save and not (load / LATEST).exists():
        if world.rank == 0:
            begins = "anew" if pretrained is None else f"with the weights of {pretrained}"
            log.warning("%s holds no checkpoint yet: the run begins %s", load, begins)
        load = None
    if load is None and pretrained is not None:
        load = pretrained
        run = replace(run, checkpoint=replace(run.checkpoint, load=pretrained, finetune=True))
    if load is None:
        return run, None, None
    first: DamageError | None = None
    for folder in _folders(load, before):
        try:
            checkpoint = Checkpoint(folder())
            courses = _checked(run, checkpoint)
        except DamageError as error:
            first = first or error
            continue
        if first is not None and world.rank == 0:
            _warn(first, checkpoint.iteration)
        return run, checkpoint, courses
    assert first is not None, f"{load}: nothing before {before}"
    raise first


def agreed(found: Checkpoint, mesh: Mesh, run: Run, older: Callable[[int], Checkpoint]) -> Checkpoint:
    """The newest checkpoint that every rank can open and whose bytes are those that were written.

    Args:
        found: the newest that this rank could open.
        older: opens the one before an iteration.

    Raises:
        DamageError: there is none; on every rank alike.
    """
    first: DamageError | None = None
    while True:
        oldest = -mesh.largest(-found.iteration)
        if mesh.largest(found.iteration) != oldest:  # what one rank cannot open none goes on from
            if found.iteration > oldest:
                found = older(oldest + 1)
                if mesh.rank == 0:
                    log.warning("%s: newer ones cannot be read by every rank", found.folder)
            continue
        pieces = list(_read(found, run))
        mine = range(mesh.rank, len(pieces), mesh.layout.world)
        worst = mesh.largest(max((n for n in mine if _changed(found, pieces[n][-1])), default=-1))
        if worst < 0:
            return found
        space, name, _, piece = pieces[worst]
        damage = DamageError(
            f"{found.folder / piece.file}: {space} {name}",
            "values are not those that were written",
            hint="load another iteration: --load RUN/iter_NNNNNNN",
        )
        first = first or damage
        assert run.checkpoint.load is not None
        if not any(iteration < found.iteration for iteration in iterations(run.checkpoint.load)):
            raise first
        found = older(found.iteration)
        if mesh.rank == 0:
            _warn(damage, found.iteration)


def _folders(load: Path, before: int | None) -> Iterator[Callable[[], Path]]:
    """Where checkpoints are, the newest first; asking for one may find that it is not there."""
    if (load / MANIFEST).is_file():
        yield lambda: load
        return
    newest = latest_iteration(load)
    if before is None or newest < before:
        yield lambda: latest(load)
    for iteration in reversed(iterations(load)):
        if iteration < min(newest, newest + 1 if before is None else before):
            folder = iteration_folder(load, iteration)
            yield lambda folder=folder: folder  # type: ignore[misc]


def _warn(damage: DamageError, iteration: int) -> None:
    words = str(damage).partition("; hint: ")[0]
    log.warning("%s; the run goes on from iteration %d before it", words, iteration)


def _read(checkpoint: Checkpoint, run: Run) -> Iterator[tuple[str, str, Tensor, Piece]]:
    """The pieces whose values the run takes up."""
    only = None if takes_optimizer(run) else weights_space(checkpoint)
    return (piece for piece in checkpoint.pieces() if only in (None, piece[0]))


def _changed(checkpoint: Checkpoint, piece: Piece) -> bool:
    """Whether a piece has another checksum than when it was written, or cannot be read."""
    checksum, left = 0, piece.bytes
    try:
        with (checkpoint.folder / piece.file).open("rb") as file:
            file.seek(piece.offset)
            while left and (chunk := file.read(min(left, _CHUNK))):
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
    except OSError:
        return True
    return bool(left) or checksum != piece.crc32


def _checked(run: Run, checkpoint: Checkpoint) -> Courses | None:
    """Whether there is what the run goes on with.

    Returns:
        the courses to go on with; checkpoints of converters and of our first version say none.
    """
    if run.checkpoint.finetune:
        return None
    optimizer = run.optimizer.name if takes_optimizer(run) else None
    if optimizer:
        _check_optimizer(checkpoint, optimizer)
    trainer = checkpoint.trainer
    # checkpoints of converters say nothing of skipped samples
    of_optimizer = (("optimizer_steps", None), ("skipped_samples", 0)) if optimizer else ()
    for key, absent in (("consumed_samples", None), *of_optimizer):
        value = trainer.get(key, absent)
        if type(value) is not int or value < 0:
            raise _told(checkpoint, key, "not a count", found=value, wanted="0 or more")
    if not optimizer:
        return None
    if not LossScale.is_state(scale := trainer.get("loss_scale", {})):
        wanted = "a value above 0, and the counts good and patience"
        raise _told(checkpoint, "loss_scale", "not that of a run", found=scale, wanted=wanted)
    if trainer.get("courses") is None:
        if run.optimizer.checkpoint_schedule:
            flag = "--use-checkpoint-opt_param-scheduler"
            raise ConfigError(
                flag, "the checkpoint says no courses", found=checkpoint.folder, hint="leave it out"
            )
        return None
    try:
        return Courses.of(trainer["courses"])
    except (TypeError, KeyError) as error:
        what = "are not those of a learning rate and a weight decay"
        raise _told(checkpoint, "courses", what, found=error) from error


def _told(checkpoint: Checkpoint, key: str, what: str, **values: object) -> DamageError:
    return DamageError(f"{checkpoint.folder / TRAINER}: {key}", what, **values, hint=_HINT)


def _check_optimizer(checkpoint: Checkpoint, optimizer: Name) -> None:
    found = {space for space in checkpoint.tensors if space not in (MODEL, "optim.main")}
    if found != (wanted := STATE[optimizer]):
        writer = next((name for name, spaces in STATE.items() if spaces == found), None)
        raise FormatError(
            checkpoint.folder,
            f"holds the state of --optimizer {writer}"
            if writer
            else "holds no optimizer state to go on with",
            found=", ".join(sorted(found) or checkpoint.tensors),
            wanted=", ".join(sorted(wanted)),
            hint=f"--optimizer {writer}, or {_HINT}" if writer else _HINT,
        )
