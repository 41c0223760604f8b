"""Megatron's tokenizers by name: ids equal published ones, Hugging Face's and the original libraries'."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_schema.errors import ConfigError, FormatError, RequestError
from mega_schema.tokenizer.files import TIKTOKEN_PATTERNS
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer, open_tokenizer, open_tokenizer_folder
from tests.shared_data import SHARED, needs_shared

FILES = SHARED / "data/tokenizers"
BERT = {"bert_uncased": "BertWordPieceLowerCase", "bert_cased": "BertWordPieceCase"}
VOCAB = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nwor\n##ld\n,\n"


def cases() -> list[dict[str, object]]:
    lines = (FILES / "golden/encodings.jsonl").read_text("utf-8").splitlines()
    assert len(lines) > 100
    return [json.loads(line) for line in lines]


def bert(name: str, **more: int) -> Tokenizer:
    path = FILES / "bert" / f"bert-base-{name.removeprefix('bert_')}-vocab.txt"
    return open_tokenizer(BERT[name], vocab_file=path, **more)


@needs_shared
@pytest.mark.parametrize("name", BERT)
def test_bert_ids_are_the_published_ones(name):
    opened, expected = bert(name), cases()
    assert opened.encode_batch([str(case["text"]) for case in expected]) == [case[name] for case in expected]


@needs_shared
@pytest.mark.parametrize("name", BERT)
def test_bert_ids_are_hugging_faces_in_all_scripts(name):
    transformers = pytest.importorskip("transformers")
    zstandard = pytest.importorskip("zstandard")
    path = FILES / "bert" / f"bert-base-{name.removeprefix('bert_')}-vocab.txt"
    vocab = {word: i for i, word in enumerate(path.read_text("utf-8").splitlines())}
    theirs = transformers.BertTokenizerFast(vocab=vocab, do_lower_case=name == "bert_uncased")
    with zstandard.open(SHARED / "data/corpora/multilingual.jsonl.zst", "rb") as file:
        texts = [json.loads(line)["text"] for line in io.TextIOWrapper(file, "utf-8")][::9]
    assert len(texts) > 50
    wanted = theirs(texts, add_special_tokens=False)["input_ids"]
    assert bert(name).encode_batch(texts) == wanted


@needs_shared
def test_bert_has_megatrons_special_tokens_after_the_files_last_word():
    opened = bert("bert_uncased", vocab_extra_ids=100)
    identity = opened.identity
    assert (identity.vocab_size, identity.eod, identity.bos, identity.pad) == (
        30522 + 2 + 100,
        None,
        30522,
        0,
    )
    assert opened.pieces([101, 30522, 30523, 30524, 30623]) == [
        "[CLS]",
        "[BOS]",
        "[EOS]",
        "<extra_id_0>",
        "<extra_id_99>",
    ]
    assert opened.encode("[MASK] [BOS]")[0] == 103
    assert 30522 not in opened.encode("[MASK] [BOS]")


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        (VOCAB.replace("[CLS]\n", ""), r"no \[CLS\]"),
        (VOCAB + "hello\n", "duplicate word: found 'hello'"),
    ],
)
def test_a_file_that_is_not_berts_is_refused(vocab, message, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text(vocab, "utf-8")
    with pytest.raises(FormatError, match=message):
        open_tokenizer("BertWordPieceCase", vocab_file=path)


@needs_shared
def test_sentencepiece_ids_are_the_published_ones():
    pytest.importorskip("sentencepiece")
    expected = cases()
    texts = [str(case["text"]) for case in expected]
    for type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        opened = open_tokenizer(type, model=FILES / "t5/spiece.model")
        assert opened.encode_batch(texts) == [case["t5"] for case in expected]
        assert opened.encode(texts[0]) == expected[0]["t5"]


@needs_shared
def test_sentencepieces_special_tokens_are_megatrons():
    pytest.importorskip("sentencepiece")
    t5 = FILES / "t5/spiece.model"  # pad 0, eos 1, no bos, 32,000 pieces
    identity = open_tokenizer("SentencePieceTokenizer", model=t5, vocab_extra_ids=3).identity
    # <CLS> <SEP> <EOD> <MASK> <BOS> and three sentinels
    assert (identity.vocab_size, identity.eod, identity.bos, identity.pad) == (32008, 32002, 32004, 0)
    identity = open_tokenizer("GPTSentencePieceTokenizer", model=t5).identity
    assert (identity.vocab_size, identity.eod, identity.bos, identity.pad) == (32000, 1, None, 0)
    small = FILES / "sentencepiece/test_model.model"
    identity = open_tokenizer("Llama2Tokenizer", model=small).identity
    assert (identity.vocab_size, identity.eod, identity.bos, identity.pad) == (1000, 2, 1, None)


@needs_shared
@pytest.mark.parametrize("type", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_a_sentencepiece_model_is_saved_sent_and_opened_as_it_was(type, tmp_path):
    pytest.importorskip("sentencepiece")
    opened = open_tokenizer(type, model=FILES / "sentencepiece/test_model.model", vocab_extra_ids=2)
    opened.save(tmp_path / "t")
    for reopened in (open_tokenizer_folder(tmp_path / "t"), pickle.loads(pickle.dumps(opened))):
        assert reopened.identity == opened.identity
        ids = reopened.encode("I saw a girl with a telescope.")
        assert ids == opened.encode("I saw a girl with a telescope.")
        assert reopened.decode([*ids, 2]) == "I saw a girl with a telescope.</s>"
        assert "".join(reopened.pieces(ids)) == " I saw a girl with a telescope."
        assert reopened.decode([reopened.identity.vocab_size]) == ""
    if type == "SentencePieceTokenizer":
        assert opened.pieces([1002, opened.identity.vocab_size - 1]) == ["<EOD>", "<extra_id_1>"]
        assert opened.decode([1002]) == "<EOD>"
    with pytest.raises(RequestError, match="surrogate"):
        opened.encode("\ud800")


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "m").write_bytes(b"no model" * 100)
    with pytest.raises(FormatError, match="not a SentencePiece model"):
        open_tokenizer("Llama2Tokenizer", model=tmp_path / "m")
    with pytest.raises(FormatError, match="not readable"):
        open_tokenizer("Llama2Tokenizer", model=tmp_path / "none")


def ranks() -> dict[bytes, int]:
    """A tiktoken vocabulary: the bytes, and words that come of joining them."""
    words = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"aa", b"aaa", b"aaaa"]
    words += [" é".encode(), "日本".encode()[:4], "日本".encode(), b"12", b"\n\n", b"  "]
    pairs = ["é".encode(), "日".encode()[:2], "日".encode()]
    return {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *pairs, *words])}


def tik_file(folder: Path) -> Path:
    path = folder / "vocab.json"
    items = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for token, rank in ranks().items()
    ]
    path.write_text(json.dumps(items), "utf-8")
    return path


def tik(folder: Path, **more: object) -> Tokenizer:
    words = {"vocab_size": 300, "tiktoken_num_special_tokens": 10, "tiktoken_pattern": "v2", **more}
    return open_tokenizer("TikTokenizer", model=tik_file(folder), **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_ids_are_the_librarys(pattern, tmp_path_factory):
    tiktoken = pytest.importorskip("tiktoken")
    opened = tik(tmp_path_factory.mktemp("tik"), tiktoken_pattern=pattern)
    shifted = {token: rank + 10 for token, rank in ranks().items()}
    theirs = tiktoken.Encoding(
        "t", pat_str=dict(TIKTOKEN_PATTERNS)[pattern], mergeable_ranks=shifted, special_tokens={}
    )

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.sampled_from([*"helo wrdéa日本12\n .'", "hello", " world", "aaaaa", "</s>"])).map("".join)
    )
    def check_text(text: str) -> None:
        assert opened.encode(text) == theirs.encode_ordinary(text)
        assert opened.decode(opened.encode(text)) == text

    check_text()


def test_tiktokens_special_tokens_come_first(tmp_path):
    opened = tik(tmp_path)
    identity = opened.identity
    assert isinstance(opened, FastTokenizer)
    assert (identity.vocab_size, identity.bos, identity.eod) == (10 + len(ranks()), 1, 2)
    assert opened.pieces([0, 3, 9, 10 + 65]) == ["<unk>", "<SPECIAL_3>", "<SPECIAL_9>", "A"]
    cut = tik(tmp_path, vocab_size=10 + 260)
    assert cut.identity.vocab_size == 270


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tiktoken_pattern": "v3"}, "--tiktoken-pattern: unknown: found v3, wanted v1 | v2"),
        ({"tiktoken_special_tokens": ["<s>"]}, "--tiktoken-special-tokens: not a list of names"),
        ({"tiktoken_num_special_tokens": 2}, "--tiktoken-num-special-tokens: does not fit: found 2"),
        ({"tiktoken_num_special_tokens": 50}, "--tiktoken-num-special-tokens: does not fit: found 50"),
    ],
)
def test_tiktokens_options_that_do_not_fit_are_refused(more, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tik(tmp_path, **more)


def test_a_file_that_is_no_tiktoken_vocabulary_is_refused(tmp_path):
    path = tik_file(tmp_path)
    words = json.loads(path.read_text())
    damaged = (
        ({}, "not a tiktoken vocabulary"),
        ([*words[:-1], {"rank": 5}], "item 276: not a token"),
        ([*words[:-1], {**words[-1], "rank": 5}], "item 276: rank: found 5, wanted 276"),
        ([*words[:-1], {**words[-1], "token_bytes": "*"}], "item 276: not a token"),
    )
    for content, message in damaged:
        path.write_text(json.dumps(content))
        with pytest.raises(FormatError, match=message):
            open_tokenizer("TikTokenizer", model=path, tiktoken_pattern="v1")


@needs_shared
def test_bigsciences_name_of_hugging_faces_is_understood():
    opened = open_tokenizer("PretrainedFromHF", model=FILES / "gpt2")
    assert opened.identity.type == "HuggingFaceTokenizer"
    assert np.array(opened.encode("Hello world")).tolist() == [15496, 995]
