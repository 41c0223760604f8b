"""Decide whether a run may write into its --save folder, and which checkpoints there it supersedes.

A run never replaces a checkpoint that it neither wrote nor resumes from, unless --overwrite is given. A
superseded checkpoint is renamed so that readers ignore it once the run has saved, and is removed as the run
passes its iteration: a folder never mixes the checkpoints of two runs.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mega_schema.app.config import load_config
from mega_schema.checkpoint.checkpoint_dir import (
    LATEST,
    RUN_CONFIG,
    is_foreign,
    iteration_folder,
    iteration_folders,
)
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_train.config import CheckpointConfig, RunConfig
from mega_train.resolve.run_mode import is_eval_only
from mega_train.telemetry.event_log import check_event_log


def is_same_folder(first: Path | None, second: Path | None) -> bool:
    """Whether two paths are the same folder, whether or not it exists."""
    return first is not None and second is not None and first.resolve() == second.resolve()


def find_superseded(run: RunConfig, checkpoint: Checkpoint | None, newest: int | None) -> tuple[int, ...]:
    """Find the iterations in --save that the run supersedes.

    Args:
        checkpoint: what the run resumes from.
        newest: the iteration up to which checkpoints were tried; those between the loaded one and it are
            damaged.

    Raises:
        ConfigError: --save holds checkpoints that may be sound and --overwrite is not given, or folders of
            another program under the names of checkpoints.
        FormatError: --save holds another program's file with the name of the event log.
    """
    save = run.checkpoint
    if save.save is None or is_eval_only(run):
        return ()
    check_event_log(save.save)
    resumes = (
        checkpoint is not None and not save.finetune and is_same_folder(checkpoint.folder.parent, save.save)
    )
    after = checkpoint.iteration if checkpoint is not None and resumes else -1
    later = {iteration: path for iteration, path in iteration_folders(save.save).items() if iteration > after}
    for folder in later.values():
        if is_foreign(folder):
            what = "contains something other than a Mega checkpoint"
            raise ConfigError("--save", what, found=folder, wanted="a folder of its own for the run")
    damaged = range(after + 1, (newest or 0) + 1) if resumes else ()
    if not save.overwrite and (sound := [iteration for iteration in later if iteration not in damaged]):
        raise _refusal_error(save, sound, after if resumes else None)
    return tuple(later)


def list_iterations(iterations: Collection[int]) -> str:
    """Format iterations as text; of many, the first and the last."""
    ascending = sorted(iterations)
    if len(ascending) > 5:
        return f"{len(ascending)} iterations from {ascending[0]} to {ascending[-1]}"
    noun = "iterations" if len(ascending) > 1 else "iteration"
    return f"{noun} {', '.join(map(str, ascending))}"


def _refusal_error(save: CheckpointConfig, later: list[int], loaded: int | None) -> ConfigError:
    description = f"{list_iterations(later)} in {save.save}"
    alternatives = "another --save keeps them, --overwrite replaces them"
    if loaded is None:
        same_start = _has_same_start(save, later[-1])
        owner = "of a run that began with the same --load" if same_start else "that this run does not load"
        return ConfigError(
            "--save",
            f"contains checkpoints {owner}",
            found=description,
            wanted="a folder without checkpoints",
            hint=f"--load {save.save} --save {save.save} resumes from them, {alternatives}",
        )
    assert save.load is not None
    resumes = f"--load {save.save} resumes from the newest"
    if is_same_folder(save.load, save.save):
        resumes = f"echo {later[-1]} > {save.save}/{LATEST} resumes from the newest"
    return ConfigError(
        "--save",
        "contains checkpoints after the one loaded",
        found=description,
        wanted=f"none after iteration {loaded}",
        hint=f"{resumes}, {alternatives}",
    )


def _has_same_start(save: CheckpointConfig, iteration: int) -> bool:
    """Whether the run in --save started from the checkpoint that is loaded now."""
    if save.save is None or save.load is None:
        return False
    try:
        recorded = load_config(RunConfig, iteration_folder(save.save, iteration) / RUN_CONFIG, {})
    except ConfigError:  # no run.toml, or one of another version
        return False
    return is_same_folder(recorded.checkpoint.load, save.load)
