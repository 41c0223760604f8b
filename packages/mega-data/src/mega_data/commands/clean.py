"""`mega-data clean`: run a list of steps over a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    EXECUTOR,
    EXISTING,
    LAST_CALL_HELP,
    WORKERS,
    RepeatableOptionCommand,
    check_has_stage,
    check_inputs_unchanged,
    error_limit,
    exit_if_nothing_left,
    is_whole_run,
    mark_output,
    output_format_option,
    output_suffix,
    run_stages,
    warn_damaged,
    warn_skipped,
    work_folder,
)
from mega_data.commands.document_options import document_options, find_documents
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import uploads_output
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_FOLDER_OR_URL

if TYPE_CHECKING:
    from mega_data.clean.pipeline import Cleaning, CleaningPass
    from mega_data.clean.sentence_dedup import SentenceDedup
    from mega_data.dedup.pipeline import Deduplication


@click.command(cls=RepeatableOptionCommand)
@document_options
@click.option(
    "--output",
    type=OUTPUT_FOLDER_OR_URL,
    required=True,
    help="Folder, or s3:// URL, for the kept documents and the report.",
)
@click.option("--config", type=EXISTING, help="TOML file with [[step]] tables, run in order.")
@click.option(
    "--step",
    "flags",
    multiple=True,
    help="Step to run after those of --config: NAME or NAME:KEY=VALUE,KEY=VALUE.",
)
@click.option(
    "--keep-dropped", is_flag=True, help="Write dropped documents with the reason to OUTPUT/dropped."
)
@output_format_option("kept documents")
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for intermediate files; with a URL also for the output.  [default: OUTPUT/.work]",
)
@click.option("--memory", type=click.IntRange(min=1), default=256, help="MiB for sorting, per worker.")
@click.option("--workers", type=WORKERS, default=1, help="Worker processes.")
@click.option("--executor", type=EXECUTOR, default="local", help="Where the tasks run.")
@click.option("--stage", "only", help=f"Run only plan, PASS/STAGE or PASS/STAGE:TASK; {LAST_CALL_HELP}")
@uploads_output("inputs")
def clean(
    inputs: tuple[str, ...],
    json_key: str,
    id_key: str,
    on_error: str,
    max_errors: str | None,
    adapter: str | None,
    split_mb: int,
    output: Path,
    config: Path | None,
    flags: tuple[str, ...],
    keep_dropped: bool,
    output_format: str,
    work: Path | None,
    memory: int,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Repair documents and drop those that are not worth training on, step by step.

    Steps: fix-text, punctuation, whitespace, pii, language, length, tokens, javascript, c4, gopher-quality,
    gopher-repetition, fineweb-quality, classifier, perplexity, urls, url-list, regex, sample,
    python:MODULE:FUNCTION, decontaminate, duplicates, spans. Workers do not change the result. Runs resume.
    """
    from mega_data.clean.pipeline import Cleaning
    from mega_data.clean.registry import step_from_flag, steps_from_toml
    from mega_data.error_limit import ErrorCount
    from mega_data.output_folder import staging_folder

    errors = ErrorCount(error_limit(on_error, max_errors))
    steps = (*(steps_from_toml(config) if config else ()), *map(step_from_flag, flags))
    suffix = output_suffix(output_format)
    ranges = find_documents(inputs, adapter, split_mb, output=output, work=work, suffix=suffix)
    whole_run = is_whole_run(executor, only)
    staging = staging_folder(output)
    with work_folder(work, output / ".work", output, whole_run=whole_run, lock=output) as folder:
        job = Cleaning(
            ranges,
            staging,
            folder,
            steps,
            json_key,
            keep_dropped=keep_dropped,
            skip=on_error == "skip",
            id_key=id_key,
            suffix=suffix,
            memory=memory << 20,
        )
        passes = {cleaning_pass.work.name: cleaning_pass for cleaning_pass in job.passes()}
        stages = ((name, stage) for name, cleaning_pass in passes.items() for stage in cleaning_pass.stages())
        check_has_stage(executor, only, (f"{name}/{stage.name}" for name, stage in stages))
        only_pass, only_stage = _split_stage(only, passes)
        job.begin()
        mark_output(output, "clean", only)
        with check_inputs_unchanged(folder):
            for name, cleaning_pass in passes.items():
                if only_pass in (None, name):
                    run_stages(
                        cleaning_pass.stages(),
                        cleaning_pass.work,
                        executor=executor,
                        workers=workers,
                        only=only_stage,
                        errors=errors,
                        label=f"{name}: ",
                    )
        if not only:
            _finish(job, output, errors.damaged, keep_work=work is not None)


def _split_stage(
    only: str | None, passes: Mapping[str, CleaningPass | Deduplication | SentenceDedup]
) -> tuple[str | None, str | None]:
    """Split --stage into the pass and the stage of it, None for all.

    Raises:
        ConfigError: there is no such pass or stage.
    """
    from mega_data.task_stages import select_stages
    from mega_schema.errors import ConfigError

    pass_name, _, stage = (only or "").partition("/")
    if only and pass_name not in {"plan", *passes}:
        raise ConfigError("--stage", "no such pass", found=pass_name, wanted=" | ".join(["plan", *passes]))
    if pass_name in passes:
        select_stages(passes[pass_name].stages(), stage or None)
    return pass_name or None, stage or None


def _finish(job: Cleaning, output: Path, damaged: Sequence[str], *, keep_work: bool) -> None:
    """Write the report, publish all files, and print what each step kept.

    Args:
        damaged: the files whose rest was skipped, and why.

    Raises:
        SystemExit: no document remains: exit code 1.
    """
    import json

    from mega_data.clean.report import render_report
    from mega_data.output_folder import REPORT_PAGE, publish
    from mega_data.readers.inputs import QUARANTINE, REPORT
    from mega_data.task_stages import remove_folder, write_file

    report = job.report()
    skipped = job.count_skipped()
    values = {"skipped": skipped, "damaged": damaged, "steps": report}
    write_file(job.output / REPORT, json.dumps(values, indent=1, ensure_ascii=False))
    title = f"Cleaning of {format_count(job.count_inputs(), 'file')}"
    write_file(job.output / REPORT_PAGE, render_report(title, report, skipped))
    missing_keys = list(job.missing_keys())
    publish(output, "clean", job.work)
    if not keep_work:
        remove_folder(job.work)
    for step in report:
        documents = format_count(step["documents_in"], "document")
        click.echo(f"{step['step']}: {step['documents_out']:,} of {documents}")
        for reason, count in sorted(step["reasons"].items(), key=lambda item: -item[1]):
            click.echo(f"  {count:,}  {reason}")
        for kind, count in step["replaced"].items():
            click.echo(f"  {count:,}  {kind} replaced")
    click.echo(f"{output}: {report[-1]['bytes_out'] / 1e6:.2f} MB, see report.html")
    for named_step, keys in missing_keys:
        what = f"no document has the key {named_step.step.key!r}: found {', '.join(keys)}"
        click.echo(f"note: step {named_step.name}: {what}", err=True)
    warn_damaged(damaged)
    warn_skipped(skipped, output / QUARANTINE)
    dropped = {
        f"{step['step']}: {reason}": count for step in report for reason, count in step["reasons"].items()
    }
    record_counts(
        documents_in=report[0]["documents_in"] + skipped,
        documents_out=report[-1]["documents_out"],
        dropped={**dropped, "not a document": skipped},
    )
    exit_if_nothing_left(report[-1]["documents_out"], report[0]["documents_in"] + skipped)
