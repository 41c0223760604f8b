"""The command `megatron11b`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mega_eval.commands.data_files import choose_path, data_files
from mega_eval.commands.task_options import TaskOptions, task_options
from mega_schema.app.click_options import NumberRange


def _print_renormalized(context: click.Context, parameter: click.Parameter, perplexity: float | None) -> None:
    """Print a perplexity per word from fairseq's, and exit."""
    if perplexity is None or context.resilient_parsing:
        return
    from mega_eval.tasks.megatron11b import PUBLISHED_TOKENS, PUBLISHED_WORDS, renormalize

    value = renormalize(perplexity, PUBLISHED_TOKENS, PUBLISHED_WORDS)
    counts = f"{PUBLISHED_TOKENS:,} tokens of {PUBLISHED_WORDS:,} words"
    click.echo(f"{perplexity:g} over {counts}: {value:.2f} per word")
    context.exit()


@click.command()
@task_options
@data_files("Word-level file, such as wiki.test.raw or wiki.test.tokens; also .gz and .zst.")
@click.option(
    "--context-window",
    type=click.IntRange(min=1),
    default=992,
    show_default=True,
    help="Tokens of context before each block; a block is the rest of the model's context.",
)
@click.option(
    "--renormalize",
    type=NumberRange(min=1),
    metavar="PPL",
    is_eager=True,
    expose_value=False,
    callback=_print_renormalized,
    help="Convert a perplexity of fairseq-eval-lm on WikiText-103's test set to one per word, and exit.",
)
def megatron11b(
    paths: tuple[Path, ...], data: tuple[Path, ...], context_window: int, **keywords: Any
) -> None:
    """Compute WikiText-103 perplexity as fairseq's README for megatron_11b does."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.documents import read_corpus
    from mega_eval.tasks.megatron11b import CONVENTION, evaluate, load_detokenizer

    options = TaskOptions(**keywords)
    path = choose_path(paths, data)
    text = read_corpus(path)
    detokenize = load_detokenizer()
    run_task(
        lambda model: evaluate(
            model,
            model.tokenizer,
            text,
            detokenize=detokenize,
            context_window=context_window,
            limit=options.limit,
            where=path,
        ),
        "megatron11b",
        f"{CONVENTION}{context_window}",
        [path],
        {"context_window": context_window},
        options,
    )
