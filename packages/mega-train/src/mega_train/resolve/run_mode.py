"""What of a checkpoint a run takes up."""

from __future__ import annotations

from mega_train.config import RunConfig


def is_eval_only(run: RunConfig) -> bool:
    """Whether nothing is trained."""
    return run.train.skip or run.train.evaluation_only


def loads_optimizer(run: RunConfig) -> bool:
    """Whether a run that loads a checkpoint takes its optimizer's state, and with it the courses."""
    return not (run.checkpoint.finetune or run.checkpoint.no_load_optim or is_eval_only(run))
