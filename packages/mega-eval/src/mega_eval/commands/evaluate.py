"""Run a task: open the model, evaluate, print the table and write the result."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import click
import torch

from mega_eval import __version__, result
from mega_eval.commands.task_options import TaskOptions
from mega_eval.models.decoder_model import open_checkpoint
from mega_eval.models.interface import LanguageModel
from mega_eval.models.session import EvaluationSession
from mega_eval.task_result import TaskResult
from mega_schema.app.progress import progress_bar


def run_task(
    task: Callable[[LanguageModel], TaskResult],
    name: str,
    convention: str,
    files: list[Path],
    settings: Mapping[str, object],
    options: TaskOptions,
    *,
    is_whole: bool = True,
) -> None:
    """Evaluate a model and write its result.

    Args:
        task: computes the result from the model.
        name, convention: those of the task's `TaskResult`, for the name of the result file.
        files: input files of the task; their hashes stand in the result.
        settings: the task's options that change the numbers.
        is_whole: whether the task evaluates all of its files.
    """
    inputs = [*files, options.load]
    if options.output is not None:
        result.check_writable(options.output, inputs, overwrite=options.overwrite)
    fingerprints = result.fingerprint_files(files)
    with closing(_open_model(options)) as model:
        output = options.output or result.default_output(name, convention, model.identity)
        result.check_writable(output, inputs, overwrite=options.overwrite)
        start = time.perf_counter()
        task_result = task(model)
        seconds = time.perf_counter() - start
        provenance = result.Provenance(
            model=model.identity,
            data=fingerprints,
            options={**settings, "limit": options.limit, "micro_batch_size": options.micro_batch_size},
            versions={
                "mega-eval": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            command=("mega-eval", *sys.argv[1:]),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            is_whole=is_whole,
        )
        record = result.build_record(task_result, provenance, seconds)
        result.write_result(output, record, task_result.examples)
    iteration = "" if model.identity.iteration is None else f"  iteration {model.identity.iteration}"
    click.echo(f"{name}  {model.identity.source}{iteration}  {model.identity.dtype}")
    click.echo(result.format_table(record))
    if not is_whole:
        click.echo("not publishable: --limit left examples out")
    click.echo(f"written to {output}")


def _open_model(options: TaskOptions) -> LanguageModel:
    model = open_checkpoint(
        options.load, dtype=options.dtype, device=options.device, batch_size=options.micro_batch_size
    )
    return EvaluationSession(model, progress=partial(progress_bar, "scoring", unit="windows"))
