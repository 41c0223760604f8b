"""`mega-data run`: run the stages of a pipeline file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import ANY_PATH
from mega_schema.app.counts import format_count

if TYPE_CHECKING:
    from mega_data.stage_graph.stage_runs import StageRuns


@click.command("run")
@click.argument("pipeline", type=ANY_PATH)
@click.option("--dry-run", is_flag=True, help="Print the commands and the stages that would run.")
@click.pass_context
def run_pipeline(context: click.Context, pipeline: Path, dry_run: bool) -> None:
    """Run the stages of the TOML file PIPELINE, each after the stages that it reads.

    A stage runs again only if its options or the files that it reads have changed. A failed or stopped stage
    ends the run; the same command resumes it. OUTPUT/report.html is the report of all stages.
    """
    from mega_data.commands.stage_checks import check_stage
    from mega_data.output_folder import lock_folder
    from mega_data.stage_graph.pipeline_file import read_pipeline
    from mega_data.stage_graph.stage_runs import StageRuns

    group = context.find_root().command
    assert isinstance(group, click.Group)
    runs = StageRuns(read_pipeline(pipeline, group.commands))
    runs.check_folders()
    for stage, is_pending in runs.plan_stages():
        if is_pending:
            check_stage(f"{pipeline}: stage {stage.name}", stage)
    if dry_run:
        for stage, is_pending in runs.plan_stages():
            place = f"  # Slurm arrays of {stage.array_size}" if stage.array_size else ""
            click.echo(f"{runs.command_line(stage)}{place if is_pending else '  # unchanged'}")
        return
    runs.check_programs()
    with lock_folder(runs.pipeline.output, shared=False):
        states = dict[str, str]()
        try:
            code = _run_stages(runs, states)
        finally:
            _write_report(runs, states)
    if code:
        raise SystemExit(code)
    count = format_count(len(runs.pipeline.stages), "stage")
    click.echo(f"{runs.pipeline.output / 'report.html'}: {count}")


def _run_stages(runs: StageRuns, states: dict[str, str]) -> int:
    """Run the stages until one fails; return its exit code, 0 for none.

    Args:
        states: is filled with the state of each stage.
    """
    for stage in runs.pipeline.stages:
        if runs.is_current(stage):
            states[stage.name] = "unchanged"
            click.echo(f"{stage.name}: unchanged", err=True)
            continue
        states[stage.name] = "stopped"
        click.echo(f"{stage.name}: {runs.command_line(stage)}", err=True)
        code = runs.run(stage, click.echo)
        if code:
            states[stage.name] = f"failed, exit code {code}"
            if (record := runs.record(stage)) is not None and record.is_finished:
                states[stage.name] += "; the earlier output is there"
                click.echo(f"note: {stage.folder}: the earlier output is there", err=True)
            return code
        states[stage.name] = "finished"
    return 0


def _write_report(runs: StageRuns, states: dict[str, str]) -> None:
    import json

    from mega_data.output_folder import REPORT_PAGE
    from mega_data.readers.inputs import REPORT
    from mega_data.stage_graph.pipeline_page import render_pipeline
    from mega_data.task_stages import write_file

    stages = runs.report(states)
    output = runs.pipeline.output
    write_file(output / REPORT, json.dumps({"stages": stages}, indent=1, ensure_ascii=False))
    write_file(output / REPORT_PAGE, render_pipeline(f"Pipeline {runs.pipeline.path.name}", stages))
