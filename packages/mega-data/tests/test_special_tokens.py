"""Special tokens are those of Megatron's HuggingFaceTokenizer; flags change that, and P.json records it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.encode_worker import BlockEncoder
from mega_data.encoders import ReferenceEncoder
from mega_data.preprocess import Options, preprocess
from mega_data.readers.inputs import InputFile
from mega_data.readers.streams import read_blocks
from mega_data.train_tokenizer import train
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.special_tokens import SpecialTokens, post_processor_tokens, with_special_text
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer, open_tokenizer, open_tokenizer_folder

TEXTS = ["Hello world", "Second <|endoftext|> one", "", "third"]


def with_post_processor(folder: Path, single: str) -> Tokenizer:
    """A byte-level BPE with a TemplateProcessing, as Llama 3 has one."""
    from tokenizers import Tokenizer as Library
    from tokenizers import processors

    folder.mkdir(parents=True)
    library = Library.from_str(train(["Hello world", "one two"] * 9, 300).source)
    library.add_special_tokens(["<|begin|>", "<|end|>"])
    names = {name: library.token_to_id(name) for name in ("<|begin|>", "<|end|>")}
    level = processors.ByteLevel(trim_offsets=False)
    template = processors.TemplateProcessing(single=single, special_tokens=list(names.items()))
    library.post_processor = processors.Sequence([level, template])
    library.save(str(folder / "tokenizer.json"))
    return open_tokenizer("HuggingFaceTokenizer", model=folder)


def corpus(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))]


def transformers_ids(folder: Path, *, add: bool, split: bool) -> list[list[int]]:
    """The ids of `transformers`, which Megatron's HuggingFaceTokenizer calls."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = [text for text in TEXTS if text]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    return [tokenizer(t, add_special_tokens=add, split_special_tokens=split).input_ids for t in texts]


@pytest.mark.parametrize("single", ["<|begin|> $A", "<|begin|> $A <|end|>", "$A <|end|>"])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("parse", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_ids_are_those_of_transformers_with_its_flags(tmp_path, single, include, parse, workers):
    tokenizer = with_post_processor(tmp_path / "t", single)
    options = Options(special_tokens=include, parse_special_tokens=parse)
    path = corpus(tmp_path / "a.jsonl", *TEXTS)
    result = preprocess([path], tmp_path / "p", tokenizer, options, workers=workers)
    assert documents(result.prefixes[0]) == transformers_ids(tmp_path / "t", add=include, split=not parse)
    assert IndexedDataset(result.prefixes[0]).documents.tolist() == [0, 1, 2, 2, 3]
    recorded = IndexedDataset(result.prefixes[0]).info.options
    ids = post_processor_tokens(tokenizer) if include else SpecialTokens()
    assert (recorded["prefix_ids"], recorded["suffix_ids"]) == ([*ids.prefix], [*ids.suffix])
    assert recorded.get("parse_special_tokens", False) is parse
    saved = open_tokenizer_folder(tmp_path / "p_text_document.tokenizer")
    assert isinstance(saved, FastTokenizer)
    assert (saved.identity, saved.source) == (tokenizer.identity, tokenizer.source)


def test_a_tokenizer_without_a_post_processor_adds_and_says_nothing(tmp_path):
    tokenizer = train(["Hello world"] * 9, 300)
    result = preprocess([corpus(tmp_path / "a", "Hello")], tmp_path / "p", tokenizer)
    assert documents(result.prefixes[0]) == [tokenizer.encode("Hello")]
    assert set(IndexedDataset(result.prefixes[0]).info.options) == {"key", "append_eod"}


def test_added_tokens_are_around_each_sequence_and_eod_ends_the_document(tmp_path):
    tokenizer = with_post_processor(tmp_path / "t", "<|begin|> $A <|end|>")
    added = post_processor_tokens(tokenizer)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ["a", "", "b"]}\n{"text": ""}\n{"text": "c"}\n')
    (block,) = read_blocks(InputFile(path, "jsonl"), keys=["text"])
    encoder = BlockEncoder(ReferenceEncoder(tokenizer), ("text",), np.dtype("<u2"), 7, added)
    encoded = encoder((0, block)).keys[0]
    begin, end = added.prefix[0], added.suffix[0]
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    assert encoded.ids.tolist() == [begin, a, end, begin, b, end, 7, begin, c, end, 7]
    assert (encoded.lengths.tolist(), encoded.sequences.tolist()) == ([3, 4, 4], [2, 0, 1])


def test_datasets_with_and_without_bos_are_not_merged(tmp_path):
    with_post_processor(tmp_path / "t", "<|begin|> $A")
    path = corpus(tmp_path / "a.jsonl", "Hello")
    flag = "--tokenizer-hf-no-include-special-tokens"
    for name, flags in (("one", []), ("two", [flag]), ("three", ["--parse-special-tokens"])):
        words = ["preprocess", "--input", path, "--output-prefix", tmp_path / name, *flags]
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "t"]
        outcome = CliRunner().invoke(commands, [*map(str, words)])
        assert outcome.exit_code == 0, outcome.output
    for folder, option in (("two", "prefix_ids"), ("three", "parse_special_tokens")):
        words = ["merge", "--datasets", tmp_path / "one_text_document", tmp_path / f"{folder}_text_document"]
        words += ["--output-prefix", tmp_path / "all"]
        error = CliRunner().invoke(commands, [*map(str, words)]).exception
        assert isinstance(error, FormatError)
        assert f"{folder}_text_document.json: {option} is not that of " in str(error)


def test_special_text_is_asked_of_a_tokenizer_that_has_special_tokens(tmp_path):
    null = open_tokenizer("NullTokenizer", vocab_size=9)
    with pytest.raises(
        ConfigError, match="--parse-special-tokens: not of this tokenizer: found NullTokenizer"
    ):
        preprocess([corpus(tmp_path / "a", "1")], tmp_path / "p", null, Options(parse_special_tokens=True))


def test_special_text_has_the_id_of_its_token():
    tokenizer = train(["Hello world"] * 9, 300)
    eod = tokenizer.identity.eod
    assert eod not in tokenizer.encode("a<|endoftext|>b")
    assert with_special_text(tokenizer).encode("a<|endoftext|>b")[1] == eod
