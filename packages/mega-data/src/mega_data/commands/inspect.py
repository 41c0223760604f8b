"""`mega-data inspect` and `mega-data verify`: summarize a dataset, and check all of it."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import ANY_PATH
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FILE


@click.command()
@click.argument("prefix", type=ANY_PATH)
@click.option("--documents", type=click.IntRange(min=0), default=3, help="Number of documents to show.")
@click.option(
    "--characters", type=click.IntRange(min=1), default=200, help="Characters to show of each document."
)
@click.option("--plot", type=OUTPUT_FILE, help="PNG file for a plot of document lengths.")
@click.option("--multimodal", is_flag=True, help="The index has a mode per sequence.")
def inspect(prefix: Path, documents: int, characters: int, plot: Path | None, multimodal: bool) -> None:
    """Summarize the indexed dataset PREFIX (the path without .idx)."""
    from mega_data.inspect import PERCENTILES, document_text, open_dataset_tokenizer, summarize
    from mega_data.length_histogram import format_histogram, histogram, plot_lengths
    from mega_schema.dataset.indexed_dataset import open_dataset
    from mega_schema.outputs import check_output, dataset_files, is_image

    data = open_dataset(prefix, multimodal=multimodal)
    if plot is not None:
        check_output("--plot", plot, "file", inputs=dataset_files(prefix), is_ours=is_image)
    summary = summarize(data)
    tokenizer = open_dataset_tokenizer(data)
    click.echo(
        f"{format_count(summary.documents, 'document')} ({summary.empty_documents:,} empty)  "
        f"{format_count(summary.sequences, 'sequence')}  "
        f"{format_count(summary.tokens, 'token')}  {summary.dtype}  "
        f"{format_count(summary.size, 'byte')}  {data.index_format}"
    )
    if summary.lengths:
        shares = "  ".join(f"{p}%: {n:,}" for p, n in zip(PERCENTILES, summary.lengths, strict=True))
        click.echo(f"tokens of a sequence  {shares}")
    for number, line in enumerate(format_histogram(histogram(data))):
        click.echo(f"{'' if number else 'tokens of a document':20}  {line}")
    if data.info:
        identity = data.info.tokenizer
        click.echo(f"tokenizer {identity.type}  {identity.vocab_size:,} ids  eod {identity.eod}")
        click.echo(f"from {', '.join(data.info.sources)}")
    for document in range(min(documents, summary.documents)):
        click.echo(f"document {document}  {document_text(data, document, tokenizer, characters)}")
    if plot is not None:
        plot_lengths(data, plot)
        click.echo(f"{plot}: the documents' lengths")


@click.command()
@click.argument("prefix", type=ANY_PATH)
@click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Upper bound of the ids.  [default: from PREFIX.json]"
)
@click.option("--multimodal", is_flag=True, help="The index has a mode per sequence.")
def verify(prefix: Path, vocab_size: int | None, multimodal: bool) -> None:
    """Check every index entry and token of the indexed dataset PREFIX; exit with 2 at the first error."""
    from mega_data.inspect import verify_dataset as look
    from mega_schema.dataset.indexed_dataset import open_dataset

    data = open_dataset(prefix, multimodal=multimodal)
    compared = look(data, vocab_size)
    ids = f"ids below {compared:,}" if compared else "ids not compared (no PREFIX.json, no --vocab-size)"
    click.echo(f"{prefix}: {format_count(len(data), 'sequence')} whole, {ids}")
