"""Commands for word-level corpora: `wikitext103`, `wikitext2` and `ptb`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.data_files import choose_path, data_files
from mega_eval.commands.task_options import TaskOptions, task_options
from mega_eval.conventions import LM_EVAL, OVERLAPPING
from mega_schema.app.click_options import add_options

if TYPE_CHECKING:
    from mega_eval.models.interface import LanguageModel
    from mega_eval.task_result import TaskResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions:
    """The options of the corpora.

    Attributes:
        convention: `OVERLAPPING` or `LM_EVAL`.
        overlapping_eval: stride of the windows in tokens.
        seq_length: tokens of a window; None is the model's context.
        detokenizer: a key of `mega_eval.detokenize.DETOKENIZERS`.
    """

    convention: str
    overlapping_eval: int
    seq_length: int | None
    detokenizer: str


def _corpus_options(detokenizer: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a corpus; `detokenizer` is its default."""
    options = (
        data_files("Word-level file, such as wiki.test.tokens; also .gz and .zst."),
        click.option(
            "--convention",
            type=click.Choice([OVERLAPPING, LM_EVAL]),
            default=OVERLAPPING,
            show_default=True,
            help="overlapping: Megatron's windows over the whole file. lm-eval: page by page, as the task "
            "wikitext of lm-evaluation-harness.",
        ),
        click.option(
            "--overlapping-eval",
            type=click.IntRange(min=1),
            default=32,
            show_default=True,
            help="Stride of overlapping windows in tokens; a window scores this number of tokens at its end.",
        ),
        click.option(
            "--seq-length",
            type=click.IntRange(min=1),
            help="Tokens of a window.  [default: the model's context]",
        ),
        click.option(
            "--detokenizer",
            type=click.Choice(["wikitext", "ptb", "none"]),
            default=detokenizer,
            show_default=True,
            help="Rules that join the words to text.",
        ),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        return task_options(add_options(function, options))

    return decorate


@click.command()
@_corpus_options("wikitext")
def wikitext103(**keywords: Any) -> None:
    """Compute the perplexity of WikiText-103 per token, word and byte."""
    _run_command("wikitext103", **keywords)


@click.command()
@_corpus_options("wikitext")
def wikitext2(**keywords: Any) -> None:
    """Compute the perplexity of WikiText-2 per token, word and byte."""
    _run_command("wikitext2", **keywords)


@click.command()
@_corpus_options("ptb")
def ptb(**keywords: Any) -> None:
    """Compute the perplexity of the Penn Treebank per token, word and byte."""
    _run_command("ptb", **keywords)


def _run_command(
    task: str,
    *,
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    convention: str,
    overlapping_eval: int,
    seq_length: int | None,
    detokenizer: str,
    **keywords: Any,
) -> None:
    corpus = CorpusOptions(
        convention=convention,
        overlapping_eval=overlapping_eval,
        seq_length=seq_length,
        detokenizer=detokenizer,
    )
    run_corpus(task, choose_path(paths, data), corpus, TaskOptions(**keywords))


def run_corpus(task: str, path: Path, corpus: CorpusOptions, options: TaskOptions) -> TaskResult:
    """Evaluate a word-level file."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.documents import read_corpus
    from mega_eval.tasks import wikitext, wikitext_pages

    text = read_corpus(path)

    def evaluate(model: LanguageModel) -> TaskResult:
        seq_length = wikitext.check_seq_length(corpus.seq_length, model.context_length)
        if corpus.convention == LM_EVAL:
            return wikitext_pages.evaluate(
                model,
                model.tokenizer,
                text,
                task=task,
                detokenizer=corpus.detokenizer,
                seq_length=seq_length,
                limit=options.limit,
                where=path,
            )
        return wikitext.evaluate(
            model,
            model.tokenizer,
            text,
            task=task,
            detokenizer=corpus.detokenizer,
            stride=corpus.overlapping_eval,
            seq_length=seq_length,
            limit=options.limit,
            where=path,
        )

    is_overlapping = corpus.convention == OVERLAPPING
    return run_task(
        evaluate,
        task,
        f"{OVERLAPPING}{corpus.overlapping_eval}" if is_overlapping else LM_EVAL,
        [path],
        {
            "detokenizer": corpus.detokenizer,
            "overlapping_eval": corpus.overlapping_eval if is_overlapping else None,
            "seq_length": corpus.seq_length,
        },
        options,
    )
