"""The settings that decide the ids and sequences of a text, and the choice of its encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mega_data.encode_worker import BlockEncoder, encode_texts
from mega_data.encoders import FlatIds, TextEncoder
from mega_data.error_limit import ErrorLimit
from mega_data.fastest_encoder import EncoderSearch, EncoderTrial
from mega_data.input_stream import InputStream
from mega_data.process_pool import ProcessPool
from mega_data.readers.streams import TEXT_UNITS
from mega_data.sentences import SentenceSplitter, make_splitter
from mega_schema.dataset.indexed_dataset import DatasetInfo, sibling, smallest_dtype
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.special_tokens import (
    SpecialTokens,
    added_tokens,
    post_processor_tokens,
    with_special_text,
)
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

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
        adapter: name of the function that converts the rows of the inputs, see readers.adapters; "" for none.
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
    adapter: str = ""

    def to_json(self, key: str) -> dict[str, object]:
        """Return the options for PREFIX.json: those that change the content of a dataset."""
        values: dict[str, object] = {"key": key, "append_eod": self.append_eod}
        if self.language:
            values |= {"split_sentences": self.language, "keep_newlines": self.keep_newlines}
        if self.unit != "file":
            values["text_unit"] = self.unit
        if self.adapter:
            values["adapter"] = self.adapter
        if self.parse_special_tokens:
            values["parse_special_tokens"] = True
        return values


def dataset_prefixes(output_prefix: Path, options: Options) -> tuple[Path, ...]:
    level = "sentence" if options.language else "document"
    return tuple(sibling(output_prefix, f"_{key}_{level}") for key in options.keys)


def check_options(options: Options, tokenizer: Tokenizer) -> None:
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


@dataclass(frozen=True, slots=True)
class EncodingPlan:
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
    def for_run(cls, tokenizer: Tokenizer, options: Options, stream: InputStream) -> EncodingPlan:
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

    def dataset_infos(self, sources: Sequence[str]) -> tuple[DatasetInfo, ...]:
        """Return the content of PREFIX.json for each key, without counts.

        Args:
            sources: paths of the inputs.
        """
        identity = self.tokenizer.identity
        keys = self.options.keys
        return tuple(DatasetInfo(identity, sources=tuple(sources), options=self.to_json(key)) for key in keys)

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
    plan: EncodingPlan

    def prepare(self, encoder: TextEncoder) -> None:
        self.processes.prepare(self.plan.make_work(encoder))

    def encode(self, encoder: TextEncoder, texts: Sequence[str]) -> FlatIds:
        return self.processes.ask(self.plan.make_work(encoder), partial(encode_texts, texts))
