"""`mega-data convert`: write a dataset in another index format, or as text."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import ANY_PATH, WORKERS, warn_replaced
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_PREFIX
from mega_schema.app.progress import progress_bar

TARGETS = ("mmap", "cached", "lazy", "fairseq-mmap", "fairseq-cached", "jsonl")
DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")


@click.command()
@click.argument("prefix", type=ANY_PATH)
@click.option(
    "--from", "source", type=click.Choice(["auto", *TARGETS[:-1]]), default="auto", help="Input format."
)
@click.option("--to", "target", type=click.Choice(TARGETS), default="mmap", help="Output format.")
@click.option(
    "--output-prefix",
    "--output",
    type=OUTPUT_PREFIX,
    required=True,
    help="Output prefix; with --to jsonl, a file.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Dtype of the ids.  [default: unchanged]")
@click.option("--json-key", default="text", help="Key of the text, with --to jsonl.")
@click.option(
    "--tokenizer-model", type=ANY_PATH, help="Tokenizer, with --to jsonl.  [default: PREFIX.tokenizer]"
)
@click.option("--multimodal", is_flag=True, help="The index has a mode per sequence.")
@click.option("--workers", type=WORKERS, default=4, help="Copy threads.")
def convert(
    prefix: Path,
    source: str,
    target: str,
    output_prefix: Path,
    dtype: str | None,
    json_key: str,
    tokenizer_model: Path | None,
    multimodal: bool,
    workers: int,
) -> None:
    """Write the dataset PREFIX in another format: Megatron's mmap or cached, fairseq's, or JSON lines."""
    import numpy as np

    from mega_data.convert import canonical_format, check_index_format, loses_documents, to_json_lines
    from mega_data.merge import merge_datasets
    from mega_schema.dataset.indexed_dataset import open_dataset
    from mega_schema.outputs import check_dataset_output, check_output, dataset_files, has_keys
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    data = open_dataset(prefix, multimodal=multimodal)
    check_index_format(data, source)
    inputs = [*dataset_files(prefix), *map(Path, data.info.sources if data.info else ())]
    if target == "jsonl":
        check_output("--output", output_prefix, "file", inputs=inputs, is_ours=has_keys([json_key]))
    elif check_dataset_output("--output-prefix", output_prefix, inputs=inputs):
        warn_replaced(output_prefix)
    size = data.tokens * data.dtype.itemsize
    if target == "jsonl":
        tokenizer = open_tokenizer("HuggingFaceTokenizer", model=tokenizer_model) if tokenizer_model else None
        with progress_bar("converting", size) as progress:
            count = to_json_lines(data, output_prefix, key=json_key, tokenizer=tokenizer, progress=progress)
        click.echo(f"{output_prefix}: {format_count(count, 'document')} from {data.index_format}")
        return
    index_format = canonical_format(target)
    with progress_bar("converting", size) as progress:
        result = merge_datasets(
            [data],
            output_prefix,
            index_format=index_format,
            dtype=np.dtype(dtype) if dtype else None,
            workers=workers,
            progress=progress,
        )
    click.echo(
        f"{output_prefix}: {result.index_format} from {data.index_format}, "
        f"{format_count(result.sequences, 'sequence')}, {format_count(result.tokens, 'token')}"
    )
    if loses_documents(data, index_format):
        click.echo("note: fairseq's formats have no documents; each sequence is one now", err=True)
    if data.modes is not None and index_format != "mmap":
        click.echo(f"note: {index_format} has no modes; they were left out", err=True)
