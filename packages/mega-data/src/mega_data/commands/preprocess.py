"""`mega-data preprocess`: encode text to indexed datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    ANY_PATH,
    WORKERS,
    RepeatableOptionCommand,
    error_limit,
    exit_if_nothing_left,
    max_errors_option,
    warn_replaced,
    warn_skipped,
)
from mega_data.commands.upload import uploads_dataset
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_PREFIX_OR_URL
from mega_schema.app.progress import progress_bar

if TYPE_CHECKING:
    from mega_data.preprocess import PreprocessResult

INPUT_HELP = (
    "JSON lines, .csv, .tsv, .parquet or .txt, also .gz .zst .xz .bz2 .lz4: files, globs, folders, URLs, "
    "saved datasets, hf:NAME[:split=...,config=...,revision=...] for a dataset by name, or - for stdin."
)

_WORKER_MODULES = ("mega_data.encode_worker", "mega_data.encoders")  # for the workers
_BYTE_PAIR_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "PretrainedFromHF", "TikTokenizer")


def _modules_to_import(tokenizer_type: str) -> tuple[str, ...]:
    """Return the modules that the seed process imports while the tokenizer opens."""
    return (
        (*_WORKER_MODULES, "gigatoken.gigatoken_rs")
        if tokenizer_type in _BYTE_PAIR_TYPES
        else _WORKER_MODULES
    )


@click.command(cls=RepeatableOptionCommand)
@click.option("--input", "words", multiple=True, required=True, help=INPUT_HELP)
@click.option(
    "--input-format",
    type=click.Choice(["jsonl", "text", "table", "csv"]),
    help="Format of the inputs.  [default: by extension]",
)
@click.option(
    "--text-unit",
    type=click.Choice(["file", "paragraph", "line"]),
    default="file",
    help="Unit of a document of plain text.",
)
@click.option(
    "--output-prefix",
    type=OUTPUT_PREFIX_OR_URL,
    required=True,
    help="Output prefix, or s3:// URL; _KEY_document.bin and so on are appended.",
)
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for the files until they are uploaded, if --output-prefix is a URL.",
)
@click.option(
    "--tokenizer-type", required=True, help="Megatron's name of the tokenizer, such as GPT2BPETokenizer."
)
@click.option(
    "--tokenizer-model",
    "--tokenizer-name-or-path",
    type=ANY_PATH,
    help="tokenizer.json or its folder, a SentencePiece model, or a tiktoken vocabulary.",
)
@click.option(
    "--vocab-file", type=ANY_PATH, help="vocab.json of a GPT2BPETokenizer, vocab.txt of a BERT one."
)
@click.option("--merge-file", type=ANY_PATH, help="merges.txt of a GPT2BPETokenizer.")
@click.option(
    "--vocab-size", type=int, help="Ids of a NullTokenizer without its eod, or all ids of a TikTokenizer."
)
@click.option(
    "--vocab-extra-ids",
    type=click.IntRange(min=0),
    default=0,
    help="Number of sentinel tokens to add, for T5.",
)
@click.option("--tiktoken-pattern", help="Pattern of a TikTokenizer: v1 or v2.")
@click.option(
    "--tiktoken-num-special-tokens", type=int, default=1000, help="Special tokens of a TikTokenizer."
)
@click.option(
    "--tiktoken-special-tokens",
    multiple=True,
    default=("<unk>", "<s>", "</s>"),
    help="Names of the first special tokens.",
)
@click.option(
    "--tokenizer-hf-include-special-tokens/--tokenizer-hf-no-include-special-tokens",
    "special_tokens",
    default=True,
    help="Add the tokens of a HuggingFaceTokenizer's post-processor, such as BOS, to each sequence.",
)
@click.option(
    "--parse-special-tokens/--no-parse-special-tokens",
    default=False,
    help="Encode special tokens in a text, such as <|endoftext|>, as their ids.",
)
@click.option(
    "--json-keys",
    "--json-key",
    "keys",
    multiple=True,
    default=("text",),
    help="Keys of texts, a dataset each; meta.text: text in the object meta.",
)
@click.option("--append-eod", is_flag=True, help="Append the tokenizer's eod to each document.")
@click.option("--split-sentences", is_flag=True, help="Make each sentence a sequence, for BERT and T5.")
@click.option("--lang", default="english", help="Language of the sentences.")
@click.option("--keep-newlines", is_flag=True, help="Keep the white space after each sentence.")
@click.option(
    "--on-error", type=click.Choice(["fail", "skip"]), default="fail", help="What to do with a wrong row."
)
@max_errors_option("wrong rows")
@click.option(
    "--dataset-impl", type=click.Choice(["mmap", "cached", "lazy"]), default="mmap", help="Index format."
)
@click.option("--workers", type=WORKERS, default=1, help="Encoder processes.")
@click.option("--partitions", type=WORKERS, default=1, help="Accepted and ignored.")
@click.option(
    "--keep-sequential-samples", is_flag=True, help="Accepted and ignored; samples are always sequential."
)
@click.option(
    "--log-interval",
    type=click.IntRange(min=1),
    default=1000,
    help="Accepted and ignored; progress is on stderr.",
)
@click.option(
    "--make-vocab-size-divisible-by", type=WORKERS, help="Accepted and ignored; padding does not change ids."
)
@click.option("--pad-vocab-size-to", type=WORKERS, help="Accepted and ignored.")
@uploads_dataset
def preprocess(
    words: tuple[str, ...],
    input_format: str | None,
    text_unit: str,
    output_prefix: Path,
    tokenizer_type: str,
    tokenizer_model: Path | None,
    vocab_file: Path | None,
    merge_file: Path | None,
    vocab_size: int | None,
    vocab_extra_ids: int,
    tiktoken_pattern: str | None,
    tiktoken_num_special_tokens: int,
    tiktoken_special_tokens: tuple[str, ...],
    special_tokens: bool,
    parse_special_tokens: bool,
    keys: tuple[str, ...],
    append_eod: bool,
    split_sentences: bool,
    lang: str,
    keep_newlines: bool,
    on_error: str,
    max_errors: str | None,
    dataset_impl: str,
    workers: int,
    **accepted: object,  # Megatron's flags without effect here
) -> None:
    """Encode text to indexed datasets in Megatron's format."""
    from mega_data.process_pool import ProcessPool

    with ProcessPool(workers, _modules_to_import(tokenizer_type)) as processes:
        from mega_data.readers.inputs import expand_inputs
        from mega_schema.tokenizer.tokenizer import open_tokenizer

        inputs = expand_inputs(words, input_format)
        tokenizer = open_tokenizer(
            tokenizer_type,
            vocab_file=vocab_file,
            merge_file=merge_file,
            model=tokenizer_model,
            vocab_size=vocab_size,
            vocab_extra_ids=vocab_extra_ids,
            tiktoken_pattern=tiktoken_pattern,
            tiktoken_num_special_tokens=tiktoken_num_special_tokens,
            tiktoken_special_tokens=tiktoken_special_tokens,
            lazy=True,
        )
        from mega_data import preprocess as run

        options = run.Options(
            keys,
            append_eod,
            language=lang if split_sentences else "",
            keep_newlines=keep_newlines,
            skip=on_error == "skip",
            unit=text_unit,
            index_format=dataset_impl,
            special_tokens=special_tokens,
            parse_special_tokens=parse_special_tokens,
            max_errors=error_limit(on_error, max_errors),
        )
        for prefix in run.check_outputs(inputs, output_prefix, options):
            warn_replaced(prefix)
        size = sum(item.size for item in inputs) or None  # unknown if it comes through a pipe
        with progress_bar("encoding", size) as progress:
            result = run.preprocess(
                inputs, output_prefix, tokenizer, options, workers=processes, progress=progress
            )
    _report(result)


def _report(result: PreprocessResult) -> None:
    """Print what the run wrote; exit with an error if all rows were wrong."""
    click.echo(
        f"{' '.join(map(str, result.prefixes))}: {result.documents:,} documents, {result.tokens:,} tokens, "
        f"{result.size:,} bytes, {result.rate:.1f} MB/s"
    )
    warn_skipped(result.skipped, result.quarantine)
    exit_if_nothing_left(result.documents, result.skipped)
