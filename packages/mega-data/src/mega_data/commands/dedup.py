"""`mega-data dedup`: near-duplicate documents out of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    EXECUTOR,
    LAST_CALL,
    WORKERS,
    Spreading,
    check_has_stage,
    documents_options,
    error_limit,
    exit_if_nothing_left,
    is_alone,
    run_stages,
    tell_skipped,
    unchanged_inputs,
    work_folder,
)
from mega_schema.app.output_option import OUTPUT_FOLDER

if TYPE_CHECKING:
    from mega_data.task_stages import Result


@click.command(cls=Spreading)
@documents_options
@click.option(
    "--output", type=OUTPUT_FOLDER, required=True, help="Folder of the kept lines, a file per shard."
)
@click.option("--work", type=OUTPUT_FOLDER, help="Folder of intermediate files.  [default: OUTPUT/.work]")
@click.option("--preset", type=click.Choice(["megatron", "datatrove", "exact"]), default="datatrove")
@click.option(
    "--jaccard",
    type=click.FloatRange(0, 1),
    help="Check each pair, and take it from this similarity on.  [default: megatron 0.7, datatrove no check]",
)
@click.option("--keep-dropped", is_flag=True, help="Write the lines that go to OUTPUT/dropped.")
@click.option("--memory", type=click.IntRange(min=1), default=256, help="MB to sort pairs in, per worker.")
@click.option("--workers", type=WORKERS, default=1, help="Processes.")
@click.option("--executor", type=EXECUTOR, default="local", help="Who runs the tasks.")
@click.option("--only", help=f"plan, STAGE or STAGE:TASK to do; {LAST_CALL}")
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
    keep_dropped: bool,
    memory: int,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Keep one document, the first, of each group of near-duplicates.

    The same documents stay whatever the workers and the order of the files. A run that was killed goes on
    where its finished tasks end.
    """
    from dataclasses import replace

    from mega_data.dedup.pipeline import Deduplication
    from mega_data.dedup.presets import PRESETS
    from mega_data.error_limit import ErrorCount
    from mega_data.output_folder import checked_shards, mark, publish, staging
    from mega_data.readers.inputs import DROPPED, QUARANTINE
    from mega_data.task_stages import remove_folder
    from mega_schema.errors import ConfigError

    errors = ErrorCount(error_limit(on_error, max_errors))
    how = PRESETS[preset]
    if jaccard is not None:
        if how.unit == "text":
            raise ConfigError(
                "--jaccard", "says nothing of equal texts", hint="leave it out with --preset exact"
            )
        how = replace(how, jaccard=jaccard)
    staged = staging(output)
    dropped = staged / DROPPED if keep_dropped else None
    quarantine = staged / QUARANTINE if on_error == "skip" else None
    files = checked_shards(inputs, output, work)
    alone = is_alone(executor, only)
    with work_folder(work, output / ".work", output, alone=alone, lock=output) as folder:
        job = Deduplication(
            files,
            staged,
            folder,
            how,
            key=json_key,
            memory=memory << 20,
            dropped=dropped,
            quarantine=quarantine,
            id_key=id_key,
        )
        check_has_stage(executor, only, (stage.name for stage in job.stages()))
        job.begin()
        mark(output, "dedup")
        with unchanged_inputs(folder):
            found = run_stages(
                job.stages(), folder, executor=executor, workers=workers, only=only, errors=errors
            )
        if found is None:
            return
        publish(output, "dedup", folder)
        if not work:
            remove_folder(folder)
    _finish(found[-1], output)


def _finish(shards: Sequence[Result], output: Path) -> None:
    """Print what was kept of the shards.

    Raises:
        SystemExit: nothing was: exit code 1.
    """
    from mega_data.readers.inputs import QUARANTINE

    counts = {name: sum(shard[name] for shard in shards) for name in shards[0]}
    click.echo(
        f"{output}: kept {counts['kept']:,} of {counts['documents']:,} documents, "
        f"{counts['kept_bytes'] / 1e6:.2f} of {counts['bytes'] / 1e6:.2f} MB"
    )
    tell_skipped(counts["skipped"], output / QUARANTINE)
    exit_if_nothing_left(counts["kept"], counts["documents"] + counts["skipped"])
