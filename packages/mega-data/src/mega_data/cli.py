"""`mega-data`: the commands. Each opens what its flags name, calls one function and prints the outcome."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data import __version__
from mega_data.commands.common import ANY_PATH, EXISTING, WORKERS, Spreading, progress_bar
from mega_data.commands.dedup import dedup
from mega_data.commands.convert import convert
from mega_data.commands.merge import merge
from mega_data.commands.preprocess import preprocess
from mega_schema.command import run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="mega-data")
def commands() -> None:
    """Raw text to a binarized corpus."""


def main() -> None:
    """What the program `mega-data` runs."""
    run(commands)


@commands.command()
@click.option("--output", type=ANY_PATH, required=True, help="JSON lines of training text to write.")
@click.option("--held-out", type=ANY_PATH, help="JSON lines of text to keep apart, for evaluation.")
@click.option("--megabytes", type=click.FloatRange(min=0, min_open=True), default=10.0, help="Training text.")
@click.option("--held-out-share", type=float, default=0.02, help="Share of modules kept apart.")
@click.option("--workers", type=WORKERS, help="Processes that read.  [default: one per core, at most 8]")
def sample(
    output: Path, held_out: Path | None, megabytes: float, held_out_share: float, workers: int | None
) -> None:
    """Write a corpus of real text that every Python carries: its own and its packages' documentation."""
    import os

    from mega_data.sample import collect, write

    size = int(megabytes * 1e6)
    with progress_bar("reading", size) as progress:
        found = collect(
            size,
            held_out_share=held_out_share if held_out else 0.0,
            workers=workers or min(8, os.cpu_count() or 1),
            progress=progress,
        )
    write(output, found.train)
    click.echo(f"{output}: {len(found.train):,} documents, {found.train_bytes / 1e6:.2f} MB")
    if held_out:
        write(held_out, found.held_out)
        click.echo(f"{held_out}: {len(found.held_out):,} documents, {found.held_out_bytes / 1e6:.2f} MB")
    if found.train_bytes < size:
        click.echo(f"note: {megabytes:g} MB were asked for; this Python has no more text", err=True)


@commands.command("train-tokenizer", cls=Spreading)
@click.option(
    "--input", "inputs", type=EXISTING, multiple=True, required=True, help="JSON lines, one file or several."
)
@click.option("--vocab-size", type=int, default=4096, help="Ids, <|endoftext|> and the 256 bytes included.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write."
)
@click.option("--json-key", default="text", help="Key of the text.")
def train_tokenizer(inputs: tuple[Path, ...], vocab_size: int, output: Path, json_key: str) -> None:
    """Train a byte-level BPE tokenizer on the text of JSON lines."""
    from mega_data.jsonl import texts
    from mega_data.vocabulary import train

    tokenizer = train(texts(inputs, json_key), vocab_size)
    tokenizer.save(output)
    found = tokenizer.identity.vocab_size
    click.echo(
        f"{output}: {found:,} ids, eod {tokenizer.identity.eod}, sha256 {tokenizer.identity.sha256[:12]}"
    )
    if found < vocab_size:
        click.echo(f"note: {vocab_size:,} were asked for; the text has no more pairs to merge", err=True)


@commands.command()
@click.argument("prefix", type=ANY_PATH)
@click.option("--documents", type=click.IntRange(min=0), default=3, help="First documents to show.")
@click.option("--characters", type=click.IntRange(min=1), default=200, help="Of each, at most.")
@click.option("--multimodal", is_flag=True, help="The index has a mode per sequence.")
def inspect(prefix: Path, documents: int, characters: int, multimodal: bool) -> None:
    """Print what is in the indexed dataset PREFIX (the path without .idx)."""
    from mega_data.inspect import PERCENTILES, contents, document_text, opened_tokenizer
    from mega_schema.indexed import IndexedDataset

    data = IndexedDataset(prefix, multimodal=multimodal)
    found, tokenizer = contents(data), opened_tokenizer(data)
    click.echo(
        f"{found.documents:,} documents ({found.empty_documents:,} empty)  {found.sequences:,} sequences  "
        f"{found.tokens:,} tokens  {found.dtype}  {found.size:,} bytes"
    )
    if found.lengths:
        shares = "  ".join(f"{p}%: {n:,}" for p, n in zip(PERCENTILES, found.lengths, strict=True))
        click.echo(f"tokens of a sequence  {shares}")
    if data.info:
        identity = data.info.tokenizer
        click.echo(f"tokenizer {identity.type}  {identity.vocab_size:,} ids  eod {identity.eod}")
        click.echo(f"from {', '.join(data.info.sources)}")
    for document in range(min(documents, found.documents)):
        click.echo(f"document {document}  {document_text(data, document, tokenizer, characters)}")


@commands.command()
@click.argument("prefix", type=ANY_PATH)
@click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Ids must be below it.  [default: PREFIX.json's]"
)
@click.option("--multimodal", is_flag=True, help="The index has a mode per sequence.")
def verify(prefix: Path, vocab_size: int | None, multimodal: bool) -> None:
    """Look at every index entry and token of the indexed dataset PREFIX; exit code 2 with the first fault."""
    from mega_data.inspect import verify as look
    from mega_schema.indexed import IndexedDataset

    data = IndexedDataset(prefix, multimodal=multimodal)
    compared = look(data, vocab_size)
    ids = f"ids below {compared:,}" if compared else "ids not compared (no PREFIX.json, no --vocab-size)"
    click.echo(f"{prefix}: {len(data):,} sequences whole, {ids}")


commands.add_command(preprocess)
commands.add_command(dedup)
commands.add_command(merge)
commands.add_command(convert)
