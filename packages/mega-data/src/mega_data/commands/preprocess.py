"""`mega-data preprocess`: encode text to indexed datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_data.commands.common import (
    ANY_PATH,
    EXECUTOR,
    LAST_CALL_HELP,
    WORKERS,
    RepeatableOptionCommand,
    adapter_option,
    error_limit,
    exit_if_nothing_left,
    max_errors_option,
    open_adapter,
    warn_replaced,
    warn_skipped,
)
from mega_data.commands.megatron_flags import megatron_flags, tokenizer_values
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import uploads_dataset
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_PREFIX_OR_URL
from mega_schema.app.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_data.encoding_plan import Options
    from mega_data.preprocess import PreprocessResult
    from mega_data.process_pool import ProcessPool
    from mega_data.readers.inputs import InputFile
    from mega_schema.tokenizer.tokenizer import Tokenizer

INPUT_HELP = (
    "JSON lines, .csv, .tsv, .parquet or .txt, also .gz .zst .xz .bz2 .lz4: files, globs, folders, URLs, "
    "saved datasets, hf:NAME[:split=...,config=...,revision=...] for a dataset by name, or - for stdin."
)

_SPLIT_MB = 64
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
@adapter_option
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
@click.option(
    "--executor",
    type=EXECUTOR,
    help="Run as tasks, and where; a task reads a file or a range of one.  [default: one stream, in order]",
)
@click.option(
    "--split-mb",
    type=click.IntRange(min=1),
    help="Megabytes of a JSON-lines or Parquet file per task; .gz and .zst at members and frames.  "
    f"[default: {_SPLIT_MB}]",
)
@click.option("--stage", "only", help=f"Run only plan, STAGE or STAGE:TASK; {LAST_CALL_HELP}")
@click.option(
    "--dry-run", is_flag=True, help="Print tasks, bytes and an estimate from a sample; write nothing."
)
@megatron_flags
@uploads_dataset("words", keeps_work=False)
def preprocess(
    words: tuple[str, ...],
    input_format: str | None,
    adapter: str | None,
    text_unit: str,
    output_prefix: Path,
    tokenizer_type: str,
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
    executor: str | None,
    split_mb: int | None,
    only: str | None,
    dry_run: bool,
    **values: Any,  # files and sizes of the tokenizer, and Megatron's flags without effect here
) -> None:
    """Encode text to indexed datasets in Megatron's format."""
    from mega_data.process_pool import ProcessPool

    executor = executor or _executor_of_run(output_prefix, only)
    split_bytes = _split_bytes(split_mb, has_tasks=executor is not None or dry_run)
    with ProcessPool(1 if executor else workers, _modules_to_import(tokenizer_type)) as processes:
        from mega_data.readers.inputs import expand_inputs

        function = open_adapter(adapter)
        inputs = expand_inputs(words, input_format, adapter=function)
        tokenizer = _open_tokenizer(tokenizer_type, values)
        from mega_data.encoding_plan import Options
        from mega_data.preprocess import check_outputs

        options = Options(
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
            adapter=function.function if function else "",
        )
        for prefix in check_outputs(inputs, output_prefix, options):
            warn_replaced(prefix)
        if dry_run:
            from mega_data.commands.preprocess_dry_run import print_estimate

            print_estimate(inputs, tokenizer, options, workers=workers, split_bytes=split_bytes)
            return
        if executor is None:
            _report(_encode_stream(inputs, output_prefix, tokenizer, options, processes))
            return
    from mega_data.commands.preprocess_tasks import Placement, preprocess_tasks

    placement = Placement(executor, workers, only, split_bytes)
    result = preprocess_tasks(inputs, output_prefix, tokenizer, options, placement)
    if result is not None:
        _report(result)


def _executor_of_run(output_prefix: Path, only: str | None) -> str | None:
    """Return the executor where none is named: that of an unfinished run of tasks, such as an array's.

    Returns:
        None: one stream of blocks.
    """
    plan = output_prefix.with_name(f"{output_prefix.name}.unfinished") / "tasks/plan.json"
    return "local" if only is not None or plan.exists() else None


def _split_bytes(split_mb: int | None, *, has_tasks: bool) -> int:
    """Return the bytes per task.

    Raises:
        ConfigError: a size is named, and the run has no tasks.
    """
    if split_mb is not None and not has_tasks:
        from mega_schema.errors import ConfigError

        hint = f"--executor local --split-mb {split_mb}"
        raise ConfigError("--split-mb", "has no effect without --executor", found=split_mb, hint=hint)
    return (split_mb or _SPLIT_MB) * 1_000_000


def _open_tokenizer(kind: str, values: Mapping[str, Any]) -> Tokenizer:
    values = tokenizer_values(kind, values)
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    names = [
        "vocab_file",
        "merge_file",
        "vocab_size",
        "vocab_extra_ids",
        "tiktoken_pattern",
        "tiktoken_num_special_tokens",
        "tiktoken_special_tokens",
    ]
    options = {name: values[name] for name in names}
    return open_tokenizer(kind, model=values["tokenizer_model"], lazy=True, **options)


def _encode_stream(
    inputs: Sequence[InputFile],
    output_prefix: Path,
    tokenizer: Tokenizer,
    options: Options,
    processes: ProcessPool,
) -> PreprocessResult:
    from mega_data.preprocess import preprocess as run

    size = sum(item.size for item in inputs) or None  # unknown if it comes through a pipe
    with progress_bar("encoding", size) as progress:
        return run(inputs, output_prefix, tokenizer, options, workers=processes, progress=progress)


def _report(result: PreprocessResult) -> None:
    """Print what the run wrote; exit with an error if all rows were wrong."""
    click.echo(
        f"{' '.join(map(str, result.prefixes))}: {format_count(result.documents, 'document')}, "
        f"{format_count(result.tokens, 'token')}, "
        f"{format_count(result.size, 'byte')}, {result.rate:.1f} MB/s"
    )
    warn_skipped(result.skipped, result.quarantine)
    record_counts(documents_out=result.documents, dropped={"not a document": result.skipped})
    exit_if_nothing_left(result.documents, result.skipped)
