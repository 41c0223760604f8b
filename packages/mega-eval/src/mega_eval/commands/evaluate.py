"""Run a task: open the model, evaluate, print the table and write the result."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import click
import torch

from mega_eval import __version__, result
from mega_eval.canonical_files import is_canonical
from mega_eval.commands.model_source import open_cache, open_model
from mega_eval.commands.task_options import TaskOptions
from mega_eval.models.answer_cache import hash_model
from mega_eval.models.interface import LanguageModel
from mega_eval.models.session import EvaluationSession
from mega_eval.outputs import check_folder, check_output_file
from mega_eval.report_page.page import report_path, write_page
from mega_eval.result_reader import read_result
from mega_eval.task_result import TaskResult
from mega_schema.app.cli_runner import raise_at_sigterm
from mega_schema.app.progress import progress_bar
from mega_schema.errors import ConfigError
from mega_schema.outputs import is_page

CACHE = ".mega-eval-cache"


def run_task(
    task: Callable[[LanguageModel], TaskResult],
    name: str,
    convention: str,
    files: list[Path],
    settings: Mapping[str, object],
    options: TaskOptions,
    *,
    published_as: str | None = None,
) -> TaskResult:
    """Evaluate a model, print and write its result, and return it.

    Args:
        task: computes the result from the model.
        name, convention: those of the task's `TaskResult`, for the name of the result file.
        files: input files of the task; their hashes are part of the result.
        settings: the task's options that change the numbers.
        published_as: the task of `canonical_files` whose data the first file may be; None: `name`.
    """
    inputs = [*files, *([] if options.load is None else [options.load])]
    if options.output is None:
        check_folder("--output", Path())
    else:
        _check_outputs(options.output, inputs, options)
    fingerprints = result.fingerprint_files(files)
    canonical = is_canonical(published_as or name, files[:1])
    cache_folder = choose_cache_folder(options, f"{name}-{convention}")
    with closing(open_session(options, cache_folder)) as model:
        output = options.output or result.default_output(name, convention, model.identity, fingerprints)
        _check_outputs(output, inputs, options)
        start = time.perf_counter()
        with explain_resume(cache_folder):
            task_result = task(model)
        seconds = time.perf_counter() - start + model.cached_seconds
        provenance = result.Provenance(
            model=model.identity,
            data=fingerprints,
            options={
                **settings,
                "canonical_data": canonical,
                "limit": options.limit,
                "micro_batch_size": options.micro_batch_size,
                "batch_invariant": options.batch_invariant,
            },
            versions={**list_versions(), **model.identity.versions},
            command=("mega-eval", *sys.argv[1:]),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        record = result.build_record(task_result, provenance, seconds)
        result.write_result(output, record, task_result.examples)
        model.finish()
        if options.report:
            write_page([read_result(output)], report_path(output))
    iteration = "" if model.identity.iteration is None else f"  iteration {model.identity.iteration}"
    click.echo(f"{name}  {model.identity.source}{iteration}  {model.identity.dtype}")
    click.echo(result.format_table(record))
    if model.cached_requests:
        click.echo(f"{model.cached_requests:,} answers are of earlier runs, and seconds counts their time")
    if not task_result.is_whole:
        click.echo("not publishable: --limit left examples out")
    if canonical is False:
        task_name = published_as or name
        click.echo(f"data: not the published file of {task_name}; mega-eval tasks lists its sha256")
    page = f" and {report_path(output)}" if options.report else ""
    click.echo(f"written to {output}{page}")
    return task_result


def _check_outputs(output: Path, inputs: list[Path], options: TaskOptions) -> None:
    """Check that the result, its examples and its page can be written."""
    result.check_writable(output, inputs, overwrite=options.overwrite)
    if options.report:
        page = report_path(output)
        check_output_file("--report", page, inputs, is_page, suffix=page.suffix, overwrite=options.overwrite)


def open_session(options: TaskOptions, cache_folder: Path | None = None) -> EvaluationSession:
    """Open the model that the options name.

    Args:
        cache_folder: where its answers are kept; None: nowhere.
    """
    model = open_model(options)
    cache = None
    if cache_folder is not None:
        settings = (model.vocab_size, model.context_length, options.batch_invariant)
        key = hash_model(model.identity, list_versions(), settings)
        cache = open_cache(model, cache_folder, key, is_temporary=options.cache is None)
    return EvaluationSession(model, progress=partial(progress_bar, "scoring", unit="windows"), cache=cache)


def choose_cache_folder(options: TaskOptions, run_name: str) -> Path | None:
    """Return the folder of the answers; `run_name` tells runs with results in the same folder apart."""
    if options.no_cache:
        if options.cache is not None:
            raise ConfigError("--no-cache", "contradicts --cache", hint="leave one of them out")
        return None
    folder = Path() if options.output is None else options.output.parent
    return options.cache or folder / CACHE / run_name


@contextmanager
def explain_resume(cache_folder: Path | None) -> Iterator[None]:
    """Add to an interruption where the answers are, and how to resume."""
    if cache_folder is None:
        yield
        return
    words = f"the answers so far are in {cache_folder}; repeat the command to resume"
    raise_at_sigterm(words)
    try:
        yield
    except KeyboardInterrupt as error:
        raise type(error)(words) from None


def list_versions() -> dict[str, str]:
    """Return the versions of the software that computes a result."""
    return {"mega-eval": __version__, "torch": torch.__version__, "python": platform.python_version()}
