"""Faster encoders give the tokenizer's ids; one that does not is rejected and logged."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_data import encoders, fastest_encoder
from mega_data.encoders import (
    CachedWordPieceEncoder,
    FastokensEncoder,
    GigatokenEncoder,
    ReferenceEncoder,
    SentencePieceEncoder,
)
from mega_data.fastest_encoder import HARD_TEXTS, find_fastest_encoder
from mega_data.preprocess import Options, preprocess
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import FormatError, RequestError
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer, open_tokenizer
from tests.shared_data import SHARED, needs_shared

FILES = SHARED / "data/tokenizers"
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
    st.sampled_from([*HARD_TEXTS, "hello", " ", "\n", "unaffable", "ab", "中", "[MASK]", "\x1c"])
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


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def like(folder: Path, **parts: object) -> Tokenizer:
    """The tokenizer of `bpe` with other parts; `vocab` are words it has besides."""
    content = json.loads(bpe(folder).source)  # type: ignore[attr-defined]
    for word in parts.pop("vocab", ()):  # type: ignore[attr-defined]
        content["model"]["vocab"].setdefault(word, len(content["model"]["vocab"]))
    content["model"].update(parts.pop("model", {}))  # type: ignore[call-overload]
    (folder / "tokenizer.json").write_text(json.dumps(content | parts), "utf-8")
    return open_tokenizer("HuggingFaceTokenizer", model=folder)


def split(pattern: str, behavior: str = "Isolated", **level: object) -> dict[str, object]:
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, {**LEVEL, **level}]}


def llama3(folder: Path) -> Tokenizer:
    return like(folder, pre_tokenizer=split(LLAMA3), normalizer={"type": "NFC"})


def llama2(folder: Path) -> Tokenizer:
    words = ("<unk>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256)))
    model = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
    return like(folder, vocab=words, model=model, pre_tokenizer=None, normalizer=normalizer)


def odd(folder: Path) -> Tokenizer:
    return like(folder, pre_tokenizer=split(r"\p{L}+|\p{N}{2}|[^\p{L}\p{N}]"))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (bert, CachedWordPieceEncoder),
        (bpe, GigatokenEncoder),
        (llama3, GigatokenEncoder),
        (llama2, GigatokenEncoder),
        (odd, FastokensEncoder),
    ],
)
def test_any_text_has_the_tokenizers_ids(make, kind, tmp_path_factory):
    tokenizer = make(tmp_path_factory.mktemp("t"))
    encode = find_fastest_encoder(tokenizer, [])
    assert isinstance(encode, kind)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(TEXT | JOINED, max_size=5), st.none() | st.just(3))
    def check_ids(texts: list[str], eod: int | None) -> None:
        documents = [ids + ([eod] if ids and eod else []) for ids in tokenizer.encode_batch(texts)]
        ids, lengths = encode(texts, eod)
        assert ids.tolist() == [i for document in documents for i in document]
        assert lengths.tolist() == [len(document) for document in documents]

    check_ids()
    unpickled = pickle.loads(pickle.dumps(encode))
    assert unpickled(["hello ab"])[0].tolist() == tokenizer.encode("hello ab")


@needs_shared
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
    encode = find_fastest_encoder(tokenizer, [])
    assert isinstance(encode, GigatokenEncoder | CachedWordPieceEncoder | SentencePieceEncoder)
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


class ShiftedEncoder(CachedWordPieceEncoder):
    name = "shifted"

    def __call__(self, texts, eod=None):  # type: ignore[no-untyped-def]
        ids, lengths = super().__call__(texts, eod)
        return ids + 1, lengths


def test_an_encoder_whose_ids_differ_is_not_used_and_that_is_said(tmp_path, monkeypatch, caplog):
    tokenizer = bert(tmp_path)
    monkeypatch.setattr(fastest_encoder, "CachedWordPieceEncoder", ShiftedEncoder)
    with caplog.at_level(logging.WARNING, "mega.data"):
        encode = find_fastest_encoder(tokenizer, ["hello"])
    assert isinstance(encode, ReferenceEncoder)
    assert "encoding with tokenizers: the ids of shifted differ on" in caplog.text


def test_a_library_that_is_not_installed_is_not_used_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(encoders, "import_module", lambda name: __import__(f"no_{name}"))
    with caplog.at_level(logging.WARNING, "mega.data"):
        encode = find_fastest_encoder(bpe(tmp_path), [])
    assert isinstance(encode, ReferenceEncoder)
    for name in ("gigatoken", "fastokens"):
        assert f"{name} cannot be used (No module named" in caplog.text


GPT2 = {**LEVEL, "use_regex": True}


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": LEVEL},
        {"pre_tokenizer": split(LLAMA3, "Removed")},
        {"pre_tokenizer": split(LLAMA3, add_prefix_space=True)},
        {"pre_tokenizer": split(LLAMA3, use_regex=True)},
        {"pre_tokenizer": GPT2, "model": {"dropout": 0.5}},
        {"pre_tokenizer": GPT2, "model": {"merges": [["h", "e"], ["l", "l"], ["h", "e"]]}},
        {"pre_tokenizer": GPT2, "normalizer": {"type": "Lowercase"}},
    ],
)
def test_gigatoken_is_not_used_for_what_it_passes_over(parts, tmp_path):
    assert not isinstance(find_fastest_encoder(like(tmp_path, **parts), []), GigatokenEncoder)


def test_an_added_token_that_a_library_finds_elsewhere_keeps_it_from_the_work(tmp_path, caplog):
    flags = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer = like(tmp_path, added_tokens=[{"id": 300, "content": "hello", **flags}])
    with caplog.at_level(logging.WARNING, "mega.data"):
        encode = find_fastest_encoder(tokenizer, [])
    assert "the ids of gigatoken differ on 'ahellob hello hellohello" in caplog.text
    assert encode(["hello ahello"])[0].tolist() == tokenizer.encode("hello ahello")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_library_is_checked_where_it_would_work(workers, tmp_path, caplog):
    flags = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer = like(tmp_path, added_tokens=[{"id": 300, "content": "hello", **flags}])
    (tmp_path / "a.jsonl").write_text('{"text": "hello ahello"}\n')
    with caplog.at_level(logging.WARNING, "mega.data"):
        result = preprocess([tmp_path / "a.jsonl"], tmp_path / "p", tokenizer, workers=workers)
    assert "the ids of gigatoken differ on 'ahellob hello hellohello" in caplog.text
    assert IndexedDataset(result.prefixes[0])[0].tolist() == tokenizer.encode("hello ahello")


def test_a_text_that_holds_the_mark_between_texts_has_its_own_ids(tmp_path):
    tokenizer = bpe(tmp_path)
    encode, mark = find_fastest_encoder(tokenizer, []), encoders._SEPARATOR
    assert isinstance(encode, GigatokenEncoder)
    for texts in (
        [mark],
        ["hello", f"a{mark}b", ""],
        [mark[:-1], mark[1:]],
        [f"he{mark[:9]}", f"{mark[9:]}l"],
    ):
        for ids, wanted in zip(encode(texts, 3), ReferenceEncoder(tokenizer)(texts, 3), strict=True):
            assert ids.tolist() == wanted.tolist()


def test_a_text_that_utf8_cannot_encode_is_a_user_error(tmp_path):
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        find_fastest_encoder(bpe(tmp_path), [])(["hello", "\ud800"])


def test_a_text_that_utf8_cannot_encode_goes_to_the_quarantine_with_what_is_known(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello"}\n{"text": "\\ud800", "n": NaN}\n')
    reason = "half of a surrogate pair: wanted text that UTF-8 can hold"
    with pytest.raises(FormatError, match=f"a.jsonl:2: {reason}; hint"):
        preprocess([path], tmp_path / "p", bpe(tmp_path))
    preprocess([path], tmp_path / "p", bpe(tmp_path), Options(skip=True))
    (row,) = map(json.loads, (tmp_path / "p_quarantine.jsonl").read_text().splitlines())
    assert (row["line"], row["reason"]) == (2, reason)


# A process of its own: in one that has freed much, as a worker of pytest has, a library grows into that
# memory and the process does not.
REOPENED = """
import sys
from pathlib import Path

import numpy as np

from mega_data import encoders
from mega_data.fastest_encoder import find_fastest_encoder
from mega_schema.tokenizer.tokenizer import open_tokenizer

encoders.MAX_LIBRARY_BYTES, encoders.MEMORY_CHECK_BYTES = 30 << 20, 0
tokenizer = open_tokenizer("GPT2BPETokenizer", vocab_file=Path(sys.argv[1]), merge_file=Path(sys.argv[2]))
encode = find_fastest_encoder(tokenizer, [])
assert isinstance(encode, encoders.GigatokenEncoder)
rng, first, libraries = np.random.default_rng(0), encoders._resident_bytes(), [encode._library]
letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    ", np.uint8)
for _ in range(12):
    text = letters[rng.integers(0, len(letters), 1_000_000)].tobytes().decode()
    encode([text])
    if encode._library is not libraries[-1]:
        libraries.append(encode._library)
    assert encoders._resident_bytes() < first + (200 << 20)
assert encode([text[:500]])[0].tolist() == tokenizer.encode(text[:500])
print(len(libraries))
"""


def test_a_library_that_remembers_too_many_words_is_opened_again(tmp_path):
    bpe(tmp_path)
    arguments = [sys.executable, "-c", REOPENED, str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 2


def test_gigatoken_is_not_used_if_the_system_does_not_report_memory(tmp_path, monkeypatch, caplog):
    def resident() -> int:
        raise FileNotFoundError(2, "No such file or directory", "/proc/self/statm")

    monkeypatch.setattr(encoders, "_resident_bytes", resident)
    with caplog.at_level(logging.WARNING, "mega.data"):
        assert isinstance(find_fastest_encoder(bpe(tmp_path), []), FastokensEncoder)
    assert "encoding with fastokens: gigatoken cannot be used (" in caplog.text


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
        for ids, wanted in zip(
            FastokensEncoder(tokenizer)(texts), ReferenceEncoder(tokenizer)(texts), strict=True
        ):
            assert ids.tolist() == wanted.tolist()


def test_the_cache_of_words_keeps_within_its_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "MAX_CACHED_WORDS", 10)
    encode = CachedWordPieceEncoder(bert(tmp_path))  # type: ignore[arg-type]
    for number in range(50):
        encode([f"w{number} x{number}", "hello" * 100])
        assert len(encode._word_ids) <= 13
    assert "hello" * 100 not in encode._word_ids


def test_a_text_without_ids_is_a_user_error():
    encode = find_fastest_encoder(open_tokenizer("NullTokenizer", vocab_size=9), ["1"])
    ids, lengths = encode(["1 2", "", "3"])
    assert (ids.tolist(), lengths.tolist(), ids.dtype) == ([1, 2, 3], [2, 0, 1], np.int32)
    with pytest.raises(RequestError):
        encode(["x"])
