"""`mega-data dedup`: remove near-duplicate documents from a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    RepeatableOptionCommand,
    document_options,
    error_limit,
    exit_if_nothing_left,
    is_whole_run,
    output_format_option,
    output_suffix,
    placement_options,
    run_job,
    warn_damaged,
    warn_skipped,
    work_folder,
)
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import uploads_output
from mega_schema.app.click_options import LocalPath
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_FOLDER_OR_URL

if TYPE_CHECKING:
    from mega_data.dedup.pipeline import Deduplication
    from mega_data.dedup.presets import Preset
    from mega_data.task_stages import TaskResult


@click.command(cls=RepeatableOptionCommand)
@document_options
@click.option(
    "--output",
    type=OUTPUT_FOLDER_OR_URL,
    required=True,
    help="Folder, or s3:// URL, for the kept lines, a file per shard.",
)
@output_format_option("kept documents")
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for intermediate files; with a URL also for the output.  [default: OUTPUT/.work]",
)
@click.option(
    "--preset", type=click.Choice(["megatron", "datatrove", "exact"]), default="datatrove", help="Method."
)
@click.option(
    "--jaccard",
    type=click.FloatRange(0, 1),
    help="Minimum Jaccard similarity of a pair.  [default: megatron 0.7, datatrove no check]",
)
@click.option(
    "--against",
    type=LocalPath(exists=True, file_okay=False),
    multiple=True,
    help="Outputs of earlier runs; also drop documents that duplicate one in them.",
)
@click.option("--keep-keys", is_flag=True, help="Write keys for --against of later runs, 8 bytes per band.")
@click.option("--keep-dropped", is_flag=True, help="Write dropped lines to OUTPUT/dropped.")
@click.option("--memory", type=click.IntRange(min=1), default=256, help="MiB for sorting pairs, per worker.")
@placement_options()
@uploads_output("inputs")
def dedup(
    inputs: tuple[str, ...],
    json_key: str,
    id_key: str,
    on_error: str,
    max_errors: str | None,
    output: Path,
    work: Path | None,
    preset: str,
    jaccard: float | None,
    against: tuple[Path, ...],
    keep_keys: bool,
    keep_dropped: bool,
    output_format: str,
    memory: int,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Keep the first document of each group of near-duplicates.

    The result depends neither on the workers nor on the order of the files. A killed run resumes after its
    finished tasks.
    """
    from mega_data.dedup.earlier_output import find_earlier_shards
    from mega_data.dedup.pipeline import Deduplication
    from mega_data.error_limit import ErrorCount
    from mega_data.output_folder import KEYS_FOLDER, find_checked_shards, staging_folder
    from mega_data.readers.inputs import DROPPED, QUARANTINE

    errors = ErrorCount(error_limit(on_error, max_errors))
    preset_options = _select_preset(preset, jaccard)
    staging = staging_folder(output)
    files = find_checked_shards(inputs, output, work, suffix := output_suffix(output_format))
    earlier = find_earlier_shards(against, output, preset_options, files)
    whole_run = is_whole_run(executor, only)
    with work_folder(work, output / ".work", output, whole_run=whole_run, lock=output) as folder:
        job = Deduplication(
            files,
            staging,
            folder,
            preset_options,
            key=json_key,
            memory=memory << 20,
            dropped=staging / DROPPED if keep_dropped else None,
            quarantine=staging / QUARANTINE if on_error == "skip" else None,
            id_key=id_key,
            suffix=suffix,
            earlier=earlier,
            kept_keys=staging / KEYS_FOLDER if keep_keys else None,
        )
        results = run_job(
            job,
            folder,
            executor=executor,
            workers=workers,
            only=only,
            errors=errors,
            marked=(output, "dedup"),
        )
        if results is not None:
            _finish(results[-1], output, job, errors.damaged, keep_work=work is not None)


def _select_preset(name: str, jaccard: float | None) -> Preset:
    """Return a preset with the similarity of --jaccard.

    Raises:
        ConfigError: the preset does not compare documents.
    """
    from dataclasses import replace

    from mega_data.dedup.presets import PRESETS
    from mega_schema.errors import ConfigError

    preset = PRESETS[name]
    if jaccard is None:
        return preset
    if preset.unit == "text":
        what, hint = "has no effect on exact duplicates", "leave it out with --preset exact"
        raise ConfigError("--jaccard", what, hint=hint)
    return replace(preset, jaccard=jaccard)


def _finish(
    shards: Sequence[TaskResult],
    output: Path,
    job: Deduplication,
    damaged: Sequence[str],
    *,
    keep_work: bool,
) -> None:
    """Publish the files; print how many documents were kept.

    Args:
        damaged: the files whose rest was skipped, and why.

    Raises:
        SystemExit: no document was kept: exit code 1.
    """
    from mega_data.dedup.earlier_output import write_preset
    from mega_data.output_folder import publish
    from mega_data.readers.inputs import QUARANTINE
    from mega_data.task_stages import remove_folder

    if job.kept_keys is not None:
        write_preset(job.kept_keys, job.preset)
    publish(output, "dedup", job.work)
    if not keep_work:
        remove_folder(job.work)
    counts = {name: sum(shard[name] for shard in shards) for name in shards[0]}
    click.echo(
        f"{output}: kept {counts['kept']:,} of {counts['documents']:,} documents, "
        f"{counts['kept_bytes'] / 1e6:.2f} of {counts['bytes'] / 1e6:.2f} MB"
    )
    warn_damaged(damaged)
    warn_skipped(counts["skipped"], output / QUARANTINE)
    record_counts(
        documents_in=counts["documents"] + counts["skipped"],
        documents_out=counts["kept"],
        dropped={
            "like an earlier one": counts["documents"] - counts["kept"],
            "not a document": counts["skipped"],
        },
    )
    exit_if_nothing_left(counts["kept"], counts["documents"] + counts["skipped"])
