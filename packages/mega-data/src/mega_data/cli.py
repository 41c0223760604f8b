"""The command line of mega-data: each command parses options, calls one function and prints the result."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mega_data import __version__
from mega_data.commands.clean import clean
from mega_data.commands.common import ANY_PATH, WORKERS
from mega_data.commands.convert import convert
from mega_data.commands.corpus_stats import stats
from mega_data.commands.dedup import dedup
from mega_data.commands.extract import extract
from mega_data.commands.inspect import inspect, verify
from mega_data.commands.merge import merge
from mega_data.commands.mix import mix
from mega_data.commands.preprocess import preprocess
from mega_data.commands.preprocess_chat import preprocess_chat
from mega_data.commands.run_pipeline import run_pipeline
from mega_data.commands.train_ngram import train_ngram
from mega_data.commands.train_tokenizer import train_tokenizer
from mega_schema.app.cli_runner import raise_at_sigterm, run_command
from mega_schema.app.click_options import NumberRange
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.app.progress import progress_bar


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="mega-data")
@click.option("--result-file", type=ANY_PATH, hidden=True, help="File for the counts, of `mega-data run`.")
@click.pass_context
def commands(context: click.Context, result_file: Path | None) -> None:
    """Build training datasets from raw text."""
    context.obj = result_file  # see commands.result_file


def main() -> None:
    """Run the program `mega-data`."""
    # No command multiplies large matrices. The threads that OpenBLAS starts when numpy is imported poll for
    # work at first, which takes as much CPU time as the import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    raise_at_sigterm("run the same command again to resume")
    run_command(commands)


@commands.command()
@click.option("--output", type=OUTPUT_FILE, required=True, help="File for the training text, JSON lines.")
@click.option("--held-out", type=OUTPUT_FILE, help="File for held-out text, JSON lines, for evaluation.")
@click.option(
    "--megabytes",
    type=NumberRange(min=0, min_open=True),
    default=10.0,
    help="Megabytes of training text.",
)
@click.option(
    "--held-out-fraction", type=float, default=0.02, help="Fraction of modules to hold out, 0 to 1."
)
@click.option("--workers", type=WORKERS, help="Reader processes.  [default: one per core, at most 8]")
def sample(
    output: Path, held_out: Path | None, megabytes: float, held_out_fraction: float, workers: int | None
) -> None:
    """Write a corpus of the documentation of Python and its installed packages."""
    from mega_data.python_docs_corpus import check_outputs, collect, write_documents

    check_outputs(output, held_out)
    size = int(megabytes * 1e6)
    with progress_bar("reading", size) as progress:
        corpus = collect(
            size,
            held_out_fraction=held_out_fraction if held_out else 0.0,
            workers=workers or min(8, os.cpu_count() or 1),
            progress=progress,
        )
    write_documents(output, corpus.train)
    documents = format_count(len(corpus.train), "document")
    click.echo(f"{output}: {documents}, {corpus.train_bytes / 1e6:.2f} MB")
    if held_out:
        write_documents(held_out, corpus.held_out)
        documents = format_count(len(corpus.held_out), "document")
        click.echo(f"{held_out}: {documents}, {corpus.held_out_bytes / 1e6:.2f} MB")
    if corpus.train_bytes < size:
        click.echo(f"note: {megabytes:g} MB were requested; this Python has no more text", err=True)


commands.add_command(preprocess)
commands.add_command(preprocess_chat)
commands.add_command(dedup)
commands.add_command(merge)
commands.add_command(mix)
commands.add_command(convert)
commands.add_command(inspect)
commands.add_command(stats)
commands.add_command(verify)
commands.add_command(train_ngram)
commands.add_command(train_tokenizer)
commands.add_command(clean)
commands.add_command(extract)
commands.add_command(run_pipeline)
