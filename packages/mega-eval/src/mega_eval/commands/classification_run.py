"""Run a classification: open the model, evaluate, print the table and write the result."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from mega_eval import result
from mega_eval.commands.classification_commands import ClassificationOptions, match_labels
from mega_eval.commands.evaluate import list_versions
from mega_eval.models.classifier_model import ClassifierModel, open_classifier
from mega_eval.outputs import check_folder
from mega_eval.report_page.page import report_path, write_page
from mega_eval.result_reader import read_result
from mega_eval.task_result import TaskResult
from mega_eval.tasks.classification import CONVENTION, evaluate
from mega_schema.app.progress import progress_bar
from mega_schema.errors import ConfigError
from mega_schema.tasks.pair_tasks import PairFiles
from mega_schema.tasks.race_examples import LabelledExample


def list_input_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those of RACE in the folders."""
    return [file for path in paths for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]


def write_classification(
    task: str,
    files: PairFiles,
    paths: Sequence[Path],
    examples: Mapping[str, Sequence[LabelledExample]],
    options: ClassificationOptions,
) -> None:
    """Evaluate the examples of the files, print the table and write the result.

    Raises:
        MegaError: the model cannot be opened, or does not fit the examples.
    """
    check_folder_of_output(options)
    model = open_classifier(options.load, dtype=options.dtype, device=options.device)
    data = result.fingerprint_files(list_input_files(paths))
    output = choose_output(task, CONVENTION, model, paths, data, options)
    labels = match_labels(model.labels, options.labels, examples)
    length = choose_length(options, model)
    selected = {name: group[: options.limit] for name, group in examples.items()}
    count = sum(map(len, selected.values()))
    is_whole = count == sum(map(len, examples.values()))
    start = time.perf_counter()
    with progress_bar("classifying", count, unit="examples") as bar:
        task_result = evaluate(
            model,
            selected,
            labels,
            task=task,
            length=length,
            batch_size=options.micro_batch_size,
            binary=files.task == "QQP",
            is_whole=is_whole,
            on_progress=bar,
        )
    values = {
        "labels": list(labels),
        "seq_length": length,
        "text_keys": list(files.text_keys),
        "label_key": files.label_key,
    }
    seconds = time.perf_counter() - start
    write_encoder_result(task_result, model, data, values, options, output, seconds)


def check_folder_of_output(options: ClassificationOptions) -> None:
    """Check that a result without --output can be written into this folder.

    Raises:
        MegaError: it cannot.
    """
    if options.output is None:
        check_folder("--output", Path())


def choose_output(
    task: str,
    convention: str,
    model: ClassifierModel,
    paths: Sequence[Path],
    data: list[dict[str, object]],
    options: ClassificationOptions,
) -> Path:
    """Return the result file.

    Raises:
        ConfigError: it exists, or is an input.
    """
    output = options.output or result.default_output(task, convention, model.identity, data)
    result.check_writable(output, [*paths, options.load], overwrite=options.overwrite)
    return output


def choose_length(options: ClassificationOptions, model: ClassifierModel) -> int:
    """Return the tokens of a sample.

    Raises:
        ConfigError: the model's context is shorter.
    """
    length = options.seq_length or model.max_length
    if length > model.max_length:
        wanted = f"at most {model.max_length}"
        raise ConfigError("--seq-length", "is longer than the model's context", found=length, wanted=wanted)
    return length


def write_encoder_result(
    task_result: TaskResult,
    model: ClassifierModel,
    data: list[dict[str, object]],
    values: Mapping[str, object],
    options: ClassificationOptions,
    output: Path,
    seconds: float,
) -> None:
    """Write the result and its page, and print the table.

    Args:
        values: of the task's options.
        seconds: that the evaluation took.
    """
    provenance = result.Provenance(
        model=model.identity,
        data=data,
        options={
            **values,
            "limit": options.limit,
            "micro_batch_size": options.micro_batch_size,
        },
        versions={**list_versions(), **model.identity.versions},
        command=("mega-eval", *sys.argv[1:]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    record = result.build_record(task_result, provenance, seconds)
    result.write_result(output, record, task_result.examples)
    if options.report:
        write_page([read_result(output)], report_path(output))
    iteration = "" if model.identity.iteration is None else f"  iteration {model.identity.iteration}"
    click.echo(f"{task_result.task}  {model.identity.source}{iteration}  {model.identity.dtype}")
    click.echo(result.format_table(record))
    if not task_result.is_whole:
        click.echo("not publishable: --limit left examples out")
    page = f" and {report_path(output)}" if options.report else ""
    click.echo(f"written to {output}{page}")
