"""Run `mega-data preprocess` as tasks on an executor."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_data.commands.common import (
    check_has_stage,
    check_inputs_unchanged,
    is_whole_run,
    run_stages,
    warn_damaged,
)
from mega_data.encode_tasks import STAGES, TASKS, EncodingTasks, check_task_inputs, pack_encoder
from mega_data.encoding_plan import INDEX_FORMATS, EncodingPlan, Options, check_options, dataset_prefixes
from mega_data.error_limit import ErrorCount
from mega_data.input_stream import InputStream
from mega_data.preprocess import PreprocessResult, quarantine_path, unfinished_folder
from mega_data.process_pool import ProcessPool
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import plan_tasks
from mega_data.readers.streams import BLOCK_BYTES
from mega_data.resumable_output import LOCK, lock_unfinished
from mega_data.task_stages import FAILED, TaskResult, finish_removal, remove_folder
from mega_schema.atomic_io import sync_folder
from mega_schema.dataset.indexed_dataset import sibling
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how the tasks of a run are run.

    Attributes:
        executor, workers, only: see `executors.dispatch.execute`.
        split_bytes: size on disk of a range of a large file.
    """

    executor: str = "local"
    workers: int = 1
    only: str | None = None
    split_bytes: int = 64_000_000


def preprocess_tasks(
    inputs: Sequence[InputFile],
    output_prefix: Path,
    tokenizer: Tokenizer,
    options: Options,
    placement: Placement,
) -> PreprocessResult | None:
    """Write the files of `preprocess.preprocess`, with the same bytes.

    Returns:
        The result, or None if this process ran only a part of the tasks.

    Raises:
        ConfigError: options do not fit each other, or an input cannot be divided into tasks.
        FormatError: a row is wrong and `options.skip` is off; then there is no dataset.
    """
    started_at = time.monotonic()
    check_task_inputs(inputs)
    check_options(options, tokenizer)
    executor, workers, only = placement.executor, placement.workers, placement.only
    check_has_stage(executor, only, STAGES)
    whole_run = is_whole_run(executor, only)
    errors = ErrorCount(options.max_errors)
    with _locked_folder(unfinished_folder(output_prefix), shared=not whole_run) as folder:
        job, name = _make_job(inputs, folder / TASKS, tokenizer, options, placement.split_bytes)
        job.begin(whole_run=whole_run)
        first, *others = job.stages()
        before = {int(marker.stem) for marker in (job.folder / "done" / first.name).glob("*.json")}
        run = partial(run_stages, folder=job.folder, executor=executor, only=only, errors=errors)
        with _keep_finished_tasks(job.folder, whole_run=whole_run), check_inputs_unchanged(job.folder):
            results = run([first] if whole_run else [first, *others], workers=workers)
        if not whole_run:
            return None
        # joined parts cannot be encoded again: this begins when nothing can be wrong with the inputs
        run(others, workers=1 if executor == "local" else workers)
        prefixes = dataset_prefixes(output_prefix, options)
        for prefix in prefixes:
            tokenizer.save(sibling(prefix, ".tokenizer"))
        quarantine = quarantine_path(output_prefix)
        job.publish(prefixes, quarantine)
        sync_folder(folder.parent)
        remove_folder(folder)
    assert results is not None
    warn_damaged(errors.damaged)
    return _sum_results(results[0], before, prefixes, quarantine, time.monotonic() - started_at, name)


def _make_job(
    inputs: Sequence[InputFile], folder: Path, tokenizer: Tokenizer, options: Options, split_bytes: int
) -> tuple[EncodingTasks, str]:
    """Return the tasks of a run, and the name of its encoder."""
    stream = InputStream(inputs, options.keys, options.unit, BLOCK_BYTES, skip=options.skip)
    plan = EncodingPlan.for_run(tokenizer, options, stream)
    with ProcessPool(1) as processes:
        work = plan.make_work(plan.start_search(processes).find(stream.sample_texts()))
    job = EncodingTasks(
        plan_tasks(inputs, split_bytes),
        folder,
        pack_encoder(work),
        plan.dataset_infos([str(item.path) for item in inputs]),
        work.dtype,
        options.skip,
        options.unit,
        INDEX_FORMATS[options.index_format],
    )
    return job, work.encode.name


@contextmanager
def _locked_folder(folder: Path, *, shared: bool) -> Iterator[Path]:
    """Lock the folder of the run; remove it again if the block fails before it has a plan.

    Args:
        shared: other processes run other tasks.

    Raises:
        ConfigError: another run writes there.
    """
    finish_removal(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_unfinished(folder, shared=shared):
        try:
            yield folder
        except MegaError:
            with suppress(OSError):  # other files are there
                (folder / TASKS).rmdir()
            if [path.name for path in folder.iterdir()] == [LOCK]:
                remove_folder(folder)
            raise


@contextmanager
def _keep_finished_tasks(folder: Path, *, whole_run: bool) -> Iterator[None]:
    """After a wrong row, keep the finished tasks for the next run, if there are any."""
    try:
        yield
    except (ConfigError, FormatError):
        if whole_run and next(folder.glob("done/*/*.json"), None) is None:
            remove_folder(folder)
        elif whole_run:
            (folder / FAILED).touch()
        raise


def _sum_results(
    encoded: Sequence[TaskResult],
    before: Collection[int],
    prefixes: tuple[Path, ...],
    quarantine: Path,
    seconds: float,
    encoder: str,
) -> PreprocessResult:
    """Add up the results of the tasks that encode.

    Args:
        before: tasks that earlier processes finished.
    """
    return PreprocessResult(
        prefixes,
        documents=sum(result["documents"] for result in encoded),
        tokens=sum(counts["tokens"] for result in encoded for counts in result["counts"]),
        size=sum(result["bytes"] for result in encoded),
        skipped=sum(result["skipped"] for result in encoded),
        quarantine=quarantine,
        seconds=seconds,
        fresh=sum(result["bytes"] for task, result in enumerate(encoded) if task not in before),
        encoder=encoder,
    )
