"""A trained tokenizer depends on the text alone and has ids for any text."""

from __future__ import annotations

import pytest

from mega_data.vocabulary import train
from mega_schema.errors import ConfigError
from mega_schema.tokenizer import open_folder

TEXTS = [f"the quick brown fox number {n} jumps over the lazy dogs of the house" for n in range(50)]


def test_training_twice_gives_one_tokenizer_of_the_size_asked_for(tmp_path):
    one, two = train(TEXTS, 300), train(iter(TEXTS), 300)
    assert one.identity == two.identity
    assert (one.identity.vocab_size, one.identity.eod) == (300, 0)
    assert one.pieces([0]) == ["<|endoftext|>"]
    one.save(tmp_path / "a")
    two.save(tmp_path / "b")
    for name in ("identity.json", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert train(["some other words"], 300).identity.sha256 != one.identity.sha256


def test_text_unlike_the_training_text_comes_back_exactly(tmp_path):
    train(TEXTS, 280).save(tmp_path / "t")
    opened = open_folder(tmp_path / "t")
    for text in ("", " ", "日本語 🎉\u0000\r\n\t", "<|endoftext|>", "".join(map(chr, range(1, 1000)))):
        assert opened.decode(opened.encode(text)) == text
        assert 0 not in opened.encode(text)


def test_frequent_words_are_one_token():
    assert len(train(TEXTS, 400).encode(" the")) == 1


def test_a_text_with_few_pairs_gives_fewer_ids():
    assert train(["ab"], 1000).identity.vocab_size == 258


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(ConfigError, match="--vocab-size: too small .*: found 256, wanted 257"):
        train(TEXTS, 256)
    assert train(TEXTS, 257).identity.vocab_size == 257
