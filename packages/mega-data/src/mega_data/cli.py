"""`mega-data`: the commands. Each opens what its flags name, calls one function and prints the outcome."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from mega_data import __version__
from mega_schema.command import run

EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
ANY_PATH = click.Path(path_type=Path)
WORKERS = click.IntRange(min=1)


class Spreading(click.Command):
    """A command whose repeatable options also take several words, as Megatron's: `--input a b` and so on.

    It has no arguments of its own, so a word after an option can only be meant for that option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = [o for o in self.params if isinstance(o, click.Option) and o.multiple]
        repeatable = {name for option in several for name in option.opts}
        spread, option, values = list[str](), "", 0
        for word in args:
            if word.startswith("-"):
                option, values = word, 0
            elif option in repeatable:
                values += 1
                if values > 1:
                    spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


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
    with _progress("reading", size) as progress:
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


@commands.command(cls=Spreading)
@click.option(
    "--input", "inputs", type=EXISTING, multiple=True, required=True, help="JSON lines, one file or several."
)
@click.option("--output-prefix", type=ANY_PATH, required=True, help="_KEY_document.bin and so on are added.")
@click.option(
    "--tokenizer-type", required=True, help="HuggingFaceTokenizer, GPT2BPETokenizer or NullTokenizer."
)
@click.option("--tokenizer-model", type=ANY_PATH, help="tokenizer.json, or a folder that holds one.")
@click.option("--vocab-file", type=ANY_PATH, help="vocab.json of a GPT2BPETokenizer.")
@click.option("--merge-file", type=ANY_PATH, help="merges.txt of a GPT2BPETokenizer.")
@click.option("--vocab-size", type=int, help="Ids of a NullTokenizer, without its eod.")
@click.option("--json-keys", multiple=True, default=("text",), help="Keys of texts, a dataset each.")
@click.option("--append-eod", is_flag=True, help="End each document with the tokenizer's eod.")
@click.option("--workers", type=WORKERS, default=1, help="Processes that encode.")
def preprocess(
    inputs: tuple[Path, ...],
    output_prefix: Path,
    tokenizer_type: str,
    tokenizer_model: Path | None,
    vocab_file: Path | None,
    merge_file: Path | None,
    vocab_size: int | None,
    json_keys: tuple[str, ...],
    append_eod: bool,
    workers: int,
) -> None:
    """Encode JSON lines to indexed datasets in Megatron's format."""
    from mega_data.preprocess import preprocess as encode
    from mega_schema.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(
        tokenizer_type,
        vocab_file=vocab_file,
        merge_file=merge_file,
        model=tokenizer_model,
        vocab_size=vocab_size,
    )
    with _progress("encoding", sum(path.stat().st_size for path in inputs)) as progress:
        done = encode(
            inputs,
            output_prefix,
            tokenizer,
            keys=json_keys,
            append_eod=append_eod,
            workers=workers,
            progress=progress,
        )
    rate = done.size / 1e6 / max(done.seconds, 1e-9)
    click.echo(
        f"{' '.join(map(str, done.prefixes))}: {done.documents:,} documents, {done.tokens:,} tokens, "
        f"{done.size:,} bytes, {rate:.1f} MB/s"
    )


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


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar of bytes on stderr, where a person looks at it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda size: bars.advance(task, size)
