"""Faster encoders give the tokenizer's own ids, and where one does not, it is not used and that is said."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_data import encoders
from mega_data.encoders import TRAPS, Fastokens, Pieces, Plain, WordCache, fastest
from mega_schema.errors import RequestError
from mega_schema.tokenizer import FastTokenizer, Tokenizer, open_tokenizer

SHARED = Path(os.environ.get("MEGA_SHARED", Path(__file__).parents[4] / "shared"))
FILES = SHARED / "data/tokenizers"
shared = pytest.mark.skipif(not FILES.exists(), reason=f"needs the shared data: no {FILES}")
WORDS = (
    "hello",
    "world",
    "don",
    "un",
    "##aff",
    "##able",
    "a",
    "##b",
    "é",
    "中",
    "'",
    ",",
    "12",
    "##3",
    "[",
    "]",
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
JOINED = st.lists(
    st.sampled_from([*TRAPS, "hello", " ", "\n", "unaffable", "ab", "中", "[MASK]", "\x1c"])
).map("".join)


def bert(folder: Path) -> Tokenizer:
    path = folder / "vocab.txt"
    path.write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)) + "\n", "utf-8")
    return open_tokenizer("BertWordPieceLowerCase", vocab_file=path)


def bpe(folder: Path) -> Tokenizer:
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello", "Ġw", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), "utf-8")
    (folder / "merges.txt").write_text("h e\nl l\nhe ll\nhell o\nĠ w\n", "utf-8")
    return open_tokenizer(
        "GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"
    )


@pytest.mark.parametrize(("make", "kind"), [(bert, WordCache), (bpe, Fastokens)])
def test_any_text_has_the_tokenizers_ids(make, kind, tmp_path_factory):
    tokenizer = make(tmp_path_factory.mktemp("t"))
    encode = fastest(tokenizer, [])
    assert isinstance(encode, kind)
    plain = Plain(tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(TEXT | JOINED, max_size=5))
    def same(texts: list[str]) -> None:
        for found, wanted in zip(encode(texts), plain(texts), strict=True):
            assert found.tolist() == wanted.tolist()

    same()
    again = pickle.loads(pickle.dumps(encode))
    assert again(["hello ab"])[0].tolist() == tokenizer.encode("hello ab")


@shared
@pytest.mark.parametrize("name", ["gpt2", "bert_uncased", "bert_cased", "t5"])
def test_ids_are_the_published_ones_and_the_tokenizers_on_every_document_of_the_corpora(name, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    pytest.importorskip("sentencepiece")
    gpt2, bert_files = FILES / "gpt2", FILES / "bert"
    tokenizer = {
        "gpt2": lambda: open_tokenizer("HuggingFaceTokenizer", model=gpt2),
        "bert_uncased": lambda: open_tokenizer(
            "BertWordPieceLowerCase", vocab_file=bert_files / "bert-base-uncased-vocab.txt"
        ),
        "bert_cased": lambda: open_tokenizer(
            "BertWordPieceCase", vocab_file=bert_files / "bert-base-cased-vocab.txt"
        ),
        "t5": lambda: open_tokenizer("GPTSentencePieceTokenizer", model=FILES / "t5/spiece.model"),
    }[name]()
    encode = fastest(tokenizer, [])
    assert isinstance(encode, Fastokens | WordCache | Pieces)
    golden = (FILES / "golden/encodings.jsonl").read_text("utf-8").splitlines()
    for case in map(json.loads, golden):
        assert encode([case["text"]])[0].tolist() == case[name]
    texts = list((SHARED / "data/corpora/noisy/blns.txt").read_text("utf-8").splitlines())
    for corpus in ("multilingual", "turkish"):
        with zstandard.open(SHARED / f"data/corpora/{corpus}.jsonl.zst", "rb") as file:
            texts += [json.loads(line)["text"] for line in io.TextIOWrapper(file, "utf-8")][::5]
    wanted = tokenizer.encode_batch(texts)
    ids, lengths = encode(texts)
    assert lengths.tolist() == [len(document) for document in wanted]
    assert ids.tolist() == [i for document in wanted for i in document]


class Shifted(WordCache):
    name = "shifted"

    def __call__(self, texts):  # type: ignore[no-untyped-def]
        ids, lengths = super().__call__(texts)
        return ids + 1, lengths


def test_an_encoder_whose_ids_differ_is_not_used_and_that_is_said(tmp_path, monkeypatch, caplog):
    tokenizer = bert(tmp_path)
    monkeypatch.setattr(encoders, "WordCache", Shifted)
    with caplog.at_level(logging.WARNING, "mega.data"):
        encode = fastest(tokenizer, ["hello"])
    assert isinstance(encode, Plain)
    assert "encoding with the tokenizers library: the ids of shifted differ on" in caplog.text


def test_a_library_that_is_not_installed_is_not_used_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(encoders, "import_module", lambda name: __import__(f"no_{name}"))
    with caplog.at_level(logging.WARNING, "mega.data"):
        encode = fastest(bpe(tmp_path), [])
    assert isinstance(encode, Plain)
    assert "a faster one cannot be used (No module named" in caplog.text


def test_a_byte_the_vocabulary_lacks_is_what_the_tokenizer_makes_of_it(tmp_path):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    library = Library(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer("HuggingFaceTokenizer", model=tmp_path)
    assert isinstance(tokenizer, FastTokenizer)
    for texts in (["ab", "aéb"], ["a\0b", "a b", "ab"]):
        for found, wanted in zip(Fastokens(tokenizer)(texts), Plain(tokenizer)(texts), strict=True):
            assert found.tolist() == wanted.tolist()


def test_the_cache_of_words_keeps_within_its_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "WORDS_KEPT", 10)
    encode = WordCache(bert(tmp_path))  # type: ignore[arg-type]
    for number in range(50):
        encode([f"w{number} x{number}", "hello" * 100])
        assert len(encode._known) <= 13
    assert "hello" * 100 not in encode._known


def test_a_text_without_ids_is_the_persons_to_mend():
    encode = fastest(open_tokenizer("NullTokenizer", vocab_size=9), ["1"])
    ids, lengths = encode(["1 2", "", "3"])
    assert (ids.tolist(), lengths.tolist(), ids.dtype) == ([1, 2, 3], [2, 0, 1], np.int32)
    with pytest.raises(RequestError):
        encode(["x"])
