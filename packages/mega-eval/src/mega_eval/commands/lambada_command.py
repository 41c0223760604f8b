"""The command `lambada`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.data_files import choose_path, data_files
from mega_eval.commands.task_options import TaskOptions, task_options
from mega_eval.conventions import LAMBADA, LAST_TOKEN, STRICT
from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_eval.task_result import TaskResult


@click.command()
@task_options
@data_files('Lines of {"text": "..."}, or a .txt file with a passage a line; also .gz and .zst.')
@click.option(
    "--convention",
    type=click.Choice(LAMBADA),
    help="Target: last-token and strict (the last word) are Megatron's; openai and standard are "
    "lm-evaluation-harness's lambada_openai and lambada_standard.  [default: last-token]",
)
@click.option(
    "--strict-lambada", is_flag=True, help="Predict the last word instead of the last token (strict)."
)
@click.option("--json-key", default="text", show_default=True, help="Key of the passage in JSON lines.")
def lambada(
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    convention: str | None,
    strict_lambada: bool,
    json_key: str,
    **keywords: Any,
) -> None:
    """Compute accuracy and perplexity on the last word, or the last token, of LAMBADA passages."""
    if strict_lambada and convention not in (None, STRICT):
        raise ConfigError(
            "--strict-lambada", "contradicts --convention", found=convention, hint="leave one of them out"
        )
    chosen = convention or (STRICT if strict_lambada else LAST_TOKEN)
    run_lambada(choose_path(paths, data), chosen, json_key, TaskOptions(**keywords))


def run_lambada(path: Path, convention: str, json_key: str, options: TaskOptions) -> TaskResult:
    """Evaluate a file of passages."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.documents import read_passages
    from mega_eval.tasks.lambada import evaluate

    lines = read_passages(path, json_key)
    examples = lines[: options.limit]
    return run_task(
        lambda model: replace(
            evaluate(model, model.tokenizer, examples, convention=convention),
            is_whole=len(examples) == len(lines),
        ),
        "lambada",
        convention,
        [path],
        {"convention": convention, "json_key": json_key},
        options,
    )
