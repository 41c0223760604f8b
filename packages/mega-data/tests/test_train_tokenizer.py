"""A trained tokenizer depends only on the text, and other libraries read its files equally."""

from __future__ import annotations

import gzip
import json
import random
import sys

import pytest
import sentencepiece
import tokenizers
import transformers
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.sentencepiece_model import model_proto
from mega_data.train_tokenizer import TYPES, UNIGRAM_SPECIALS, save, train
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import open_tokenizer, open_tokenizer_folder

TEXTS = [f"the quick brown fox number {n} jumps over the lazy dogs of the house" for n in range(50)]
MIXED = [*TEXTS, *(f"Straße İstanbul'da, naïve café no. {n}!" for n in range(50))]
SIZES = {"bpe": 400, "wordpiece": 200, "unigram": 400}


@pytest.mark.parametrize("kind", TYPES)
def test_training_again_gives_the_same_files_and_other_text_others(kind, tmp_path):
    for name, texts in (("a", MIXED), ("b", iter(MIXED)), ("c", MIXED[::-1])):
        save(train(texts, SIZES[kind], kind=kind), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert train(["some other words"], 300).identity.sha256 != train(MIXED, 300).identity.sha256


def test_a_bpe_has_the_size_asked_for_and_its_eod_first():
    first = train(TEXTS, 300)
    assert (first.identity.vocab_size, first.identity.eod) == (300, 0)
    assert first.pieces([0]) == ["<|endoftext|>"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_unlike_the_training_text_comes_back_exactly(kind, tmp_path):
    save(train(TEXTS, 360, kind=kind), tmp_path / "t")
    opened = open_tokenizer_folder(tmp_path / "t")
    texts = ("", " ", "日本語 🎉\u0000\r\n\t", "<|endoftext|>", "".join(map(chr, range(1, 1000))))
    for text in (*texts, "  two  ", "<s> </s><pad><unk> <0x41>"):
        ids = opened.encode(text)
        assert opened.decode(ids) == text
        assert not {opened.identity.eod, opened.identity.bos, opened.identity.pad} & {*ids}


def test_frequent_words_are_one_token():
    assert len(train(TEXTS, 400).encode(" the")) == 1
    assert train(TEXTS, 200, kind="wordpiece").pieces(train(TEXTS, 200, kind="wordpiece").encode("the")) == [
        "the"
    ]


def test_a_text_with_few_pairs_gives_fewer_ids():
    assert train(["ab"], 1000).identity.vocab_size == 258
    assert train(["ab"], 1000, kind="wordpiece").identity.vocab_size == 5 + 4
    assert 4 + 256 < train(TEXTS, 5000, kind="unigram").identity.vocab_size < 1000


@pytest.mark.parametrize(
    ("kind", "size", "line"),
    [
        ("bpe", 256, "--vocab-size: too small for byte-level BPE: found 256, wanted 257"),
        (
            "wordpiece",
            20,
            r"--vocab-size: too small for wordpiece: found 20, wanted \d+ or more: each letter",
        ),
        ("unigram", 200, r"--vocab-size: not one for a unigram: found 200 \(Vocabulary size is smaller"),
        ("sentences", 200, r"--type: unknown: found sentences, wanted bpe \| wordpiece \| unigram"),
    ],
)
def test_a_vocabulary_without_room_for_every_letter_is_refused(kind, size, line):
    with pytest.raises(ConfigError, match=line):
        train(TEXTS, size, kind=kind)
    assert train(TEXTS, 257).identity.vocab_size == 257


def test_lowercase_is_wordpieces_alone():
    lower = train(MIXED, 200, kind="wordpiece", lowercase=True)
    assert lower.decode(lower.encode("THE Naïve Café")) == "the naive cafe"
    with pytest.raises(ConfigError, match="--lowercase: is wordpiece's: found --type bpe"):
        train(MIXED, 300, lowercase=True)


def test_the_two_files_of_a_bpe_are_the_tokenizer_in_megatrons_form(tmp_path):
    tokenizer = train(MIXED, 400)
    assert save(tokenizer, tmp_path / "t") == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    files = {"vocab_file": tmp_path / "t/vocab.json", "merge_file": tmp_path / "t/merges.txt"}
    megatrons = open_tokenizer("GPT2BPETokenizer", **files)
    assert megatrons.identity.sha256 == tokenizer.identity.sha256
    assert (megatrons.identity.vocab_size, megatrons.identity.eod) == (376, 0)


def test_the_vocab_txt_of_a_wordpiece_is_berts(tmp_path):
    tokenizer = train(MIXED, 150, kind="wordpiece")
    assert save(tokenizer, tmp_path / "t") == ["tokenizer_config.json", "vocab.txt"]
    lines = (tmp_path / "t/vocab.txt").read_text("utf-8").splitlines()
    assert lines[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(lines) == len({*lines}) == 150
    theirs = tokenizers.BertWordPieceTokenizer(str(tmp_path / "t/vocab.txt"), lowercase=False)
    megatrons = open_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "t/vocab.txt")
    for text in (*MIXED, "unseen words: foxhouse, dogjumps 日本", "[CLS]x"):
        text = text.replace("[CLS]", "CLS")
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids == megatrons.encode(text)


def test_every_pair_a_wordpiece_merged_is_one_hugging_faces_trainer_could_have_merged():
    """Up to ties the vocabularies are the same; where every count differs there are none."""
    texts = [" ".join(["abcd"] * 40 + ["bcd"] * 20 + ["xyz"] * 11 + ["xy"] * 5)]
    ours = train(texts, 30, kind="wordpiece")
    library = tokenizers.BertWordPieceTokenizer(lowercase=False, clean_text=True)
    library.train_from_iterator(texts, vocab_size=30, min_frequency=0, show_progress=False)
    assert {*json.loads(ours.source)["model"]["vocab"]} == {*library.get_vocab()}


def test_the_model_of_a_unigram_gives_the_same_ids_in_sentencepiece(tmp_path):
    tokenizer = train(MIXED, 400, kind="unigram")
    assert save(tokenizer, tmp_path / "t") == ["tokenizer.model", "tokenizer_config.json"]
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t/tokenizer.model"))
    assert [theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id()] == [0, 1, 2, 3]
    assert tokenizer.identity.eod == 2
    words = [*"<>0x41sunkpad/ ▁üİ日🎉\n\0ABCabc", "the", "<s>", "</s>", "<0x41>", "<unk>", "quick", "  "]
    rng = random.Random(1)
    megatrons = open_tokenizer("GPTSentencePieceTokenizer", model=tmp_path / "t/tokenizer.model")
    for _ in range(2000):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(12)))
        assert tokenizer.encode(text) == theirs.encode(text) == megatrons.encode(text)


@pytest.mark.parametrize("kind", TYPES)
def test_transformers_opens_the_folder(kind, tmp_path):
    tokenizer = train(MIXED, SIZES[kind], kind=kind)
    save(tokenizer, tmp_path / "t")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    for text in MIXED[::20]:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.identity.eod


def test_a_folder_is_replaced_whole(tmp_path):
    save(train(TEXTS, 300), tmp_path / "t")
    save(train(TEXTS, 100, kind="wordpiece"), tmp_path / "t")
    assert not (tmp_path / "t/merges.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        ConfigError, match=r"needs sentencepiece; hint: pip install .*mega-data\[sentencepiece\]"
    ):
        train(TEXTS, 400, kind="unigram")


def test_the_command_trains_each_kind(tmp_path):
    path = tmp_path / "in"  # a folder, and a packed file in it
    path.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in MIXED)
    (path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for kind, file in (("bpe", "merges.txt"), ("wordpiece", "vocab.txt"), ("unigram", "tokenizer.model")):
        words = ["train-tokenizer", "--input", path, "--type", kind, "--vocab-size", 350]
        result = CliRunner().invoke(commands, [*map(str, words), "--output", str(tmp_path / kind)])
        assert result.exit_code == 0
        assert (tmp_path / kind / file).exists()
        assert ("requested" in result.stderr) == (" 350 ids" not in result.stdout)


def test_a_sentencepiece_model_has_the_bytes_of_the_protobuf_message():
    reason = "protobuf is not installed"
    messages = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason=reason)
    pieces = [
        *((name, 0.0) for name in UNIGRAM_SPECIALS),
        ("<0x00>", 0.0),
        ("\u2581a", -1.5),
        ("é" * 99, -2.25),
    ]
    written = model_proto(pieces, len(UNIGRAM_SPECIALS))
    message = messages.ModelProto.FromString(written)
    assert message.SerializeToString() == written
    assert [piece.piece for piece in message.pieces] == [text for text, _ in pieces]


@pytest.mark.parametrize("kind", TYPES)
def test_no_text_gives_no_tokenizer(kind):
    with pytest.raises(ConfigError, match="^--input: contains no text: wanted one document or more"):
        train([], 400, kind=kind)


def test_max_documents_trains_on_the_first_documents_of_all_inputs(tmp_path):
    for name, texts in (("a", MIXED[:30]), ("b", MIXED[30:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["train-tokenizer", "--input", str(tmp_path / "*.jsonl"), "--vocab-size", "400", "--output"]
    for count in (10, 60, 10**6):
        result = CliRunner().invoke(commands, [*words, str(tmp_path / "out"), "--max-documents", str(count)])
        assert result.exit_code == 0, (result.output, result.exception)
        trained = open_tokenizer_folder(tmp_path / "out")
        assert trained.identity.sha256 == train(MIXED[:count], 400).identity.sha256
    assert CliRunner().invoke(commands, [*words, "out", "--max-documents", "0"]).exit_code == 2
