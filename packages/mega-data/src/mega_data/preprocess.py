"""Encode text to indexed datasets, one per key. The bytes depend neither on the workers nor on restarts."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_data.encode_worker import BlockEncoder, EncodedBlock, encode_texts
from mega_data.encoders import FlatIds, TextEncoder
from mega_data.error_limit import ErrorLimit
from mega_data.fastest_encoder import EncoderSearch, EncoderTrial
from mega_data.input_stream import InputStream
from mega_data.process_pool import ProcessPool
from mega_data.readers.blocks import QUARANTINE_KEYS
from mega_data.readers.inputs import HUB_FORMAT, InputFile, format_of_name
from mega_data.readers.streams import BLOCK_BYTES, TEXT_UNITS
from mega_data.resumable_output import ResumableOutput, is_unfinished
from mega_data.run_journal import InputPosition
from mega_data.sentences import SentenceSplitter, make_splitter
from mega_schema.dataset.indexed_dataset import DatasetInfo, sibling, smallest_dtype
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.outputs import check_dataset_output, check_output, has_keys
from mega_schema.tokenizer.special_tokens import (
    SpecialTokens,
    added_tokens,
    post_processor_tokens,
    with_special_text,
)
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

log = logging.getLogger("mega.data")

_QUARANTINE, _UNFINISHED = "_quarantine.jsonl", ".unfinished"
JOURNAL_BYTES = 1 << 28  # of input between two writes of the journal
# lazy reads the cached format
INDEX_FORMATS = MappingProxyType({"mmap": "mmap", "cached": "cached", "lazy": "cached"})


@dataclass(frozen=True, slots=True)
class Options:
    """The options that decide the content of the datasets, besides inputs and tokenizer.

    Attributes:
        keys: keys of the texts, a dataset each.
        append_eod: append the tokenizer's eod to each document that has tokens.
        language: split texts of this language into sentences, each a sequence; "" keeps a text whole.
        keep_newlines: a sentence keeps the white space after it.
        skip: move wrong rows, and the rest of a damaged file, to a quarantine file; else stop at the first.
        max_errors: maximum of skipped rows; a resumed run may have another limit.
        unit: unit of a document of plain text, see readers.streams.
        index_format: one of INDEX_FORMATS.
        special_tokens: add to each sequence the tokens of a HuggingFaceTokenizer's post-processor, such as
            BOS.
        parse_special_tokens: encode special tokens in a text as their ids.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    language: str = ""
    keep_newlines: bool = False
    skip: bool = False
    unit: str = "file"
    index_format: str = "mmap"
    special_tokens: bool = True
    parse_special_tokens: bool = False
    max_errors: ErrorLimit = ErrorLimit()

    def to_json(self, key: str) -> dict[str, object]:
        """Return the options for PREFIX.json: those that change the content of a dataset."""
        values: dict[str, object] = {"key": key, "append_eod": self.append_eod}
        if self.language:
            values |= {"split_sentences": self.language, "keep_newlines": self.keep_newlines}
        if self.unit != "file":
            values["text_unit"] = self.unit
        if self.parse_special_tokens:
            values["parse_special_tokens"] = True
        return values


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
        for prefix in _prefixes(output_prefix, options)
        if check_dataset_output(option, prefix, inputs=files)
    ]
    quarantine, unfinished = (sibling(output_prefix, suffix) for suffix in (_QUARANTINE, _UNFINISHED))
    check_output(option, quarantine, "file", inputs=files, is_ours=has_keys(QUARANTINE_KEYS))
    check_output(option, unfinished, "folder", inputs=files, is_ours=is_unfinished)
    return replaced


def _prefixes(output_prefix: Path, options: Options) -> tuple[Path, ...]:
    level = "sentence" if options.language else "document"
    return tuple(sibling(output_prefix, f"_{key}_{level}") for key in options.keys)


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
    _check_options(options, tokenizer)
    prefixes = _prefixes(output_prefix, options)
    quarantine = sibling(output_prefix, _QUARANTINE)
    dtype = smallest_dtype(tokenizer.identity.vocab_size)
    versions = [item.version() for item in files]
    stream = InputStream(files, options.keys, options.unit, block, skip=options.skip)
    encoding = _EncodingPlan.for_run(tokenizer, options, stream)
    with nullcontext(workers) if isinstance(workers, ProcessPool) else ProcessPool(workers) as processes:
        search = encoding.start_search(processes)
        with _resumable_output(output_prefix, files, versions, encoding, dtype) as output:
            bytes_before = output.resume_point.size
            if output.is_resumed:
                log.warning("resuming after %.1f MB that an earlier run encoded", bytes_before / 1e6)
                progress(output.resume_point.consumed, output.documents)
            stream.resume_from(output.resume_point)
            work = encoding.make_work(search.find(stream.sample_texts()))
            _write_blocks(
                output, processes.map_in_order(work, stream), files, versions, options, note, progress
            )
            for prefix in prefixes:
                tokenizer.save(sibling(prefix, ".tokenizer"))
            sources = tuple(str(item.path) for item in files)
            infos = [
                DatasetInfo(tokenizer.identity, sources=sources, options=encoding.to_json(key))
                for key in options.keys
            ]
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
    encoding: _EncodingPlan,
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


@dataclass(frozen=True, slots=True)
class _EncodingPlan:
    """The settings that decide the ids of a text.

    Attributes:
        special_tokens: around the ids of each sequence.
        split: splits a text into sentences; None keeps it whole.
    """

    tokenizer: Tokenizer
    options: Options
    special_tokens: SpecialTokens
    split: SentenceSplitter | None

    @classmethod
    def for_run(cls, tokenizer: Tokenizer, options: Options, stream: InputStream) -> _EncodingPlan:
        split = None
        newlines = options.keep_newlines
        if options.language:
            split = make_splitter(options.language, stream.first_texts(), keep_newlines=newlines)
        return cls(tokenizer, options, added_tokens(tokenizer, include=options.special_tokens), split)

    def start_search(self, processes: ProcessPool) -> EncoderSearch:
        """Start the search for an encoder in the processes that will encode.

        Raises:
            FormatError: the tokenizer is damaged.
        """
        tokenizer = self.tokenizer
        if self.options.parse_special_tokens and isinstance(tokenizer, FastTokenizer):
            tokenizer = with_special_text(tokenizer)
        search = EncoderSearch(tokenizer, _PoolTrial(processes, self))
        if isinstance(self.tokenizer, FastTokenizer):
            self.tokenizer.open()  # here, while the processes open the encoder
        return search

    def make_work(self, encode: TextEncoder) -> BlockEncoder:
        options = self.options
        identity = self.tokenizer.identity
        eod = identity.eod if options.append_eod else None
        return BlockEncoder(
            encode, options.keys, smallest_dtype(identity.vocab_size), eod, self.special_tokens, self.split
        )

    def to_json(self, key: str) -> dict[str, object]:
        """Return the settings for PREFIX.json."""
        values = self.options.to_json(key)
        if post_processor_tokens(self.tokenizer):
            values |= {
                "prefix_ids": [*self.special_tokens.prefix],
                "suffix_ids": [*self.special_tokens.suffix],
            }
        if self.split is not None:
            values["sentence_model"] = self.split.name
        return values


@dataclass(frozen=True, slots=True)
class _PoolTrial(EncoderTrial):
    """Try encoders in the process that the workers are forked from, where they are opened anyway."""

    processes: ProcessPool
    plan: _EncodingPlan

    def prepare(self, encoder: TextEncoder) -> None:
        self.processes.prepare(self.plan.make_work(encoder))

    def encode(self, encoder: TextEncoder, texts: Sequence[str]) -> FlatIds:
        return self.processes.ask(self.plan.make_work(encoder), partial(encode_texts, texts))


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
        TooManyErrors: more rows are wrong than the options allow.
    """
    journaled = output.resume_point.size
    for block in encoded:
        inputs[block.input].check_version(versions[block.input])
        path = inputs[block.input].path
        point = output.resume_point
        first_row = 1 + (point.rows if block.input == point.input else 0)
        if block.errors and (not options.skip or block.errors[0].is_fatal):
            hint = "correct or delete the line, or skip such lines: --on-error skip"
            raise block.errors[0].error(path, first_row, hint)
        output.start_input(block.input)
        for key, documents in enumerate(block.keys):
            output.add(key, documents)
        for row_error in block.errors:
            output.quarantine(row_error.to_json(path, first_row))
        output.resume_point = InputPosition(
            input=block.input,
            position=block.end,
            rows=first_row - 1 + block.rows,
            size=point.size + block.size,
            consumed=point.consumed + block.consumed_bytes,
            skipped=point.skipped + len(block.errors),
        )
        progress(block.consumed_bytes, len(block.keys[0].sequences))
        options.max_errors.check(output.resume_point.skipped, output.first_error)
        if output.resume_point.size - journaled >= note:
            output.write_journal()
            journaled = output.resume_point.size
    rows = output.documents + output.resume_point.skipped
    options.max_errors.check(output.resume_point.skipped, output.first_error, rows)


def _check_options(options: Options, tokenizer: Tokenizer) -> None:
    if options.append_eod and tokenizer.identity.eod is None:
        wanted = "a tokenizer with <|endoftext|>, </s> or the like"
        raise ConfigError("--append-eod", "the tokenizer has no end of document", found="none", wanted=wanted)
    if options.parse_special_tokens and not isinstance(tokenizer, FastTokenizer):
        found, wanted = tokenizer.identity.type, "a tokenizer with a tokenizer.json"
        raise ConfigError("--parse-special-tokens", "not of this tokenizer", found=found, wanted=wanted)
    if len(set(options.keys)) != len(options.keys):
        raise ConfigError("--json-keys", "a key is named twice", found=" ".join(options.keys))
    assert options.unit in TEXT_UNITS, options.unit
    assert options.index_format in INDEX_FORMATS, options.index_format


def _open_output(
    output_prefix: Path, inputs: Sequence[InputFile], encoding: _EncodingPlan, dtype: np.dtype[Any]
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
    folder = sibling(output_prefix, _UNFINISHED)
    return ResumableOutput(folder, run, dtype, len(options.keys), states, skip=options.skip)
