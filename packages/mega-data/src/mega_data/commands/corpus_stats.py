"""`mega-data stats`: count lengths, tokens, domains and languages of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_data.commands.common import (
    ANY_PATH,
    EXISTING,
    ON_ERROR,
    RepeatableOptionCommand,
    error_limit,
    is_whole_run,
    max_errors_option,
    placement_options,
    run_job,
    work_folder,
)
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import output_url, uploads_output
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_FOLDER_OR_URL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_data.corpus_stats.stats_tasks import CorpusStats, CountedValues
    from mega_schema.dataset.indexed_dataset import IndexedDataset

_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size")


@click.command("stats", cls=RepeatableOptionCommand)
@click.option(
    "--input",
    "words",
    multiple=True,
    help="JSON lines, .csv, .tsv or .parquet, also compressed: files, globs, folders, URLs, saved datasets.",
)
@click.option("--data-path", "prefixes", type=ANY_PATH, multiple=True, help="Prefixes of indexed datasets.")
@click.option(
    "--output",
    type=OUTPUT_FOLDER_OR_URL,
    required=True,
    help="Folder, or s3:// URL, for report.json and report.html.",
)
@click.option("--json-key", default="text", help="Key of the text; meta.text: text in the object meta.")
@click.option("--url-key", default="", help="Key of the address: count domains.")
@click.option("--languages", is_flag=True, help="Identify languages, by py3langid or --language-model.")
@click.option("--language-model", type=EXISTING, help="fastText file such as lid.176.bin: count languages.")
@click.option("--count-keys", multiple=True, help="Keys whose values are counted, such as language.")
@click.option("--tokenizer-type", help="Megatron's name of a tokenizer: count tokens.")
@click.option("--tokenizer-model", type=ANY_PATH, help="As in preprocess.")
@click.option("--vocab-file", type=ANY_PATH, help="As in preprocess.")
@click.option("--merge-file", type=ANY_PATH, help="As in preprocess.")
@click.option("--vocab-size", type=int, help="As in preprocess.")
@click.option(
    "--on-error", type=ON_ERROR, default="fail", help="What to do with a line that is not a document."
)
@max_errors_option("wrong lines")
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for intermediate files; with a URL also for the output.  [default: OUTPUT/.work]",
)
@placement_options()
@uploads_output("words", "prefixes")
def stats(
    words: tuple[str, ...],
    prefixes: tuple[Path, ...],
    output: Path,
    on_error: str,
    max_errors: str | None,
    work: Path | None,
    workers: int,
    executor: str,
    only: str | None,
    **values: Any,  # what to count, and the files of the tokenizer
) -> None:
    """Count lengths, tokens, domains and languages; write report.json and a page with plots.

    Memory does not grow with the corpus: lengths are counted in bins, and of more than 20,000 different
    domains or values the rare ones are dropped. A killed run resumes.
    """
    from mega_data.corpus_stats.stats_tasks import CorpusStats
    from mega_data.error_limit import ErrorCount
    from mega_data.jsonl_shards import find_shards
    from mega_data.output_folder import check_folder
    from mega_data.readers.file_tree import scanned_folders
    from mega_schema.errors import ConfigError
    from mega_schema.outputs import dataset_files

    if not words and not prefixes:
        raise ConfigError("--input, --data-path", "at least one is required")
    errors = ErrorCount(error_limit(on_error, max_errors))
    files = tuple(find_shards(words)) if words else ()
    counted = _counted_values(values, has_files=bool(files))
    datasets = _open_datasets(prefixes)
    inputs = [*files, *(file for data in datasets for file in dataset_files(data.prefix))]
    check_folder(output, work, inputs, scanned_folders(words, files) if words else ())
    whole_run = is_whole_run(executor, only)
    with work_folder(work, output / ".work", output, whole_run=whole_run, lock=output) as folder:
        job = CorpusStats(files, datasets, counted, folder, on_error == "skip")
        results = run_job(
            job,
            folder,
            executor=executor,
            workers=workers,
            only=only,
            errors=errors,
            marked=(output, "stats"),
        )
        if results is not None:
            _finish(job, output, keep_work=work is not None)


def _open_datasets(prefixes: tuple[Path, ...]) -> tuple[IndexedDataset, ...]:
    from mega_schema.dataset.indexed_dataset import open_dataset

    return tuple(open_dataset(prefix) for prefix in prefixes)


def _counted_values(values: Mapping[str, Any], *, has_files: bool) -> CountedValues:
    """Return what to count.

    Raises:
        ConfigError: an option has no effect without another, or a tokenizer cannot be opened.
    """
    from mega_data.corpus_stats.stats_tasks import CountedValues
    from mega_schema.errors import ConfigError
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    for name in ("url_key", "languages", "language_model", "count_keys", "tokenizer_type"):
        if values[name] and not has_files:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(option, "reads text, and --input names none", hint="--input corpus.jsonl")
    options = {name: values[name] for name in _TOKENIZER_FILES if values[name] is not None}
    tokenizer = None
    if kind := values["tokenizer_type"]:
        named = {"model" if name == "tokenizer_model" else name: value for name, value in options.items()}
        open_tokenizer(kind, **named)
        tokenizer = (("type", kind), *named.items())
    elif options:
        option = f"--{next(iter(options)).replace('_', '-')}"
        raise ConfigError(option, "has no effect without --tokenizer-type", hint="--tokenizer-type NAME")
    return CountedValues(
        values["json_key"],
        values["url_key"],
        bool(values["languages"] or values["language_model"]),
        str(values["language_model"] or ""),
        tuple(values["count_keys"]),
        tokenizer,
    )


def _finish(job: CorpusStats, output: Path, *, keep_work: bool) -> None:
    """Write the report and the page, and print the totals."""
    import json

    from mega_data.corpus_stats.stats_page import render_stats
    from mega_data.output_folder import REPORT_PAGE, publish, staging_folder
    from mega_data.readers.inputs import REPORT
    from mega_data.task_stages import remove_folder, write_file

    report = job.report()
    staging = staging_folder(output)
    write_file(staging / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    title = f"Statistics of {format_count(report['documents'], 'document')}"
    write_file(staging / REPORT_PAGE, render_stats(title, report))
    publish(output, "stats", job.work)
    if not keep_work:
        remove_folder(job.work)
    click.echo(f"{output_url() or output}: {format_count(report['documents'], 'document')}, see report.html")
    for name, summary in report["lengths"].items():
        percentiles = summary["percentiles"]
        click.echo(
            f"  {name}: {summary['total']:,}, {summary['mean']:,.1f} a document, half have up to "
            f"{percentiles['50']:,}, 95 % up to {percentiles['95']:,}"
        )
    for name, summary in report["frequent"].items():
        top = ", ".join(f"{value} {count:,}" for value, count in [*summary["top"].items()][:5])
        click.echo(f"  {name}: {top}")
    record_counts(documents_in=report["documents"], dropped={"not a document": report["skipped"]})
    if report["skipped"]:
        lines = format_count(report["skipped"], "line is not a document", "lines are not documents")
        click.echo(f"note: {lines}", err=True)
