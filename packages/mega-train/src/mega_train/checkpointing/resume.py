"""Find the checkpoint to resume from: the newest intact one, on which all ranks agree.

Opening a checkpoint detects missing and truncated files and wrong metadata. Checking every byte is shared
among the ranks once they are connected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mega_model.distributed.mesh import Mesh, World
from mega_schema.checkpoint.byte_range import crc32_of_range
from mega_schema.checkpoint.checkpoint_dir import LATEST, MANIFEST, TRAINER, iteration_folder, iterations
from mega_schema.checkpoint.reader import MODEL, Checkpoint, TensorEntry, TensorPiece
from mega_schema.checkpoint.side_files import OTHER_ITERATION
from mega_schema.checkpoint.tracker import latest_checkpoint, latest_iteration
from mega_schema.errors import ConfigError, CorruptFileError, FormatError
from mega_train.checkpointing.save_dir import find_superseded, is_same_folder, list_iterations
from mega_train.checkpointing.state_dict import best_weights_namespace
from mega_train.config import RunConfig
from mega_train.config.training import OptimizerName
from mega_train.optim.base import STATE_NAMESPACES
from mega_train.optim.loss_scaler import DynamicLossScaler
from mega_train.resolve.run_mode import loads_optimizer
from mega_train.schedules.lr import ParamSchedules

_FINETUNE_HINT = "--finetune starts a new run from its weights"

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint and configuration that a run starts from.

    Attributes:
        run: the configuration, with load and finetune set if --pretrained-checkpoint applies.
        schedules: the checkpoint's learning-rate and weight-decay schedules.
        superseded: iterations in --save whose checkpoints the run supersedes.
        refusal: the reason why the run must not write into --save.
    """

    run: RunConfig
    checkpoint: Checkpoint | None
    schedules: ParamSchedules | None
    superseded: tuple[int, ...] = ()
    refusal: ConfigError | None = None


def find_checkpoint(run: RunConfig, world: World, before_iteration: int | None = None) -> ResumePoint:
    """Find the newest intact checkpoint of --load, or of --pretrained-checkpoint.

    Args:
        before_iteration: take a checkpoint of the run's folder older than this iteration.

    Raises:
        FormatError: there is no intact checkpoint.
    """
    load = run.checkpoint.load
    save = run.checkpoint.save
    pretrained = run.checkpoint.pretrained
    if load is not None and is_same_folder(load, save) and _is_empty(load):
        if run.checkpoint.exit_on_missing:
            flag, hint = "--exit-on-missing-checkpoint", "leave it out to start a new run"
            raise FormatError(load, f"contains no checkpoint, and {flag} is given", hint=hint)
        if world.rank == 0:
            begins = "from new weights" if pretrained is None else f"with the weights of {pretrained}"
            log.warning("%s contains no checkpoint yet: the run starts %s", load, begins)
        load = None
    if load is None and pretrained is not None:
        load = pretrained
        run = replace(run, checkpoint=replace(run.checkpoint, load=pretrained, finetune=True))
    if load is None:
        superseded, refusal = _find_superseded(run, None, None)
        _warn_superseded(run, superseded, world)
        return ResumePoint(run, None, None, superseded, refusal)
    first_damage: FormatError | None = None
    candidates = _list_candidates(load, before_iteration)
    for folder in candidates.folders:
        try:
            checkpoint = Checkpoint(folder)
            schedules = _check_training_state(run, checkpoint)
        except CorruptFileError as error:
            first_damage = first_damage or error
            continue
        superseded, refusal = _find_superseded(run, checkpoint, candidates.newest)
        if world.rank == 0 and candidates.tracker_error is not None and before_iteration is None:
            _warn_damage(candidates.tracker_error, checkpoint.iteration, "the newest intact checkpoint")
        elif world.rank == 0 and first_damage is not None:
            _warn_damage(first_damage, checkpoint.iteration)
        if candidates.newest == checkpoint.iteration or run.checkpoint.overwrite:
            _warn_superseded(run, superseded, world)
        return ResumePoint(run, checkpoint, schedules, superseded, refusal)
    problem = candidates.tracker_error or first_damage
    assert problem is not None, f"{load}: nothing before {before_iteration}"
    raise problem


def agree_on_checkpoint(
    checkpoint: Checkpoint, mesh: Mesh, run: RunConfig, open_older: Callable[[int], Checkpoint]
) -> Checkpoint:
    """Agree over all ranks on the newest checkpoint that every rank can open and whose checksums match.

    Args:
        checkpoint: the newest that this rank could open.
        open_older: opens the checkpoint before an iteration.

    Raises:
        CorruptFileError: there is none; all ranks raise it.
    """
    first_damage: CorruptFileError | None = None
    while True:
        # -max(-x) is the minimum over ranks: there is one collective, for maxima
        oldest = -mesh.all_reduce_max(-checkpoint.iteration)
        # a checkpoint that one rank cannot open is used by none
        if mesh.all_reduce_max(checkpoint.iteration) != oldest:
            if checkpoint.iteration > oldest:
                checkpoint = open_older(oldest + 1)
                if mesh.rank == 0:
                    log.warning("%s: newer ones cannot be read by every rank", checkpoint.folder)
            continue
        pieces = list(_needed_pieces(checkpoint, run))
        own_numbers = range(mesh.rank, len(pieces), mesh.layout.world)
        corrupt_number = mesh.all_reduce_max(
            max((n for n in own_numbers if _is_corrupt(checkpoint, pieces[n][-1])), default=-1)
        )
        if corrupt_number < 0:
            return checkpoint
        space, name, _, piece = pieces[corrupt_number]
        damage = CorruptFileError(
            f"{checkpoint.folder / piece.file}: {space} {name}",
            "values are not those that were written",
            hint=OTHER_ITERATION,
        )
        first_damage = first_damage or damage
        assert run.checkpoint.load is not None
        if not any(iteration < checkpoint.iteration for iteration in iterations(run.checkpoint.load)):
            raise first_damage
        checkpoint = open_older(checkpoint.iteration)
        if mesh.rank == 0:
            _warn_damage(damage, checkpoint.iteration)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The checkpoints to try.

    Attributes:
        folders: their folders, the newest first.
        newest: the iteration up to which checkpoints are tried; None if --load is a single checkpoint.
        tracker_error: the reason why the tracker does not name the newest.
    """

    folders: list[Path]
    newest: int | None
    tracker_error: FormatError | None = None


def _list_candidates(load: Path, before_iteration: int | None) -> _Candidates:
    if (load / MANIFEST).is_file():
        return _Candidates([load], None)
    problem: FormatError | None = None
    try:
        newest = latest_iteration(load)
        tracked_folder = latest_checkpoint(load)
    except CorruptFileError as error:
        tracked_folder = iteration_folder(load, newest)
        if not tracked_folder.exists():  # a missing folder says nothing about the others
            problem = error
    except FormatError as error:
        problem = error
    except OSError as error:
        problem = FormatError(load / LATEST, "cannot be read", found=error.strerror)
    on_disk = iterations(load)
    if problem is None:
        folders = [
            iteration_folder(load, i)
            for i in reversed(on_disk)
            if i < newest and (before_iteration is None or i < before_iteration)
        ]
        return _Candidates(
            [tracked_folder, *folders] if before_iteration is None or newest < before_iteration else folders,
            newest,
        )
    if not on_disk:
        raise problem
    folders = [
        iteration_folder(load, i)
        for i in reversed(on_disk)
        if before_iteration is None or i < before_iteration
    ]
    return _Candidates(folders, on_disk[-1], problem)


def _is_empty(load: Path) -> bool:
    """Whether a run's folder holds neither a tracker nor a checkpoint."""
    return not (load / LATEST).exists() and not iterations(load)


def _warn_damage(damage: FormatError, iteration: int, choice: str = "the one before it") -> None:
    words = str(damage).partition("; hint: ")[0]
    log.warning("%s; the run resumes from iteration %d, %s", words, iteration, choice)


def _find_superseded(
    run: RunConfig, checkpoint: Checkpoint | None, newest: int | None
) -> tuple[tuple[int, ...], ConfigError | None]:
    try:
        return find_superseded(run, checkpoint, newest), None
    except ConfigError as error:
        return (), error


def _warn_superseded(run: RunConfig, superseded: Collection[int], world: World) -> None:
    if superseded and world.rank == 0:
        consequence = (
            "of --overwrite: they become iter_*.superseded once this run has saved, and it removes each as it"
        )
        log.warning("%s: %s: %s passes them", run.checkpoint.save, list_iterations(superseded), consequence)


def _needed_pieces(
    checkpoint: Checkpoint, run: RunConfig
) -> Iterator[tuple[str, str, TensorEntry, TensorPiece]]:
    """Select the pieces whose values the run loads."""
    namespace = None if loads_optimizer(run) else best_weights_namespace(checkpoint)
    return (piece for piece in checkpoint.pieces() if namespace in (None, piece[0]))


def _is_corrupt(checkpoint: Checkpoint, piece: TensorPiece) -> bool:
    """Whether a piece cannot be read or its checksum differs from the recorded one."""
    try:
        with (checkpoint.folder / piece.file).open("rb") as file:
            return crc32_of_range(file, piece.offset, piece.bytes) != piece.crc32
    except OSError:
        return True


def _check_training_state(run: RunConfig, checkpoint: Checkpoint) -> ParamSchedules | None:
    """Check that the checkpoint holds the training state that the run resumes.

    Returns:
        the checkpoint's schedules; None in checkpoints of converters and of the first version.
    """
    if run.checkpoint.finetune:
        return None
    optimizer = run.optimizer.name if loads_optimizer(run) else None
    if optimizer:
        _check_optimizer(checkpoint, optimizer)
    trainer = checkpoint.trainer
    # checkpoints of converters do not record skipped samples
    of_optimizer = (("optimizer_steps", None), ("skipped_samples", 0)) if optimizer else ()
    for key, absent in (("consumed_samples", None), *of_optimizer):
        value = trainer.get(key, absent)
        if type(value) is not int or value < 0:
            raise _trainer_error(checkpoint, key, "not a count", found=value, wanted="0 or more")
    if not optimizer:
        return None
    if not DynamicLossScaler.is_valid_state(scale := trainer.get("loss_scale", {})):
        wanted = "a value above 0, and the counts growth_tracker and hysteresis_tracker"
        raise _trainer_error(checkpoint, "loss_scale", "not that of a run", found=scale, wanted=wanted)
    if trainer.get("lr_schedule") is None:
        if run.optimizer.checkpoint_schedule:
            flag = "--use-checkpoint-opt_param-scheduler"
            raise ConfigError(
                flag, "the checkpoint has no schedules", found=checkpoint.folder, hint="leave it out"
            )
        return None
    try:
        return ParamSchedules.from_state_dict(trainer)
    except (TypeError, KeyError) as error:
        raise _trainer_error(
            checkpoint, "lr_schedule and wd_schedule", "not schedules of a run", found=error
        ) from error


def _trainer_error(checkpoint: Checkpoint, key: str, what: str, **values: object) -> CorruptFileError:
    return CorruptFileError(f"{checkpoint.folder / TRAINER}: {key}", what, **values, hint=_FINETUNE_HINT)


def _check_optimizer(checkpoint: Checkpoint, optimizer: OptimizerName) -> None:
    namespaces = {space for space in checkpoint.tensors if space not in (MODEL, "optim.main")}
    if namespaces != (required := STATE_NAMESPACES[optimizer]):
        writer = next((name for name, spaces in STATE_NAMESPACES.items() if spaces == namespaces), None)
        raise FormatError(
            checkpoint.folder,
            f"contains the state of --optimizer {writer}"
            if writer
            else "contains no optimizer state to resume with",
            found=", ".join(sorted(namespaces) or checkpoint.tensors),
            wanted=", ".join(sorted(required)),
            hint=f"--optimizer {writer}, or {_FINETUNE_HINT}" if writer else _FINETUNE_HINT,
        )
