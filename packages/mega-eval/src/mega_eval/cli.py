"""The command line of mega-eval: reads arguments, prints the table, writes the result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mega_eval import __version__
from mega_schema import command
from mega_schema.output_option import OUTPUT_FILE

if TYPE_CHECKING:
    from mega_eval.documents import Encoder
    from mega_eval.result import Outcome
    from mega_eval.scorer import Scorer

PATH = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-eval")
def cli() -> None:
    """Score a language model. Every command prints a table and writes a JSON result."""


def shared(task: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that every task has."""
    options = (
        click.option("--load", required=True, type=PATH, help="Folder of a run, or of one checkpoint of it."),
        click.option(
            "--output",
            type=OUTPUT_FILE,
            default=Path(f"{task}.json"),
            show_default=True,
            help="The result file; one that is there is replaced.",
        ),
        click.option(
            "--micro-batch-size",
            type=click.IntRange(min=1),
            default=16,
            show_default=True,
            help="Windows read together; less needs less memory and gives the same result.",
        ),
        click.option("--device", help="Where to compute: cpu, cuda, cuda:1. Default: a GPU if there is one."),
    )

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


@cli.command()
@shared("lambada")
@click.option("--data", required=True, type=PATH, help='Lines of {"text": "..."}, as lambada_test.jsonl.')
@click.option("--strict-lambada", is_flag=True, help="The target is the last word, not the last token.")
def lambada(data: Path, strict_lambada: bool, **given: Any) -> None:
    """Accuracy on the last word, or the last token, of LAMBADA passages."""
    from mega_eval.documents import json_lines
    from mega_eval.tasks.lambada import evaluate

    lines = [(f"{data}:{number}", text) for number, text in json_lines(data, "text")]
    _run(
        lambda scorer, encoder: evaluate(scorer, encoder, lines, strict=strict_lambada),
        [data],
        {"strict_lambada": strict_lambada},
        **given,
    )


@cli.command()
@shared("wikitext103")
@click.option("--data", required=True, type=PATH, help="The tokenised file, as wiki.test.tokens.")
@click.option(
    "--overlapping-eval",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Tokens from one window to the next; every window scores its last so many.",
)
@click.option(
    "--seq-length", type=click.IntRange(min=1), help="Tokens of a window. Default: the model's context."
)
@click.option(
    "--detokenizer",
    type=click.Choice(["wikitext", "ptb", "none"]),
    help="How words become text. Default: what the path says (ptb, wiki or lambada in it).",
)
def wikitext103(
    data: Path, overlapping_eval: int, seq_length: int | None, detokenizer: str | None, **given: Any
) -> None:
    """Perplexity and word-adjusted perplexity of WikiText-103, or of Penn Treebank."""
    from mega_eval.detokenize import choose
    from mega_eval.documents import text_file
    from mega_eval.tasks.wikitext import evaluate

    chosen, text = choose(data, detokenizer), text_file(data)
    _run(
        lambda scorer, encoder: evaluate(
            scorer, encoder, text, detokenizer=chosen, stride=overlapping_eval, length=seq_length, where=data
        ),
        [data],
        {"detokenizer": chosen, "overlapping_eval": overlapping_eval, "seq_length": seq_length},
        **given,
    )


@cli.command()
@shared("perplexity")
@click.option(
    "--data", required=True, type=PATH, help="Held-out JSON lines, or the prefix of an indexed dataset."
)
@click.option("--json-key", default="text", show_default=True, help="The key of the text in JSON lines.")
@click.option(
    "--baseline-data", type=PATH, help="Prefix of the training dataset, to compare with counted models."
)
def perplexity(data: Path, json_key: str, baseline_data: Path | None, **given: Any) -> None:
    """Perplexity, bits per byte and last-word accuracy on documents of your own."""
    from mega_eval.documents import dataset_files, dataset_stream, documents_of, files_of
    from mega_eval.tasks.perplexity import evaluate

    def task(scorer: Scorer, encoder: Encoder) -> Outcome:
        baseline = None if baseline_data is None else dataset_stream(baseline_data, encoder.identity)
        documents = documents_of(data, json_key, encoder)
        return evaluate(scorer, encoder, documents, baseline=baseline, where=data)

    files = files_of(data) + (dataset_files(baseline_data) if baseline_data else [])
    _run(task, files, {"json_key": json_key}, **given)


def _run(
    task: Callable[[Scorer, Encoder], Outcome],
    files: list[Path],
    options: dict[str, object],
    *,
    load: Path,
    output: Path,
    micro_batch_size: int,
    device: str | None,
) -> None:
    """Open the checkpoint, do the task, print the table, write the result."""
    import platform
    import time

    import torch

    from mega_eval import result, scorer

    result.check_writable(output, [*files, load])
    data = result.fingerprints(files)
    checkpoint, decoder, tokenizer = scorer.open_checkpoint(load, device=device)
    model = scorer.Model(decoder, where=checkpoint.folder, rows=micro_batch_size, report=_progress)
    began = time.perf_counter()
    outcome = task(model, tokenizer)
    seconds = time.perf_counter() - began
    provenance = result.Provenance(
        checkpoint.folder,
        checkpoint.iteration,
        data,
        options | {"micro_batch_size": micro_batch_size},
        {"mega-eval": __version__, "torch": torch.__version__, "python": platform.python_version()},
        str(next(decoder.parameters()).device),
    )
    values = result.record(outcome, provenance, seconds)
    result.write(output, values)
    click.echo(f"{outcome.task}  {checkpoint.folder}  iteration {checkpoint.iteration}")
    click.echo(result.table(values))
    click.echo(f"written to {output}")


def _progress(done: int, total: int) -> None:
    """One line on a terminal that counts up and goes away; nothing in a log."""
    if sys.stderr.isatty():
        click.echo(f"\r{done:,} of {total:,} windows" if done < total else "\r\033[K", err=True, nl=False)


def main() -> NoReturn:
    """The program `mega-eval`."""
    command.run(cli)
