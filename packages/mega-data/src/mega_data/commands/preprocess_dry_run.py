"""Estimate the work of `mega-data preprocess` from a sample, without writing anything."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

import click

from mega_data.encode_tasks import check_task_inputs
from mega_data.encoding_plan import EncodingPlan, Options, check_options
from mega_data.input_stream import InputStream
from mega_data.process_pool import ProcessPool
from mega_data.readers.blocks import Block, DamagedBlock
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import InputRange, plan_tasks, read_range, undivided_reason
from mega_data.readers.streams import BLOCK_BYTES
from mega_schema.app.counts import format_count
from mega_schema.app.progress import format_duration
from mega_schema.errors import CorruptFileError
from mega_schema.tokenizer.tokenizer import Tokenizer

_SAMPLE_TASKS = 8  # the first block of each is encoded


def print_estimate(
    inputs: Sequence[InputFile], tokenizer: Tokenizer, options: Options, *, workers: int, split_bytes: int
) -> None:
    """Print the tasks and bytes of a run, and an estimate of documents, tokens, output bytes and time.

    Raises:
        ConfigError: options do not fit each other, or an input cannot be divided into tasks.
        FormatError: an input is damaged, and damage is not skipped.
    """
    check_task_inputs(inputs)
    check_options(options, tokenizer)
    groups = plan_tasks(inputs, split_bytes)
    ranges = [part for group in groups for part in group]
    disk_bytes = sum(part.size for part in ranges)
    tasks, files = format_count(len(groups), "task"), format_count(len(inputs), "file")
    click.echo(f"{tasks}, {files}, {disk_bytes / 1e6:.2f} MB on disk")
    _print_undivided(ranges, split_bytes)
    stream = InputStream(inputs, options.keys, options.unit, BLOCK_BYTES, skip=options.skip)
    plan = EncodingPlan.for_run(tokenizer, options, stream)
    with ProcessPool(1) as processes:
        work = plan.make_work(plan.start_search(processes).find(stream.sample_texts()))
    started_at = time.monotonic()
    read = documents = tokens = sequences = wrong = 0
    for part in ranges[:: max(1, len(ranges) // _SAMPLE_TASKS)][:_SAMPLE_TASKS]:
        for block in islice(_sample_blocks(part, options), 1):
            encoded = work((part.input, block))
            read += encoded.consumed_bytes
            documents += len(encoded.keys[0].sequences)
            tokens += sum(len(key.ids) for key in encoded.keys)
            sequences += sum(len(key.lengths) for key in encoded.keys)
            wrong += len(encoded.errors)
    if not read:
        click.echo("the sample has no bytes: no estimate")
        return
    seconds = (time.monotonic() - started_at) * disk_bytes / read / min(workers, len(groups))
    scale = disk_bytes / read
    # of an index: a length and a pointer for each sequence, a boundary for each document
    size = tokens * work.dtype.itemsize + 12 * sequences + 8 * documents * len(options.keys)
    click.echo(
        f"estimate from {read / 1e6:.2f} MB: {documents * scale:,.0f} documents, "
        f"{tokens * scale / 1e6:,.2f} million tokens, {size * scale / 1e6:,.2f} MB written, "
        f"{format_duration(seconds)} with {workers} workers"
    )
    if wrong:
        rows = format_count(documents + wrong, "row")
        click.echo(f"{wrong:,} of {rows} of the sample {'is' if wrong == 1 else 'are'} wrong")


def _print_undivided(ranges: Sequence[InputRange], split_bytes: int) -> None:
    """Print the largest input that is one task although it has more than `split_bytes`."""
    undivided = [part for part in ranges if undivided_reason(part, split_bytes)]
    if undivided:
        part = max(undivided, key=lambda part: part.size)
        others = f", as {len(undivided) - 1:,} others" if len(undivided) > 1 else ""
        why = undivided_reason(part, split_bytes)
        click.echo(f"{part.item.path}: one task of {part.size / 1e6:.2f} MB{others}: {why}")


def _sample_blocks(part: InputRange, options: Options) -> Iterator[Block]:
    try:
        yield from read_range(part, options.keys, BLOCK_BYTES, options.unit)
    except CorruptFileError as error:
        if not options.skip:
            raise
        yield DamagedBlock(error.what, str(error.values.get("found", "")))
