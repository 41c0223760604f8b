"""Text to indexed datasets, one per key: the same bytes whatever the workers, or how often it was stopped."""

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

from mega_data.encode_worker import Done, Encoder, ids_of
from mega_data.encoders import Encode, Flat
from mega_data.error_limit import ErrorLimit
from mega_data.fastest_encoder import Search, Trial
from mega_data.input_stream import InputStream
from mega_data.process_pool import Started
from mega_data.readers.blocks import QUARANTINE_KEYS
from mega_data.readers.inputs import NAMED, Input, form_of
from mega_data.readers.streams import BLOCK_BYTES, UNITS
from mega_data.resumable_output import Parts, Place, is_unfinished
from mega_data.sentences import Splitter, splitter
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
NOTE_BYTES = 1 << 28  # of input between two notes of how far the run got
# lazy is another way to read cached
FORMS = MappingProxyType({"mmap": "mmap", "cached": "cached", "lazy": "cached"})


@dataclass(frozen=True, slots=True)
class Options:
    """What decides the content of the datasets, beside inputs and tokenizer.

    Attributes:
        keys: of the texts, a dataset each.
        append_eod: end each document that has tokens with the tokenizer's eod.
        language: split texts of it into sentences, each a sequence of its own; "" leaves a text whole.
        keep_newlines: a sentence keeps the white space after it.
        skip: pass over rows that are wrong, and what follows damage in a file, and keep them in a quarantine
            file; else stop at the first.
        max_errors: how many of them; a run may go on with another limit than it began with.
        unit: what a document of a plain text is, see readers.streams.
        form: of the index, one of FORMS.
        special_tokens: add to each sequence what the post-processor of a HuggingFaceTokenizer adds, as BOS.
        parse_special_tokens: a special token that is written in a text becomes its id.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    language: str = ""
    keep_newlines: bool = False
    skip: bool = False
    unit: str = "file"
    form: str = "mmap"
    special_tokens: bool = True
    parse_special_tokens: bool = False
    max_errors: ErrorLimit = ErrorLimit()

    def told(self, key: str) -> dict[str, object]:
        """For PREFIX.json: those that change what is in a dataset."""
        values: dict[str, object] = {"key": key, "append_eod": self.append_eod}
        if self.language:
            values |= {"split_sentences": self.language, "keep_newlines": self.keep_newlines}
        if self.unit != "file":
            values["text_unit"] = self.unit
        if self.parse_special_tokens:
            values["parse_special_tokens"] = True
        return values


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run wrote.

    Attributes:
        documents: of each dataset.
        tokens: of all of them.
        size: bytes of text read, decompressed.
        skipped: rows passed over; they are in `quarantine`.
        seconds, fresh: since the start of this process's run, and the bytes it read itself.
        encoder: what gave the ids.
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
        """MB a second."""
        return self.fresh / 1e6 / max(self.seconds, 1e-9)


def check_outputs(inputs: Sequence[Input], output_prefix: Path, options: Options) -> list[Path]:
    """Refuse a prefix whose files are inputs, or were written by other programs.

    Returns:
        the datasets of that prefix that exist already, which a run replaces.

    Raises:
        ConfigError: the prefix is refused.
    """
    option, files = "--output-prefix", [one.path for one in inputs if not one.stdin and one.form != NAMED]
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
    inputs: Sequence[Path | Input],
    output_prefix: Path,
    tokenizer: Tokenizer,
    options: Options | None = None,
    *,
    workers: int | Started = 1,
    block: int = BLOCK_BYTES,
    note: int = NOTE_BYTES,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Outcome:
    """Write `{output_prefix}_{key}_document.{bin,idx,json}` and `.tokenizer/` for each key.

    A row of the input is a document; its text is one sequence of it, or one per sentence where it is a list
    or sentences are split; then the names end in `_sentence`. A text without tokens is an empty document.
    Blank lines are passed over. A run that was killed goes on where its noted parts end, when it is started
    again with the same inputs and options, and writes the bytes it would have written. One that a wrong row
    ended goes on from the first input that has changed since, or from the row where it is now passed over.

    Args:
        workers: processes that encode, or so many that were started; 1 is this process.
        block: bytes of text a worker is handed at a time; what is written does not depend on it.
        note: bytes of input after which it is noted how far the run got.
        progress: told the bytes of the files read, and the documents made, since it was last called.

    Raises:
        ConfigError: options that do not fit the tokenizer or each other.
        FormatError: a row is not what it should be and `options.skip` is off; then there is no dataset.
    """
    began, options = time.monotonic(), options or Options()
    given = [one if isinstance(one, Input) else Input(one, form_of(one)) for one in inputs]
    _check(options, tokenizer)
    prefixes = _prefixes(output_prefix, options)
    quarantine = sibling(output_prefix, _QUARANTINE)
    dtype = smallest_dtype(tokenizer.identity.vocab_size)
    versions = [one.version() for one in given]
    stream = InputStream(given, options.keys, options.unit, block, skip=options.skip)
    made = _Making.of(tokenizer, options, stream)
    with nullcontext(workers) if isinstance(workers, Started) else Started(workers) as processes:
        search = made.search(processes)
        with _parts(output_prefix, given, versions, made, dtype) as parts:
            before = parts.place.size
            if parts.resumed:
                log.warning("going on after %.1f MB that an earlier run has done", before / 1e6)
                progress(parts.place.consumed, parts.documents)
            stream.begin(parts.place)
            work = made.work(search.found(stream.sample()))
            _write(parts, processes.in_order(work, stream), given, versions, options, note, progress)
            for prefix in prefixes:
                tokenizer.save(sibling(prefix, ".tokenizer"))
            sources = tuple(str(one.path) for one in given)
            infos = [
                DatasetInfo(tokenizer.identity, sources=sources, options=made.told(key))
                for key in options.keys
            ]
            parts.publish(prefixes, infos, FORMS[options.form], quarantine)
    place, seconds = parts.place, time.monotonic() - began
    counts = (parts.documents, parts.tokens, place.size, place.skipped)
    return Outcome(prefixes, *counts, quarantine, seconds, place.size - before, work.encode.name)


@contextmanager
def _parts(
    output_prefix: Path,
    given: Sequence[Input],
    versions: Sequence[tuple[int, ...]],
    made: _Making,
    dtype: np.dtype[Any],
) -> Iterator[Parts]:
    """The files of a run, as far as an unfinished one has written what this one would; after an error in the
    inputs what the next run can use of them stays.
    """
    parts = _open_parts(output_prefix, given, made, dtype)
    try:
        yield parts
    except (ConfigError, FormatError):
        changed = (n for n, one in enumerate(given) if one.version() != versions[n])
        with suppress(OSError):  # the disk may be full too: then the last note stays
            parts.keep(unchanged=next(changed, len(given)))
        raise
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        hint = "make room there and run it again: it goes on from its last note"
        raise MegaError(parts.folder, "not written", found=error.strerror, hint=hint) from None
    finally:
        parts.close()


@dataclass(frozen=True, slots=True)
class _Making:
    """How texts become ids: all that decides them beside the texts.

    Attributes:
        added: special tokens around the ids of each sequence.
        split: texts to sentences, None for none.
    """

    tokenizer: Tokenizer
    options: Options
    added: SpecialTokens
    split: Splitter | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, options: Options, stream: InputStream) -> _Making:
        split, newlines = None, options.keep_newlines
        if options.language:
            split = splitter(options.language, stream.beginnings(), keep_newlines=newlines)
        return cls(tokenizer, options, added_tokens(tokenizer, include=options.special_tokens), split)

    def search(self, processes: Started) -> Search:
        """The search for what encodes, begun; it goes on where the processes are that will do it.

        Raises:
            FormatError: the tokenizer, which may be opened still, cannot be.
        """
        tokenizer = self.tokenizer
        if self.options.parse_special_tokens and isinstance(tokenizer, FastTokenizer):
            tokenizer = with_special_text(tokenizer)
        search = Search(tokenizer, _Processes(processes, self))
        if isinstance(self.tokenizer, FastTokenizer):
            self.tokenizer.wait()
        return search

    def work(self, encode: Encode) -> Encoder:
        options, identity = self.options, self.tokenizer.identity
        eod = identity.eod if options.append_eod else None
        return Encoder(encode, options.keys, smallest_dtype(identity.vocab_size), eod, self.added, self.split)

    def told(self, key: str) -> dict[str, object]:
        """For PREFIX.json."""
        values = self.options.told(key)
        if post_processor_tokens(self.tokenizer):
            values |= {"prefix_ids": [*self.added.prefix], "suffix_ids": [*self.added.suffix]}
        if self.split is not None:
            values["sentence_model"] = self.split.name
        return values


@dataclass(frozen=True, slots=True)
class _Processes(Trial):
    """Encoders are tried in the process that the workers are made from, where they are opened anyway."""

    processes: Started
    made: _Making

    def ready(self, encode: Encode) -> None:
        self.processes.prepare(self.made.work(encode))

    def ids(self, encode: Encode, texts: Sequence[str]) -> Flat:
        return self.processes.ask(self.made.work(encode), partial(ids_of, texts))


def _write(
    parts: Parts,
    encoded: Iterable[Done],
    given: Sequence[Input],
    versions: Sequence[tuple[int, ...]],
    options: Options,
    note: int,
    progress: Callable[[int, int], object],
) -> None:
    """Add what was encoded to the parts, up to a row that is wrong and not to be passed over.

    Args:
        versions: of the inputs, when the run began.

    Raises:
        FormatError: a row is wrong, or an input is not the version it was.
        TooManyErrors: more rows are wrong than the options allow.
    """
    noted = parts.place.size
    for done in encoded:
        given[done.input].check_version(versions[done.input])
        path, place = given[done.input].path, parts.place
        first = 1 + (place.rows if done.input == place.input else 0)
        if done.faults and (not options.skip or done.faults[0].is_fatal):
            hint = "mend or delete the line, or pass over such lines: --on-error skip"
            raise done.faults[0].error(path, first, hint)
        parts.begin(done.input)
        for key, documents in enumerate(done.keys):
            parts.add(key, documents)
        for fault in done.faults:
            parts.quarantine(fault.told(path, first))
        parts.place = Place(
            input=done.input,
            position=done.end,
            rows=first - 1 + done.rows,
            size=place.size + done.size,
            consumed=place.consumed + done.consumed,
            skipped=place.skipped + len(done.faults),
        )
        progress(done.consumed, len(done.keys[0].sequences))
        options.max_errors.check(parts.place.skipped, parts.first_fault)
        if parts.place.size - noted >= note:
            parts.note()
            noted = parts.place.size
    rows = parts.documents + parts.place.skipped
    options.max_errors.check(parts.place.skipped, parts.first_fault, rows)


def _check(options: Options, tokenizer: Tokenizer) -> None:
    if options.append_eod and tokenizer.identity.eod is None:
        wanted = "a tokenizer with <|endoftext|>, </s> or the like"
        raise ConfigError("--append-eod", "the tokenizer has no end of document", found="none", wanted=wanted)
    if options.parse_special_tokens and not isinstance(tokenizer, FastTokenizer):
        found, wanted = tokenizer.identity.type, "a tokenizer with a tokenizer.json"
        raise ConfigError("--parse-special-tokens", "not of this tokenizer", found=found, wanted=wanted)
    if len(set(options.keys)) != len(options.keys):
        raise ConfigError("--json-keys", "a key is named twice", found=" ".join(options.keys))
    assert options.unit in UNITS, options.unit
    assert options.form in FORMS, options.form


def _open_parts(output_prefix: Path, given: Sequence[Input], made: _Making, dtype: np.dtype[Any]) -> Parts:
    """The files of an unfinished run, as far as it has written what this one would."""
    options = made.options
    told = [made.tokenizer.identity.to_dict(), [made.told(key) for key in options.keys], options.form]
    run = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    states = [None if one.stream else one.state() for one in given]  # a stream cannot be told from another
    folder = sibling(output_prefix, _UNFINISHED)
    return Parts.open(folder, run, dtype, len(options.keys), states, skip=options.skip)
