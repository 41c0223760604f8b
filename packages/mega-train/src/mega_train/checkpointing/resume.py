"""What a run goes on from: the newest checkpoint that is sound, on which all ranks agree.

Opening a checkpoint finds what is missing, cut short or not what its names say; what costs reading every byte
is shared between the ranks once they have met.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mega_model.distributed.mesh import Mesh, World
from mega_schema.checkpoint.checkpoint_dir import LATEST, MANIFEST, TRAINER, iteration_folder, iterations
from mega_schema.checkpoint.reader import MODEL, Checkpoint, TensorEntry, TensorPiece
from mega_schema.checkpoint.tracker import latest_checkpoint, latest_iteration
from mega_schema.errors import ConfigError, CorruptFileError, FormatError
from mega_train.checkpointing.save_dir import find_superseded, list_iterations, same_folder
from mega_train.checkpointing.state_dict import weights_space
from mega_train.config import Run
from mega_train.optim.adamw import STATE, Name
from mega_train.optim.loss_scaler import LossScale
from mega_train.resolve.run_mode import takes_optimizer
from mega_train.schedules.lr import Courses

_HINT = "--finetune begins anew with its weights"
_CHUNK = 1 << 24  # bytes

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class Found:
    """What a run begins with.

    Attributes:
        run: its configuration, which says so where that is --pretrained-checkpoint.
        courses: those it goes on with.
        superseded: iterations in --save whose checkpoints it supersedes.
        refusal: why the run may not write into --save.
    """

    run: Run
    checkpoint: Checkpoint | None
    courses: Courses | None
    superseded: tuple[int, ...] = ()
    refusal: ConfigError | None = None


def found(run: Run, world: World, before: int | None = None) -> Found:
    """What the run begins with.

    Args:
        before: of a run's folder, an older checkpoint than that of this iteration.

    Raises:
        FormatError: there is none that is sound.
    """
    load, save, pretrained = run.checkpoint.load, run.checkpoint.save, run.checkpoint.pretrained
    if load is not None and same_folder(load, save) and _is_new(load):
        if run.checkpoint.exit_on_missing:
            flag, hint = "--exit-on-missing-checkpoint", "leave it out to begin anew"
            raise FormatError(load, f"holds no checkpoint, and {flag} is given", hint=hint)
        if world.rank == 0:
            begins = "anew" if pretrained is None else f"with the weights of {pretrained}"
            log.warning("%s holds no checkpoint yet: the run begins %s", load, begins)
        load = None
    if load is None and pretrained is not None:
        load = pretrained
        run = replace(run, checkpoint=replace(run.checkpoint, load=pretrained, finetune=True))
    if load is None:
        superseded, refusal = _superseded(run, None, None)
        _say_superseded(run, superseded, world)
        return Found(run, None, None, superseded, refusal)
    first: FormatError | None = None
    candidates = _candidates(load, before)
    for folder in candidates.folders:
        try:
            checkpoint = Checkpoint(folder)
            courses = _checked(run, checkpoint)
        except CorruptFileError as error:
            first = first or error
            continue
        superseded, refusal = _superseded(run, checkpoint, candidates.newest)
        if world.rank == 0 and candidates.problem is not None and before is None:
            _warn(candidates.problem, checkpoint.iteration, "the newest sound checkpoint")
        elif world.rank == 0 and first is not None:
            _warn(first, checkpoint.iteration)
        if candidates.newest == checkpoint.iteration or run.checkpoint.overwrite:
            _say_superseded(run, superseded, world)
        return Found(run, checkpoint, courses, superseded, refusal)
    problem = candidates.problem or first
    assert problem is not None, f"{load}: nothing before {before}"
    raise problem


def agreed(found: Checkpoint, mesh: Mesh, run: Run, older: Callable[[int], Checkpoint]) -> Checkpoint:
    """The newest checkpoint that every rank can open and whose bytes are those that were written.

    Args:
        found: the newest that this rank could open.
        older: opens the one before an iteration.

    Raises:
        CorruptFileError: there is none; on every rank alike.
    """
    first: CorruptFileError | None = None
    while True:
        oldest = -mesh.all_reduce_max(-found.iteration)
        if mesh.all_reduce_max(found.iteration) != oldest:  # what one rank cannot open none goes on from
            if found.iteration > oldest:
                found = older(oldest + 1)
                if mesh.rank == 0:
                    log.warning("%s: newer ones cannot be read by every rank", found.folder)
            continue
        pieces = list(_read(found, run))
        mine = range(mesh.rank, len(pieces), mesh.layout.world)
        worst = mesh.all_reduce_max(max((n for n in mine if _changed(found, pieces[n][-1])), default=-1))
        if worst < 0:
            return found
        space, name, _, piece = pieces[worst]
        damage = CorruptFileError(
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


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The checkpoints to try.

    Attributes:
        folders: of them, the newest first.
        newest: the iteration up to which checkpoints are tried; None where --load is one checkpoint.
        problem: why the tracker does not say which is the newest.
    """

    folders: list[Path]
    newest: int | None
    problem: FormatError | None = None


def _candidates(load: Path, before: int | None) -> _Candidates:
    if (load / MANIFEST).is_file():
        return _Candidates([load], None)
    problem: FormatError | None = None
    try:
        newest = latest_iteration(load)
        named = latest_checkpoint(load)
    except CorruptFileError as error:
        named = iteration_folder(load, newest)
        if not named.exists():  # what it names says nothing of the others
            problem = error
    except FormatError as error:
        problem = error
    except OSError as error:
        problem = FormatError(load / LATEST, "cannot be read", found=error.strerror)
    others = iterations(load)
    if problem is None:
        folders = [
            iteration_folder(load, i)
            for i in reversed(others)
            if i < newest and (before is None or i < before)
        ]
        return _Candidates([named, *folders] if before is None or newest < before else folders, newest)
    if not others:
        raise problem
    folders = [iteration_folder(load, i) for i in reversed(others) if before is None or i < before]
    return _Candidates(folders, others[-1], problem)


def _is_new(load: Path) -> bool:
    """Whether a run's folder holds neither a tracker nor a checkpoint."""
    return not (load / LATEST).exists() and not iterations(load)


def _warn(damage: FormatError, iteration: int, which: str = "the one before it") -> None:
    words = str(damage).partition("; hint: ")[0]
    log.warning("%s; the run resumes from iteration %d, %s", words, iteration, which)


def _superseded(
    run: Run, checkpoint: Checkpoint | None, newest: int | None
) -> tuple[tuple[int, ...], ConfigError | None]:
    try:
        return find_superseded(run, checkpoint, newest), None
    except ConfigError as error:
        return (), error


def _say_superseded(run: Run, superseded: Collection[int], world: World) -> None:
    if superseded and world.rank == 0:
        words = (
            "of --overwrite: they become iter_*.superseded once this run has saved, and it removes each as it"
        )
        log.warning("%s: %s: %s passes them", run.checkpoint.save, list_iterations(superseded), words)


def _read(checkpoint: Checkpoint, run: Run) -> Iterator[tuple[str, str, TensorEntry, TensorPiece]]:
    """The pieces whose values the run takes up."""
    only = None if takes_optimizer(run) else weights_space(checkpoint)
    return (piece for piece in checkpoint.pieces() if only in (None, piece[0]))


def _changed(checkpoint: Checkpoint, piece: TensorPiece) -> bool:
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


def _told(checkpoint: Checkpoint, key: str, what: str, **values: object) -> CorruptFileError:
    return CorruptFileError(f"{checkpoint.folder / TRAINER}: {key}", what, **values, hint=_HINT)


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
