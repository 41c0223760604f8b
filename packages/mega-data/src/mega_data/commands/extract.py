"""`mega-data extract`: extract text from wiki dumps, web archives and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    ON_ERROR,
    RepeatableOptionCommand,
    error_limit,
    exit_if_nothing_left,
    inputs_option,
    is_whole_run,
    max_errors_option,
    output_format_option,
    output_suffix,
    placement_options,
    run_job,
    warn_replaced,
    work_folder,
)
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import uploads_output
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_ANY, OUTPUT_FOLDER

if TYPE_CHECKING:
    from mega_data.task_stages import TaskResult


@click.command(cls=RepeatableOptionCommand)
@inputs_option(
    "Dumps (.xml), archives (.warc, .wet) and .html, plain or .gz .zst .xz .bz2 .lz4: files, globs, folders, "
    "URLs."
)
@click.option(
    "--output",
    type=OUTPUT_ANY,
    required=True,
    help="Folder for a file per input, or one file .jsonl, .jsonl.gz, .jsonl.zst or .parquet; or s3:// URL.",
)
@click.option(
    "--from",
    "file_format",
    type=click.Choice(["auto", "wiki-dump", "warc", "wet", "html"]),
    default="auto",
    help="Format of the files; auto detects it by their first bytes.",
)
@click.option(
    "--on-error",
    type=ON_ERROR,
    default="fail",
    help="On damaged input: fail, or skip and count the damage.",
)
@max_errors_option("damaged ranges", share="of all pages and ranges", damage="")
@click.option("--keep-dropped", is_flag=True, help="Write skipped pages with the reason to OUTPUT.dropped.")
@output_format_option("pages", default=None)
@click.option("--split-mb", type=click.IntRange(min=1), default=32, help="Megabytes of a dump per task.")
@click.option("--full-page", is_flag=True, help="Keep menus and footers of HTML pages.")
@click.option(
    "--html-extractor",
    type=click.Choice(["resiliparse", "trafilatura"]),
    default="resiliparse",
    help="Library that finds the main text of HTML pages.",
)
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for intermediate files; with a URL also for the output.  [default: OUTPUT.work]",
)
@placement_options()
@uploads_output("inputs")
def extract(
    inputs: tuple[str, ...],
    output: Path,
    file_format: str,
    on_error: str,
    max_errors: str | None,
    keep_dropped: bool,
    output_format: str | None,
    split_mb: int,
    full_page: bool,
    html_extractor: str,
    work: Path | None,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Write the pages of wiki dumps, web archives and HTML as JSON lines: id, url, title, text.

    A file is a task; a large plain or .bz2 dump is several. The output does not depend on the workers. A
    killed run resumes after its finished tasks. Other pages are skipped and counted by reason.
    """
    from mega_data.error_limit import ErrorCount
    from mega_data.extract.formats import find_inputs, split_inputs
    from mega_data.extract.pipeline import (
        Extraction,
        check_extractor,
        check_outputs,
        dropped_path,
        is_one_file,
    )
    from mega_data.output_folder import publish, staging_folder
    from mega_data.task_stages import remove_folder

    check_extractor(html_extractor, full_page=full_page)
    errors = ErrorCount(error_limit(on_error, max_errors))
    files = find_inputs(inputs)
    suffix = output_suffix(output_format, output)
    check_outputs(files, output, work, suffix, keep_dropped=keep_dropped)
    parts = split_inputs(files, file_format, split_mb * 1_000_000)
    default_work = output.with_name(f"{output.name}.work")
    if (one_file := is_one_file(output)) and only in (None, "plan") and output.exists():
        warn_replaced(output, "file")
    lock = work or default_work if one_file else output
    with work_folder(work, default_work, output, whole_run=is_whole_run(executor, only), lock=lock) as folder:
        target = output if one_file else staging_folder(output)
        skip = on_error == "skip"
        dropped = dropped_path(output)
        job = Extraction(
            parts, target, folder, file_format, full_page, skip, keep_dropped, suffix, dropped, html_extractor
        )
        results = run_job(
            job,
            folder,
            executor=executor,
            workers=workers,
            only=only,
            errors=errors,
            marked=None if one_file else (output, "extract"),
        )
        if results is None:
            return
        if not one_file:
            publish(output, "extract", folder)
        if not work:
            remove_folder(folder)
    _print_summary(results[0], output, len(job.inputs))


def _print_summary(results: Sequence[TaskResult], output: Path, files: int) -> None:
    """Print what was extracted and what was left out.

    Raises:
        SystemExit: there is no document: exit code 1.
    """
    from collections import Counter

    counts = Counter[str]()
    reasons = Counter[str]()
    for result in results:
        counts.update({name: result[name] for name in ("documents", "bytes", "lost")})
        reasons.update(result["reasons"])
    size = f"{counts['bytes'] / 1e6:.2f} MB"
    documents = format_count(counts["documents"], "document")
    click.echo(f"{output}: {documents}, {size} from {format_count(files, 'file')}")
    for reason, count in sorted(reasons.items()):
        click.echo(f"  left out {count:,}: {reason}")
    if counts["lost"]:
        click.echo(f"  lost to damage: {format_count(counts['lost'], 'byte')} of the files")
    written = counts["documents"]
    record_counts(documents_in=written + reasons.total(), documents_out=written, dropped=reasons)
    exit_if_nothing_left(counts["documents"], reasons.total())
