"""`mega-eval contamination`: find the examples of a task in a training set."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from mega_eval.commands.data_files import choose_path, data_files
from mega_eval.commands.task_list import list_tasks
from mega_schema.app.click_options import LocalPath
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_eval.contamination import Unit

_PATH = LocalPath()


@click.command()
@click.option(
    "--train",
    "trains",
    required=True,
    multiple=True,
    type=_PATH,
    help="Prefix of a training set; repeatable.",
)
@data_files("File of the task: JSON lines, CSV, TSV, or lines of text; also .gz and .zst.")
@click.option(
    "--task",
    metavar="NAME|FILE",
    help="Name of the task in the file of --output, one of `mega-eval tasks`.  [default: that of --result]. "
    "Or the file of the task.",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    help="Key of a text to search for; repeatable.  [default: all strings of a record]",
)
@click.option(
    "--ngram", type=click.IntRange(min=2), default=13, show_default=True, help="Words or tokens of an n-gram."
)
@click.option(
    "--unit",
    type=click.Choice(["word", "token"]),
    default="word",
    show_default=True,
    help="Words in lower case without punctuation, or tokens. Tokens are faster.",
)
@click.option(
    "--tokenizer",
    type=_PATH,
    help="Tokenizer folder, or checkpoint with one.  [default: the PREFIX.tokenizer of the dataset]",
)
@click.option("--result", type=_PATH, help="Result of the task; gives its metrics on both subsets.")
@click.option("--output", type=OUTPUT_FILE, help="Also write the overlap of every example, to NAME.json.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file of --output.")
def contamination(
    trains: tuple[Path, ...],
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    task: str | None,
    keys: tuple[str, ...],
    ngram: int,
    unit: str,
    tokenizer: Path | None,
    result: Path | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Find the examples of a task, in FILE, whose n-grams are in a training set.

    An example is dirty if an n-gram of one of its texts is in a document of a training set, else clean; an
    example shorter than an n-gram is clean. With --result, the metrics are computed on both subsets.
    """
    import time

    from mega_eval.compressed_file import check_file
    from mega_eval.contamination import NgramIndex
    from mega_eval.contamination_inputs import (
        check_data,
        match_ids,
        open_training_sets,
        read_texts,
    )
    from mega_eval.contamination_report import KEYS, build_record, count_overlaps, format_overlaps
    from mega_eval.contamination_subsets import split_metrics
    from mega_eval.outputs import check_output_file, write_json
    from mega_eval.result import fingerprint_files, samples_path
    from mega_eval.result_reader import read_result
    from mega_schema.app.progress import progress_bar
    from mega_schema.outputs import dataset_files, has_keys

    task, task_files = split_task(task)
    path = choose_path(paths, [*data, *task_files])
    inputs = [path, *(file for train in trains for file in dataset_files(train))]
    inputs += [] if result is None else [result, samples_path(result)]
    check_output_file("--output", output, inputs, has_keys(KEYS), suffix=".json", overwrite=overwrite)
    check_file(path)
    evaluated = None if result is None else read_result(result)
    if evaluated is not None:
        check_data(evaluated, path)
        task = task or evaluated.task
    examples = read_texts(path, keys)
    training_sets = open_training_sets(trains, tokenizer, is_shared=unit == "token")
    index = NgramIndex(examples, length=ngram, unit=cast("Unit", unit), tokenizer=training_sets[0].tokenizer)
    total = sum(train.dataset.tokens for train in training_sets)
    start = time.perf_counter()
    with progress_bar("searching", total, unit="tokens") as update:
        size = sum(index.scan(train, update) for train in training_sets)
    seconds = time.perf_counter() - start
    subsets = {}
    if evaluated is not None:
        subsets = split_metrics(evaluated, match_ids(evaluated, index.overlaps))
    counts = count_overlaps(index.overlaps)
    for line in format_overlaps(index.overlaps, counts, subsets, f"{ngram} {unit}s"):
        click.echo(line)
    if evaluated is not None and not subsets:
        click.echo("no metrics by subset: all examples of the result are in one of them")
    rate = size / 1e6 / seconds
    click.echo(f"{total:,} training tokens in {seconds:,.1f} s, {rate:,.1f} MB/s of .bin")
    if output is not None:
        files = fingerprint_files([path])
        record = build_record(task, files, training_sets, unit, ngram, counts, subsets, index.overlaps)
        record |= {"seconds": round(seconds, 3), "megabytes_per_second": round(rate, 3)}
        write_json(output, record)
        click.echo(f"written to {output}")


def split_task(value: str | None) -> tuple[str | None, list[Path]]:
    """Return the value of --task as the name of a task, or else as its file.

    Raises:
        ConfigError: it is neither.
    """
    names = [description.name for description in list_tasks()]
    if value is None or value in names:
        return value, []
    if Path(value).exists():
        return None, [Path(value)]
    close = get_close_matches(value, names, 1)
    hint = f"did you mean {close[0]}?" if close else "mega-eval tasks"
    raise ConfigError("--task", "not the name of a task", found=value, wanted=" | ".join(names), hint=hint)
