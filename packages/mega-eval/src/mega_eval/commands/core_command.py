"""The command `core`: the aggregate of DCLM's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mega_eval.commands.data_files import choose_path, data_files
from mega_eval.commands.task_options import TaskOptions, task_options


@click.command()
@task_options
@data_files("Folder with core.yaml, eval_data/ and eval_meta_data.csv.", "FOLDER")
def core(paths: tuple[Path, ...], data: tuple[Path, ...], **keywords: Any) -> None:
    """CORE, the mean of the centered accuracies of DCLM's tasks, as nanochat computes it.

    --limit takes the first records of every task, after shuffling.
    """
    from mega_eval.commands.evaluate import run_task
    from mega_eval.presets.core_bundle import BASELINES, CONFIG, read_core_tasks
    from mega_eval.records import list_record_files, read_records
    from mega_eval.tasks.core import evaluate

    options = TaskOptions(**keywords)
    folder = choose_path(paths, data)
    tasks = [(task, read_records(list_record_files(task.path))) for task in read_core_tasks(folder)]
    files = [folder / CONFIG, folder / BASELINES, *sorted({task.path for task, _ in tasks})]
    run_task(
        lambda model: evaluate(model, tasks, limit=options.limit),
        "core",
        "nanochat",
        files,
        {"num_fewshot": {task.label: task.num_fewshot for task, _ in tasks}},
        options,
    )
