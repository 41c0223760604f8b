"""Text to indexed datasets, one per key: the same bytes whatever the workers, or how often it was stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_data.documents import Done, Encoder
from mega_data.encoders import Encode, fastest
from mega_data.parts import Parts, Place
from mega_data.readers.blocks import Block
from mega_data.readers.inputs import Input, form_of
from mega_data.readers.streams import BLOCK_BYTES, UNITS, blocks
from mega_data.sentences import SAMPLE, splitter
from mega_data.workers import Started
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.indexed import DatasetInfo, beside, smallest_dtype
from mega_schema.tokenizer import Tokenizer

log = logging.getLogger("mega.data")

NOTE_BYTES = 1 << 28  # of input between two notes of how far the run got
_SAMPLE_TEXTS, _SAMPLE_CHARACTERS, _SAMPLE_INPUTS = 64, 1 << 14, 4
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
        skip: pass over rows that are wrong, and keep them in a quarantine file; else stop at the first.
        unit: what a document of a plain text is, see readers.streams.
        form: of the index, one of FORMS.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    language: str = ""
    keep_newlines: bool = False
    skip: bool = False
    unit: str = "file"
    form: str = "mmap"

    def told(self, key: str) -> dict[str, object]:
        """For PREFIX.json: those that change what is in a dataset."""
        values: dict[str, object] = {"key": key, "append_eod": self.append_eod}
        if self.language:
            values |= {"split_sentences": self.language, "keep_newlines": self.keep_newlines}
        if self.unit != "file":
            values["text_unit"] = self.unit
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
    again with the same inputs and options, and writes the bytes it would have written.

    Args:
        workers: processes that encode, or so many that were started; 1 is this process.
        block: bytes of text a worker is handed at a time; what is written does not depend on it.
        note: bytes of input after which it is noted how far the run got.
        progress: told the bytes of the files read, and the documents made, since it was last called.

    Raises:
        ConfigError: options that do not fit the tokenizer or each other.
        FormatError: a row is not what it should be and `options.skip` is off; then nothing is left.
    """
    began, options = time.monotonic(), options or Options()
    given = [one if isinstance(one, Input) else Input(one, form_of(one)) for one in inputs]
    _check(options, tokenizer)
    level = "sentence" if options.language else "document"
    prefixes = tuple(beside(output_prefix, f"_{key}_{level}") for key in options.keys)
    quarantine = beside(output_prefix, "_quarantine.jsonl")
    dtype = smallest_dtype(tokenizer.identity.vocab_size)
    run = _run(given, tokenizer, options)
    parts = Parts.open(beside(output_prefix, ".unfinished"), run, dtype, len(options.keys))
    before = parts.place.size
    try:
        if parts.resumed:
            log.warning("going on after %.1f MB that an earlier run has done", before / 1e6)
            progress(parts.place.consumed, parts.documents)
        with nullcontext(workers) if isinstance(workers, Started) else Started(workers) as processes:
            stream = _Stream(given, parts, options, block)
            work = _encoder(tokenizer, options, stream, dtype, processes)
            _write(parts, processes.in_order(work, stream), given, options, note, progress)
        for prefix in prefixes:
            tokenizer.save(beside(prefix, ".tokenizer"))
        infos = [_info(tokenizer, given, options, key) for key in options.keys]
        parts.publish(prefixes, infos, FORMS[options.form], quarantine)
    except (ConfigError, FormatError) as error:
        # to mend an input makes it another one; a library that is missing does not
        if isinstance(error, FormatError) or not parts.resumed:
            parts.discard()
        raise
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        hint = "make room there and run it again: it goes on from its last note"
        raise MegaError(parts.folder, "not written", found=error.strerror, hint=hint) from None
    finally:
        parts.close()
    place, seconds = parts.place, time.monotonic() - began
    counts = (parts.documents, parts.tokens, place.size, place.skipped)
    return Outcome(prefixes, *counts, quarantine, seconds, place.size - before, work.encode.name)


def _encoder(
    tokenizer: Tokenizer, options: Options, stream: _Stream, dtype: np.dtype[Any], processes: Started
) -> Encoder:
    eod = tokenizer.identity.eod if options.append_eod else None
    # what Megatron's tokenizer of that name does, and no other's
    bos = tokenizer.identity.bos if tokenizer.identity.type == "Llama2Tokenizer" else None
    sample, split = stream.sample(), None
    if options.language:
        split = splitter(options.language, stream.beginnings(), keep_newlines=options.keep_newlines)

    def work(encode: Encode) -> Encoder:
        return Encoder(encode, options.keys, dtype, eod, bos, split)

    return work(fastest(tokenizer, sample, lambda encode: processes.prepare(work(encode))))


def _write(
    parts: Parts,
    encoded: Iterable[Done],
    given: Sequence[Input],
    options: Options,
    note: int,
    progress: Callable[[int, int], object],
) -> None:
    """Add what was encoded to the parts, up to a row that is wrong and not to be passed over."""
    noted = parts.place.size
    for done in encoded:
        path, place = given[done.input].path, parts.place
        first = 1 + (place.rows if done.input == place.input else 0)
        if done.faults and not options.skip:
            hint = "mend or delete the line, or pass over such lines: --on-error skip"
            raise done.faults[0].error(path, first, hint)
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
        if parts.place.size - noted >= note:
            parts.note()
            noted = parts.place.size


class _Stream:
    """The blocks that are still to be done, with the number of their input."""

    def __init__(self, given: Sequence[Input], parts: Parts, options: Options, size: int) -> None:
        self._given, self._keys, self._unit, self._size = given, options.keys, options.unit, size
        self._place = (parts.place.input, parts.place.position)
        self._begun: list[tuple[int, Block]] = []
        self._rest = self._blocks()

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        yield from self._begun
        yield from self._rest

    def sample(self) -> list[str]:
        """Some texts from the beginnings of some of the inputs."""
        self._begun = [item for item in [next(self._rest, None)] if item is not None]
        found = [block for _, block in self._begun]
        step = max(1, len(self._given) // _SAMPLE_INPUTS)
        for one in self._given[self._place[0] + 1 :: step][:_SAMPLE_INPUTS]:
            if not one.stdin:
                first = next(blocks(one, keys=self._keys, size=1 << 16, unit=self._unit), None)
                found += [first] if first else []
        texts = list[str]()
        for block in found:
            for row in block.rows(self._keys).texts[:_SAMPLE_TEXTS]:
                texts += [text[:_SAMPLE_CHARACTERS] for text in row if isinstance(text, str)]
        return _up_to(texts, 4 * _SAMPLE_CHARACTERS)

    def beginnings(self) -> Iterator[str]:
        """Texts of each input from its beginning, as much of each; of stdin, its first block."""
        share = max(SAMPLE // len(self._given), 1 << 16)
        for number, one in enumerate(self._given):
            begun = (block for at, block in self._begun if at == number)
            again = blocks(one, keys=self._keys, size=self._size, unit=self._unit)
            read: Iterator[Block] = begun if one.stdin else again
            held = 0
            for text in (text for block in read for row in block.rows(self._keys).texts for text in row):
                if isinstance(text, str) and held < share:
                    yield text[: share - held]
                    held += len(text)
                if held >= share:
                    break

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        number, position = self._place
        for at, one in enumerate(self._given[number:], number):
            start = position if at == number else 0
            for block in blocks(one, start, keys=self._keys, size=self._size, unit=self._unit):
                yield at, block


def _check(options: Options, tokenizer: Tokenizer) -> None:
    if options.append_eod and tokenizer.identity.eod is None:
        wanted = "a tokenizer with <|endoftext|>, </s> or the like"
        raise ConfigError("--append-eod", "the tokenizer has no end of document", found="none", wanted=wanted)
    if len(set(options.keys)) != len(options.keys):
        raise ConfigError("--json-keys", "a key is named twice", found=" ".join(options.keys))
    assert options.unit in UNITS, options.unit
    assert options.form in FORMS, options.form


def _run(given: Sequence[Input], tokenizer: Tokenizer, options: Options) -> str:
    """What tells whether an unfinished run is this one; a stream cannot be told from another, so never it."""
    if any(one.stdin for one in given):
        return f"stdin at {time.time_ns()}"
    told = [
        [one.state() for one in given],
        tokenizer.identity.to_dict(),
        [options.told(key) for key in options.keys],
        [options.skip, options.form],
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _info(tokenizer: Tokenizer, given: Sequence[Input], options: Options, key: str) -> DatasetInfo:
    sources = tuple(str(one.path) for one in given)
    return DatasetInfo(tokenizer.identity, sources=sources, options=options.told(key))


def _up_to(texts: list[str], characters: int) -> list[str]:
    kept, held = list[str](), 0
    for text in texts:
        if held >= characters:
            break
        kept.append(text)
        held += len(text)
    return kept
