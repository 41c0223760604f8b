"""`mega-data preprocess`: text to indexed datasets."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import ANY_PATH, EXISTING, WORKERS, Spreading, progress_bar


@click.command(cls=Spreading)
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
    with progress_bar("encoding", sum(path.stat().st_size for path in inputs)) as progress:
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
