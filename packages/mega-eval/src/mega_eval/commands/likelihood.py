"""Commands of the tasks that score a text: `lambada`, `wikitext103` and `perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.task_options import PATH, TaskOptions, task_options

if TYPE_CHECKING:
    from mega_eval.models.interface import LanguageModel
    from mega_eval.task_result import TaskResult


@click.command()
@task_options
@click.option("--data", required=True, type=PATH, help='Lines of {"text": "..."}, as lambada_test.jsonl.')
@click.option("--strict-lambada", is_flag=True, help="Predict the last word instead of the last token.")
def lambada(data: Path, strict_lambada: bool, **keywords: Any) -> None:
    """Compute the accuracy on the last word, or the last token, of LAMBADA passages."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.documents import read_json_lines
    from mega_eval.tasks.lambada import convention_name, evaluate

    options = TaskOptions(**keywords)
    lines = [(f"{data}:{number}", text) for number, text in read_json_lines(data, "text")]
    examples = lines[: options.limit]
    run_task(
        lambda model: evaluate(model, model.tokenizer, examples, strict=strict_lambada),
        "lambada",
        convention_name(strict_lambada),
        [data],
        {"strict_lambada": strict_lambada},
        options,
        is_whole=len(examples) == len(lines),
    )


@click.command()
@task_options
@click.option("--data", required=True, type=PATH, help="Tokenized file, as wiki.test.tokens.")
@click.option(
    "--overlapping-eval",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Stride of the windows in tokens; a window scores this number of tokens at its end.",
)
@click.option(
    "--seq-length", type=click.IntRange(min=1), help="Tokens of a window. Default: the model's context."
)
@click.option(
    "--detokenizer",
    type=click.Choice(["wikitext", "ptb", "none"]),
    help="Rules that join the words to text. Default: by the word ptb, wiki or lambada in the path.",
)
def wikitext103(
    data: Path, overlapping_eval: int, seq_length: int | None, detokenizer: str | None, **keywords: Any
) -> None:
    """Compute the perplexity and word-adjusted perplexity of WikiText-103, or of Penn Treebank."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.detokenize import choose_detokenizer
    from mega_eval.documents import read_text
    from mega_eval.tasks.wikitext import evaluate

    options = TaskOptions(**keywords)
    detokenizer = choose_detokenizer(data, detokenizer)
    text = read_text(data)
    run_task(
        lambda model: evaluate(
            model,
            model.tokenizer,
            text,
            detokenizer=detokenizer,
            stride=overlapping_eval,
            seq_length=seq_length,
            limit=options.limit,
            where=data,
        ),
        "wikitext103",
        f"overlapping{overlapping_eval}",
        [data],
        {"detokenizer": detokenizer, "overlapping_eval": overlapping_eval, "seq_length": seq_length},
        options,
        is_whole=options.limit is None,
    )


@click.command()
@task_options
@click.option("--data", required=True, type=PATH, help="JSON lines, or prefix of an indexed dataset.")
@click.option("--json-key", default="text", show_default=True, help="Key of the text in JSON lines.")
@click.option(
    "--baseline-data",
    type=PATH,
    help="Prefix of the training dataset; adds n-gram baselines.",
)
def perplexity(data: Path, json_key: str, baseline_data: Path | None, **keywords: Any) -> None:
    """Compute perplexity, bits per byte and last-word accuracy on your own documents."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.documents import list_data_files, list_dataset_files, read_documents, read_token_stream
    from mega_eval.tasks.perplexity import evaluate

    options = TaskOptions(**keywords)

    def run(model: LanguageModel) -> TaskResult:
        baseline = (
            None if baseline_data is None else read_token_stream(baseline_data, model.tokenizer.identity)
        )
        documents = read_documents(data, json_key, model.tokenizer).first(options.limit)
        return evaluate(model, model.tokenizer, documents, baseline=baseline, where=data)

    files = list_data_files(data) + (list_dataset_files(baseline_data) if baseline_data else [])
    run_task(
        run,
        "perplexity",
        "half-overlap",
        files,
        {"json_key": json_key},
        options,
        is_whole=options.limit is None,
    )
