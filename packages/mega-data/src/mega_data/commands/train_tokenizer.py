"""`mega-data train-tokenizer`: train a vocabulary on text."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import RepeatableOptionCommand, adapter_option, open_adapter, warn_replaced
from mega_data.commands.preprocess import INPUT_HELP
from mega_schema.app.output_option import OUTPUT_FOLDER


@click.command("train-tokenizer", cls=RepeatableOptionCommand)
@click.option("--input", "words", multiple=True, required=True, help=INPUT_HELP)
@click.option(
    "--type", "kind", type=click.Choice(["bpe", "wordpiece", "unigram"]), default="bpe", help="Model."
)
@click.option("--vocab-size", type=int, default=4096, help="Ids, including special tokens and bytes.")
@click.option(
    "--output",
    type=OUTPUT_FOLDER,
    required=True,
    help="Folder for the tokenizer: new, empty, or with a tokenizer.",
)
@click.option("--json-key", default="text", help="Key of the text; meta.text: text in the object meta.")
@click.option("--max-documents", type=click.IntRange(min=1), help="Documents to train on.  [default: all]")
@adapter_option
@click.option("--lowercase", is_flag=True, help="Fold case and accents, as BERT uncased; wordpiece only.")
def train_tokenizer(
    words: tuple[str, ...],
    kind: str,
    vocab_size: int,
    output: Path,
    json_key: str,
    max_documents: int | None,
    adapter: str | None,
    lowercase: bool,
) -> None:
    """Train a tokenizer on text: GPT-2's byte-level BPE, BERT's WordPiece, or a unigram.

    The folder has tokenizer.json and the files for Megatron's flags: vocab.json and merges.txt, vocab.txt, or
    tokenizer.model.
    """
    from mega_data.interruptible import run_interruptible
    from mega_data.readers.inputs import expand_inputs
    from mega_data.texts import read_texts
    from mega_data.train_tokenizer import describe, save, train
    from mega_schema.outputs import check_output, is_tokenizer

    inputs = expand_inputs(words, adapter=open_adapter(adapter))
    files = [item.path for item in inputs if not item.is_stdin]
    check_output("--output", output, "folder", inputs=files, is_ours=is_tokenizer)
    if output.is_dir() and any(output.iterdir()):
        warn_replaced(output, "tokenizer")
    tokenizer = run_interruptible(
        lambda: train(read_texts(inputs, json_key, max_documents), vocab_size, kind=kind, lowercase=lowercase)
    )
    save(tokenizer, output)
    click.echo(f"{output}: {describe(tokenizer)}")
    if tokenizer.identity.vocab_size < vocab_size:
        click.echo(f"note: {vocab_size:,} were requested; the text has no more pairs to merge", err=True)
