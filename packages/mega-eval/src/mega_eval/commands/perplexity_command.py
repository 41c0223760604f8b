"""The command `perplexity`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.data_files import choose_paths, data_files
from mega_eval.commands.task_options import PATH, TaskOptions, task_options

if TYPE_CHECKING:
    from mega_eval.models.interface import LanguageModel
    from mega_eval.task_result import TaskResult


@click.command()
@task_options
@data_files(
    "A text file (one document), JSON lines (.jsonl, a document a line), also .gz and .zst, or the prefix of "
    "an indexed dataset. May be repeated."
)
@click.option("--json-key", default="text", show_default=True, help="Key of the text in JSON lines.")
@click.option(
    "--baseline-data",
    type=PATH,
    help="Prefix of the training dataset; adds n-gram baselines.",
)
def perplexity(
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    json_key: str,
    baseline_data: Path | None,
    **keywords: Any,
) -> None:
    """Compute perplexity, bits per byte and last-word accuracy on your own documents."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.documents import list_data_files, list_dataset_files, read_documents, read_token_stream
    from mega_eval.tasks.perplexity import evaluate

    options = TaskOptions(**keywords)
    sources = choose_paths(paths, data)

    def run(model: LanguageModel) -> TaskResult:
        baseline = (
            None if baseline_data is None else read_token_stream(baseline_data, model.tokenizer.identity)
        )
        documents = read_documents(sources, json_key, model.tokenizer)
        evaluated = documents.first(options.limit)
        where = ", ".join(map(str, sources))
        task_result = evaluate(model, model.tokenizer, evaluated, baseline=baseline, where=where)
        return replace(task_result, is_whole=len(evaluated.texts) == len(documents.texts))

    files = [file for source in sources for file in list_data_files(source)]
    files += list_dataset_files(baseline_data) if baseline_data else []
    run_task(
        run,
        "perplexity",
        "half-overlap",
        files,
        {"json_key": json_key},
        options,
    )
