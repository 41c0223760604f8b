"""Encode text to indexed datasets, one per key. The bytes depend neither on the workers nor on restarts."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mega_data.encode_worker import EncodedBlock
from mega_data.encoding_plan import INDEX_FORMATS, EncodingPlan, Options, check_options, dataset_prefixes
from mega_data.input_stream import InputStream
from mega_data.process_pool import ProcessPool
from mega_data.readers.blocks import QUARANTINE_KEYS
from mega_data.readers.inputs import HUB_FORMAT, InputFile, format_of_name
from mega_data.readers.streams import BLOCK_BYTES
from mega_data.resumable_output import ResumableOutput, is_unfinished
from mega_data.run_journal import InputPosition
from mega_schema.dataset.indexed_dataset import sibling, smallest_dtype
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.outputs import check_dataset_output, check_output, has_keys
from mega_schema.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("mega.data")

JOURNAL_BYTES = 1 << 28  # of input between two writes of the journal


@dataclass(frozen=True, slots=True)
class PreprocessResult:
    """The result of a run.

    Attributes:
        documents: documents of each dataset.
        tokens: tokens of all datasets.
        size: bytes of text read, decompressed.
        skipped: skipped rows; they are in `quarantine`.
        seconds, fresh: seconds of this process, and bytes that it read itself, without those of earlier
            processes.
        encoder: name of the encoder.
    """

    prefixes: tuple[Path, ...]
    documents: int
    tokens: int
    size: int
    skipped: int
    quarantine: Path
    seconds: float
    fresh: int
    encoder: str

    @property
    def rate(self) -> float:
        """Return the speed in MB per second."""
        return self.fresh / 1e6 / max(self.seconds, 1e-9)


def check_outputs(inputs: Sequence[InputFile], output_prefix: Path, options: Options) -> list[Path]:
    """Refuse a prefix whose files are inputs, or were written by other programs.

    Returns:
        The existing datasets of that prefix, which a run replaces.

    Raises:
        ConfigError: the prefix is refused.
    """
    option = "--output-prefix"
    files = [item.path for item in inputs if not item.is_stdin and item.format != HUB_FORMAT]
    replaced = [
        prefix
        for prefix in dataset_prefixes(output_prefix, options)
        if check_dataset_output(option, prefix, inputs=files)
    ]
    quarantine, unfinished = quarantine_path(output_prefix), unfinished_folder(output_prefix)
    check_output(option, quarantine, "file", inputs=files, is_ours=has_keys(QUARANTINE_KEYS))
    check_output(option, unfinished, "folder", inputs=files, is_ours=is_unfinished)
    return replaced


def quarantine_path(output_prefix: Path) -> Path:
    return sibling(output_prefix, "_quarantine.jsonl")


def unfinished_folder(output_prefix: Path) -> Path:
    return sibling(output_prefix, ".unfinished")


def preprocess(
    inputs: Sequence[Path | InputFile],
    output_prefix: Path,
    tokenizer: Tokenizer,
    options: Options | None = None,
    *,
    workers: int | ProcessPool = 1,
    block: int = BLOCK_BYTES,
    note: int = JOURNAL_BYTES,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> PreprocessResult:
    """Write `{output_prefix}_{key}_document.{bin,idx,json}` and `.tokenizer/` for each key.

    A row of the input is a document. Its text is one sequence, or one per sentence if it is a list or
    sentences are split; then the names end in `_sentence`. A text without tokens is an empty document. Blank
    lines are skipped. A killed run resumes from its journal when it is started again with the same inputs and
    options, and writes the same bytes. A run that ended at a wrong row resumes from the first input that has
    changed since, or from that row if it is now skipped.

    Args:
        workers: processes that encode, or a pool of them; 1 is this process.
        block: bytes of text per item of a worker; the output does not depend on it.
        note: bytes of input between two writes of the journal.
        progress: called with the bytes of the files read, and the documents encoded, since its last call.

    Raises:
        ConfigError: options do not fit the tokenizer or each other.
        FormatError: a row is wrong and `options.skip` is off; then there is no dataset.
    """
    started_at = time.monotonic()
    options = options or Options()
    files = [
        item if isinstance(item, InputFile) else InputFile(item, format_of_name(item)) for item in inputs
    ]
    check_options(options, tokenizer)
    prefixes = dataset_prefixes(output_prefix, options)
    quarantine = quarantine_path(output_prefix)
    dtype = smallest_dtype(tokenizer.identity.vocab_size)
    versions = [item.version() for item in files]
    stream = InputStream(files, options.keys, options.unit, block, skip=options.skip)
    encoding = EncodingPlan.for_run(tokenizer, options, stream)
    with nullcontext(workers) if isinstance(workers, ProcessPool) else ProcessPool(workers) as processes:
        search = encoding.start_search(processes)
        with _resumable_output(output_prefix, files, versions, encoding, dtype) as output:
            bytes_before = output.resume_point.size
            if output.is_resumed:
                log.warning("resuming after %.1f MB that an earlier run encoded", bytes_before / 1e6)
                progress(output.resume_point.consumed, output.documents)
                if output.resume_point.damage:  # an earlier process had no limit
                    options.max_errors.check_damage(output.resume_point.damage)
            stream.resume_from(output.resume_point)
            work = encoding.make_work(search.find(stream.sample_texts()))
            _write_blocks(
                output, processes.map_in_order(work, stream), files, versions, options, note, progress
            )
            for prefix in prefixes:
                tokenizer.save(sibling(prefix, ".tokenizer"))
            infos = encoding.dataset_infos([str(item.path) for item in files])
            output.publish(prefixes, infos, INDEX_FORMATS[options.index_format], quarantine)
    point = output.resume_point
    seconds = time.monotonic() - started_at
    counts = (output.documents, output.tokens, point.size, point.skipped)
    return PreprocessResult(
        prefixes, *counts, quarantine, seconds, point.size - bytes_before, work.encode.name
    )


@contextmanager
def _resumable_output(
    output_prefix: Path,
    inputs: Sequence[InputFile],
    versions: Sequence[tuple[int, ...]],
    encoding: EncodingPlan,
    dtype: np.dtype[Any],
) -> Iterator[ResumableOutput]:
    """Open the output of a run, resumed if possible; after an input error keep the reusable part."""
    output = _open_output(output_prefix, inputs, encoding, dtype)
    try:
        yield output
    except (ConfigError, FormatError):
        changed_inputs = (n for n, item in enumerate(inputs) if item.version() != versions[n])
        with suppress(OSError):  # the disk may be full: then the last journal is kept
            output.keep_for_resume(unchanged=next(changed_inputs, len(inputs)))
        raise
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        hint = "free disk space and run the same command again: it resumes"
        raise MegaError(output.folder, "not written", found=error.strerror, hint=hint) from None
    finally:
        output.close()


def _write_blocks(
    output: ResumableOutput,
    encoded: Iterable[EncodedBlock],
    inputs: Sequence[InputFile],
    versions: Sequence[tuple[int, ...]],
    options: Options,
    note: int,
    progress: Callable[[int, int], object],
) -> None:
    """Write encoded blocks to the output, up to the first wrong row that is not skipped.

    Args:
        versions: versions of the inputs when the run began.

    Raises:
        FormatError: a row is wrong, or an input has changed.
        TooManyErrors: more rows are wrong than the options allow, or they have a limit and a file is damaged.
    """
    journaled = output.resume_point.size
    for block in encoded:
        inputs[block.input].check_version(versions[block.input])
        path = inputs[block.input].path
        point = output.resume_point
        damage = point.damage
        first_row = 1 + (point.rows if block.input == point.input else 0)
        errors = (error for error in block.errors if not options.skip or error.is_fatal)
        if (error := next(errors, None)) is not None:
            hint = "correct or delete the line, or skip such lines: --on-error skip"
            raise error.error(path, first_row, hint)
        for row_error in block.errors:
            if row_error.ends_file:
                options.max_errors.check_damage(row_error.damage_notice(path))
        output.start_input(block.input)
        for key, documents in enumerate(block.keys):
            output.add(key, documents)
        for row_error in block.errors:
            if row_error.ends_file:
                log.warning("%s: the rest of it is skipped", row_error.damage_notice(path))
                damage = damage or row_error.damage_notice(path)
            output.quarantine(row_error.to_json(path, first_row))
        output.resume_point = InputPosition(
            input=block.input,
            position=block.end,
            rows=first_row - 1 + block.rows,
            size=point.size + block.size,
            consumed=point.consumed + block.consumed_bytes,
            skipped=point.skipped + len(block.errors),
            damage=damage,
        )
        progress(block.consumed_bytes, len(block.keys[0].sequences))
        options.max_errors.check(output.resume_point.skipped, output.first_error)
        if output.resume_point.size - journaled >= note:
            output.write_journal()
            journaled = output.resume_point.size
    rows = output.documents + output.resume_point.skipped
    options.max_errors.check(output.resume_point.skipped, output.first_error, rows)


def _open_output(
    output_prefix: Path, inputs: Sequence[InputFile], encoding: EncodingPlan, dtype: np.dtype[Any]
) -> ResumableOutput:
    """Open the files of an unfinished run, truncated to the part that this run would write."""
    options = encoding.options
    identity = [
        encoding.tokenizer.identity.to_dict(),
        [encoding.to_json(key) for key in options.keys],
        options.index_format,
    ]
    run = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    # streams have no state by which to recognize them
    states = [None if item.is_stream else item.state() for item in inputs]
    folder = unfinished_folder(output_prefix)
    return ResumableOutput(folder, run, dtype, len(options.keys), states, skip=options.skip)
