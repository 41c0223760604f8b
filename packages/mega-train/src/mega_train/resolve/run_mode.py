"""Determine whether a run trains, and which parts of a checkpoint it loads."""

from __future__ import annotations

from mega_train.config import RunConfig


def is_eval_only(run: RunConfig) -> bool:
    """Whether the run only validates."""
    return run.train.skip or run.train.evaluation_only


def loads_optimizer(run: RunConfig) -> bool:
    """Whether the run loads the checkpoint's optimizer state and schedules."""
    return run.checkpoint.load_optim and not (run.checkpoint.finetune or is_eval_only(run))
