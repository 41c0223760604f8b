"""`mega-data dedup`: remove near-duplicate documents, or repeated spans of tokens, from a corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    RepeatableOptionCommand,
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
from mega_data.commands.dedup_substrings import (
    SUBSTRINGS,
    SubstringOptions,
    check_preset_options,
    substring_options,
)
from mega_data.commands.document_options import document_options, find_documents
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import uploads_output
from mega_schema.app.click_options import LocalPath, NumberRange
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_FOLDER_OR_URL

if TYPE_CHECKING:
    from mega_data.dedup.pipeline import Deduplication
    from mega_data.dedup.presets import Preset
    from mega_data.dedup.substrings import SubstringDedup
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
    "--preset",
    type=click.Choice(["megatron", "datatrove", "exact", SUBSTRINGS]),
    default="datatrove",
    help="Method: two for near-duplicates, equal documents, repeated spans of tokens.",
)
@click.option(
    "--jaccard",
    type=NumberRange(0, 1),
    help="Minimum Jaccard similarity of a pair.  [default: megatron 0.7, datatrove no check]",
)
@click.option(
    "--against",
    type=LocalPath(exists=True, file_okay=False),
    multiple=True,
    help="Outputs of earlier runs; also drop documents that duplicate one in them.",
)
@click.option("--keep-keys", is_flag=True, help="Write keys for --against of later runs, 8 bytes per band.")
@substring_options
@click.option(
    "--keep-dropped", is_flag=True, help="Write dropped lines, or removed spans, to OUTPUT/dropped."
)
@click.option("--memory", type=click.IntRange(min=1), default=256, help="MiB for sorting, per worker.")
@placement_options()
@uploads_output("inputs")
def dedup(
    inputs: tuple[str, ...],
    json_key: str,
    id_key: str,
    on_error: str,
    max_errors: str | None,
    adapter: str | None,
    split_mb: int,
    output: Path,
    work: Path | None,
    preset: str,
    jaccard: float | None,
    against: tuple[Path, ...],
    keep_keys: bool,
    min_tokens: int | None,
    unit: str | None,
    max_repeated: float | None,
    keep_dropped: bool,
    output_format: str,
    memory: int,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Keep the first document of each group of near-duplicates; with substrings, the first of equal spans.

    The result depends neither on the workers nor on the order of the files. A killed run resumes after its
    finished tasks.
    """
    from mega_data.error_limit import ErrorCount
    from mega_data.output_folder import staging_folder
    from mega_data.range_outputs import RangeOutputs, result_stage
    from mega_data.readers.inputs import DROPPED, QUARANTINE
    from mega_data.task_stages import read_results

    errors = ErrorCount(error_limit(on_error, max_errors))
    span_options = SubstringOptions(min_tokens, unit, max_repeated)
    staging = staging_folder(output)
    suffix = output_suffix(output_format)
    ranges = find_documents(inputs, adapter, split_mb, output=output, work=work, suffix=suffix)
    files = [part.item.path for part in ranges]
    build_job = _select_job(preset, span_options, jaccard, against, keep_keys, output, files)
    whole_run = is_whole_run(executor, only)
    with work_folder(work, output / ".work", output, whole_run=whole_run, lock=output) as folder:
        dropped = staging / DROPPED if keep_dropped else None
        quarantine = staging / QUARANTINE if on_error == "skip" else None
        outputs = RangeOutputs(ranges, staging, folder / "parts", dropped, quarantine, suffix)
        job = build_job(
            outputs,
            folder,
            key=json_key,
            id_key=id_key,
            memory=memory << 20,
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
            shards = read_results(result_stage(job.stages()), folder)
            _finish(shards, output, job, errors.damaged, keep_work=work is not None)


def _select_job(
    preset: str,
    span_options: SubstringOptions,
    jaccard: float | None,
    against: tuple[Path, ...],
    keep_keys: bool,
    output: Path,
    files: Sequence[Path],
) -> Callable[..., Deduplication | SubstringDedup]:
    """Return a function that builds the run of a preset from the options of all presets.

    Raises:
        ConfigError: an option does not belong to the preset, or --against has no earlier output.
    """
    from mega_data.dedup.earlier_output import find_earlier_shards
    from mega_data.dedup.pipeline import Deduplication
    from mega_data.output_folder import KEYS_FOLDER, staging_folder

    has_options = {"jaccard": jaccard is not None, "against": bool(against), "keep-keys": keep_keys}
    check_preset_options(preset, span_options, has_options)
    if preset == SUBSTRINGS:
        return span_options.build_job
    document_preset = select_preset(preset, jaccard)
    earlier = find_earlier_shards(against, output, document_preset, files)
    kept_keys = staging_folder(output) / KEYS_FOLDER if keep_keys else None
    return partial(Deduplication, preset=document_preset, earlier=earlier, kept_keys=kept_keys)


def select_preset(name: str, jaccard: float | None) -> Preset:
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
    job: Deduplication | SubstringDedup,
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
    from mega_data.dedup.pipeline import Deduplication
    from mega_data.output_folder import publish
    from mega_data.readers.inputs import QUARANTINE
    from mega_data.task_stages import remove_folder

    if isinstance(job, Deduplication) and job.kept_keys is not None:
        write_preset(job.kept_keys, job.preset)
    publish(output, "dedup", job.work)
    if not keep_work:
        remove_folder(job.work)
    counts = {name: sum(shard[name] for shard in shards) for name in shards[0]}
    removed = f", removed {format_count(counts['spans'], 'span')}" if "spans" in counts else ""
    click.echo(
        f"{output}: kept {counts['kept']:,} of {format_count(counts['documents'], 'document')}, "
        f"{counts['kept_bytes'] / 1e6:.2f} of {counts['bytes'] / 1e6:.2f} MB{removed}"
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
