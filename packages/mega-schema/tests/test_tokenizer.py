"""Ids equal the published ones, decoding restores text, and a modified folder is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_schema.errors import ConfigError, FormatError, RequestError
from mega_schema.tokenizer.fast import open_library
from mega_schema.tokenizer.files import gpt2
from mega_schema.tokenizer.identity import content_sha256
from mega_schema.tokenizer.json_text import dump_content
from mega_schema.tokenizer.tokenizer import (
    FastTokenizer,
    Tokenizer,
    TokenizerIdentity,
    check_same_tokenizer,
    open_tokenizer,
    open_tokenizer_folder,
)
from tests.shared_data import SHARED, needs_shared

GPT2 = SHARED / "data/tokenizers/gpt2"


def letters() -> dict[str, int]:
    """A byte-level vocabulary of the 256 letters, `he`, and the end of a document."""
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<|endoftext|>"]
    return {word: number for number, word in enumerate(words)}


@pytest.fixture(name="files")
def gpt2_files(tmp_path: Path) -> tuple[Path, Path]:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps(letters()), "utf-8")
    merges.write_text("#version: 0.2\nh e\n", "utf-8")
    return vocab, merges


@pytest.fixture(name="small")
def small_tokenizer(files: tuple[Path, Path]) -> Tokenizer:
    return open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])


def null(size: int = 10) -> Tokenizer:
    return open_tokenizer("NullTokenizer", vocab_size=size)


@needs_shared
@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HuggingFaceTokenizer"])
def test_gpt2_ids_are_the_published_ones_and_decode_to_the_text(kind):
    opened = open_tokenizer(
        kind, vocab_file=GPT2 / "gpt2-vocab.json", merge_file=GPT2 / "gpt2-merges.txt", model=GPT2
    )
    lines = (SHARED / "data/tokenizers/golden/encodings.jsonl").read_text("utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    assert len(cases) > 100
    texts, ids = [case["text"] for case in cases], [case["gpt2"] for case in cases]
    assert [opened.encode(text) for text in texts] == ids
    assert opened.encode_batch(texts) == ids
    assert [opened.decode(i) for i in ids] == texts
    assert (opened.identity.vocab_size, opened.identity.eod) == (50257, 50256)


@needs_shared
def test_one_tokenizer_written_as_two_kinds_of_file_has_one_hash():
    parts = {"vocab_file": GPT2 / "gpt2-vocab.json", "merge_file": GPT2 / "gpt2-merges.txt"}
    a = open_tokenizer("GPT2BPETokenizer", **parts).identity
    b = open_tokenizer("HuggingFaceTokenizer", model=GPT2 / "tokenizer.json").identity
    assert a.type != b.type
    check_same_tokenizer(a, b, "corpus")


@needs_shared
def test_special_ids_come_from_tokenizer_config_when_the_folder_has_one():
    folder = SHARED / "data/tokenizers/tiny"
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    opened = open_tokenizer("HuggingFaceTokenizer", model=folder)
    for key, number in (("eos_token", opened.identity.eod), ("bos_token", opened.identity.bos)):
        assert number is not None
        assert opened.pieces([number]) == [config[key]]


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_gives_back_any_text_that_was_encoded(text):
    with_letters = json.dumps(letters())
    source = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {"version": "1.0", "pre_tokenizer": source, "decoder": source}
    model = {"type": "BPE", "vocab": json.loads(with_letters), "merges": [["h", "e"]]}
    from tokenizers import Tokenizer as Library

    identity = TokenizerIdentity("HuggingFaceTokenizer", 258, 257, None, None, "0" * 64)
    text_of = json.dumps({**content, "model": model})
    opened = FastTokenizer(text_of, identity, Library.from_str(text_of))
    ids = opened.encode(text)
    assert opened.decode(ids) == text
    assert opened.encode_batch([text, text]) == [ids, ids]
    if text.isascii():
        assert "".join(opened.pieces(ids)) == text


def test_what_lay_beside_a_tokenizer_travels_with_it_and_changes_no_identity(small, tmp_path):
    small.save(tmp_path / "plain")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(small.source, "utf-8")
    plain = open_tokenizer("HuggingFaceTokenizer", model=folder)
    files = {"tokenizer_config.json": b'{"model_max_length": 7}', "chat_template.jinja": b"{{ messages }}"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("not of the tokenizer", "utf-8")
    opened = open_tokenizer("HuggingFaceTokenizer", model=folder)
    assert opened.identity == plain.identity
    pickle.loads(pickle.dumps(opened)).save(tmp_path / "saved")
    assert open_tokenizer_folder(tmp_path / "saved").companions == files == opened.companions
    assert plain.companions == open_tokenizer_folder(tmp_path / "plain").companions == {}


@pytest.mark.parametrize("library", ["orjson", "no orjson"])
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=()), max_size=3),
        st.integers(0, 9) | st.just(1 << 70) | st.floats() | st.none() | st.booleans(),
        max_size=12,
    )
)
def test_a_hash_is_that_of_the_sorted_json_whatever_the_words(library, vocab):
    model = {"type": "WordPiece", "vocab": vocab}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer"))
    text = json.dumps({"model": model, "added_tokens": [], **parts}, sort_keys=True)
    with pytest.MonkeyPatch.context() as patch:
        if library != "orjson":
            patch.setitem(sys.modules, library.removeprefix("no "), None)
        assert content_sha256({"model": model}) == hashlib.sha256(text.encode()).hexdigest()


def test_the_end_of_a_document_cannot_be_written_in_a_text(small):
    ids = small.encode("<|endoftext|>")
    assert small.identity.eod not in ids
    assert small.decode([*ids, small.identity.eod]) == "<|endoftext|><|endoftext|>"


def test_a_piece_of_a_character_is_a_replacement_character_and_a_padding_row_is_nothing(small):
    ids = small.encode("é")
    assert small.pieces([*ids, small.identity.eod, 9999]) == ["�", "�", "<|endoftext|>", ""]
    assert small.decode([*ids, 9999]) == "é"
    assert small.decode(ids[:1]) == "�"


def test_a_surrogate_half_is_refused_as_the_clients_mistake(small):
    with pytest.raises(RequestError, match="surrogate"):
        small.encode("\ud800")
    with pytest.raises(RequestError, match="surrogate"):
        small.encode_batch(["fine", "\ud800"])


def test_null_text_is_its_ids():
    opened = null(10)
    assert (opened.identity.vocab_size, opened.identity.eod) == (11, 10)
    assert opened.encode(" 3 0\n10 ") == [3, 0, 10]
    assert opened.decode([3, 0, 10]) == "3 0 10"


@pytest.mark.parametrize("word", ["11", "-1", "x", "1.0", "²", "9" * 5000])
def test_null_text_that_is_no_id_is_refused(word):
    with pytest.raises(RequestError, match="integers below 11"):
        null(10).encode(f"1 {word}")


@pytest.mark.parametrize("kind", ["fast", "null"])
def test_a_saved_tokenizer_opens_as_the_same_and_a_second_save_replaces_the_first(kind, small, tmp_path):
    opened = small if kind == "fast" else null()
    folder = tmp_path / "corpus.tokenizer"
    null(3).save(folder)
    opened.save(folder)
    reopened = open_tokenizer_folder(folder)
    assert reopened.identity == opened.identity
    assert reopened.encode("1 2") == opened.encode("1 2")
    assert [path.name for path in tmp_path.glob("corpus*")] == ["corpus.tokenizer"]
    assert pickle.loads(pickle.dumps(reopened)).encode("7 1") == opened.encode("7 1")


def test_a_saved_folder_opens_as_a_hugging_face_model(small, tmp_path):
    small.save(tmp_path / "t")
    assert open_tokenizer("HuggingFaceTokenizer", model=tmp_path / "t").identity == small.identity
    null().save(tmp_path / "n")
    with pytest.raises(ConfigError, match="--vocab-size 10"):
        open_tokenizer("HuggingFaceTokenizer", model=tmp_path / "n")


def test_a_save_that_fails_leaves_the_earlier_folder(small, tmp_path, monkeypatch):
    null().save(tmp_path / "t")

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        small.save(tmp_path / "t")
    monkeypatch.undo()
    assert open_tokenizer_folder(tmp_path / "t").identity == null().identity
    assert len(list(tmp_path.glob("t*"))) == 1


def test_how_a_tokenizer_json_is_written_does_not_change_its_hash_and_a_merge_does(small, tmp_path):
    small.save(tmp_path / "t")
    content = json.loads((tmp_path / "t/tokenizer.json").read_text("utf-8"))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["model"]["dropout"] = None
    del content["pre_tokenizer"]["use_regex"]
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(content, indent=3), "utf-8")
    assert open_tokenizer_folder(tmp_path / "t").identity == small.identity
    content["model"]["merges"] = []
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(FormatError, match="does not match identity.json"):
        open_tokenizer_folder(tmp_path / "t")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": 2}, "format number: found 2, wanted 1"),
        ({"vocab_size": 0}, "vocab_size: not a count: found 0"),
        ({"vocab_size": 300}, "vocab_size: found 300, wanted 258 as in tokenizer.json"),
        ({"eod": 258}, "eod: outside the vocabulary: found 258"),
        ({"type": "Other"}, "type: unknown: found Other"),
        ({"sha256": ""}, "sha256: length"),
        ({"more": 1}, "keys of a tokenizer identity"),
    ],
)
def test_an_identity_that_was_changed_is_refused(change, line, small, tmp_path):
    small.save(tmp_path / "t")
    path = tmp_path / "t/identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **change}), "utf-8")
    with pytest.raises(FormatError, match=line):
        open_tokenizer_folder(tmp_path / "t")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[]", b'{"model": 1}'])
@pytest.mark.parametrize("name", ["identity.json", "tokenizer.json"])
def test_a_file_that_is_something_else_is_refused(name, content, small, tmp_path):
    small.save(tmp_path / "t")
    (tmp_path / "t" / name).write_bytes(content)
    with pytest.raises(FormatError, match=name):
        open_tokenizer_folder(tmp_path / "t")


def test_a_missing_file_is_named(tmp_path, files):
    with pytest.raises(FormatError, match=r"identity.json: not readable"):
        open_tokenizer_folder(tmp_path)
    with pytest.raises(FormatError, match=r"tokenizer.json: not readable"):
        open_tokenizer("HuggingFaceTokenizer", model=tmp_path)
    with pytest.raises(FormatError, match=r"nothing.txt: not readable"):
        open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=tmp_path / "nothing.txt")


def test_vocabulary_and_merges_that_do_not_fit_are_refused(tmp_path, files):
    files[1].write_text("h e\nzz q\n", "utf-8")
    with pytest.raises(FormatError, match=r"vocab.json with .*merges.txt: not a tokenizer.json"):
        open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    files[0].write_text('{"a": 0}', "utf-8")
    with pytest.raises(FormatError, match="not a GPT-2 vocabulary"):
        open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])


def test_a_lazy_tokenizer_raises_the_errors_of_its_library_when_it_opens(tmp_path, files):
    files[1].write_text("h e\nhe x\nx no-word\n", "utf-8")
    opened = open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1], lazy=True)
    assert isinstance(opened, FastTokenizer)
    with pytest.raises(FormatError, match=r"vocab.json with .*merges.txt: not a tokenizer.json"):
        opened.open()


def test_a_lazy_tokenizer_has_the_source_and_the_ids_of_one_that_is_open(files):
    vocab, merges = files
    now = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    later = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges, lazy=True)
    sent = pickle.loads(pickle.dumps(later))
    text = 'the lower newest " \\ low'
    assert sent.encode(text) == later.encode(text) == now.encode(text) != []
    assert later.source == now.source == json.dumps(json.loads(now.source), ensure_ascii=False)
    assert pickle.loads(pickle.dumps(later)).source == now.source


def test_a_library_refuses_a_vocabulary_by_lines_and_columns_of_the_source(tmp_path, files):
    vocab, merges = files
    merges.write_text(merges.read_text("utf-8") + "zz yy xx\n", "utf-8")
    content = gpt2(json.loads(vocab.read_text("utf-8")), merges.read_text("utf-8").splitlines()[1:])
    source = json.dumps(_with_lists(content), ensure_ascii=False)
    with pytest.raises(FormatError) as wanted:
        open_library(source, "here")
    with pytest.raises(FormatError) as found:
        open_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    assert found.value.found == wanted.value.found


def test_the_content_is_that_of_the_source_each_time_it_is_asked_for(files):
    opened = open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1], lazy=True)
    assert isinstance(opened, FastTokenizer)
    assert _with_lists(opened.content()) == opened.content() == json.loads(opened.source)


def _with_lists(content):
    """Return a content whose merges are lists of tokens."""
    model = content["model"]
    return {**content, "model": {**model, "merges": [line.split(" ") for line in model["merges"]]}}


@pytest.mark.parametrize(
    ("vocab", "line"),
    [
        ('{"<|endoftext|>": 0,}', "vocab.json: not JSON: found Expecting property name"),
        ('\ufeff{"<|endoftext|>": 0}', "vocab.json: not JSON: found Unexpected UTF-8 BOM"),
        ('{"<|endoftext|>": 0.0}', "not a GPT-2 vocabulary"),
        ("[0]", "not a GPT-2 vocabulary"),
    ],
)
def test_a_file_that_is_not_a_vocabulary_has_the_error_of_json(files, vocab, line):
    files[0].write_text(vocab, "utf-8")
    with pytest.raises(FormatError) as error:
        open_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    assert line in str(error.value)


@settings(max_examples=200, deadline=None)
@given(
    merges=st.lists(
        st.text(st.sampled_from(' ab\\"\n\r\u0120\u00e9\U0001f642\ud800,]['), max_size=6), max_size=5
    ),
    words=st.lists(st.sampled_from(["a", "\x00merges", '"\x00merges', "\u0120a"]), max_size=3, unique=True),
    escapes=st.booleans(),
    sorts=st.booleans(),
)
def test_merges_that_are_lines_are_written_as_json_writes_lists(merges, words, escapes, sorts):
    vocab = {word: number for number, word in enumerate(words)}
    content = {"version": "1.0", "model": {"vocab": vocab, "merges": merges, "type": "BPE"}, "decoder": None}
    wanted = json.dumps(_with_lists(content), ensure_ascii=escapes, sort_keys=sorts)
    assert dump_content(content, ensure_ascii=escapes, sort_keys=sorts) == wanted


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("HuggingFaceTokenizer", "--tokenizer-model: missing"),
        ("GPT2BPETokenizer", "--vocab-file: missing"),
        ("NullTokenizer", "--vocab-size: missing"),
        ("BertWordPieceCase", "--vocab-file: missing"),
        ("TikTokenizer", "--tokenizer-model: missing"),
        ("Llama2Tokenizer", "--tokenizer-model: missing"),
        ("SPTokenizer", "--tokenizer-type: unknown: found SPTokenizer"),
    ],
)
def test_what_a_type_is_made_from_must_be_given(kind, line):
    with pytest.raises(ConfigError, match=line):
        open_tokenizer(kind)
    with pytest.raises(ConfigError, match="--vocab-size: not a count: found 0"):
        null(0)


def test_a_dataset_of_another_tokenizer_is_refused_with_both_names():
    with pytest.raises(FormatError, match=r"corpus: .*vocab_size 11, .*wanted .*vocab_size 12"):
        check_same_tokenizer(null(10).identity, null(11).identity, "corpus")
    check_same_tokenizer(null(10).identity, null(10).identity, "corpus")


def test_an_identity_survives_its_dict():
    identity = null(5).identity
    assert TokenizerIdentity.from_dict(identity.to_dict(), "here") == identity
    with pytest.raises(FormatError, match="here: keys"):
        TokenizerIdentity.from_dict([1], "here")


def test_importing_the_module_does_not_import_tokenizers():
    code = "import sys, mega_schema.tokenizer.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("words", "most"), [(100, 4e6), (10_000, 40e6)])
def test_a_limited_cache_bounds_the_memory_of_hostile_words(
    files: tuple[Path, Path], words: int, most: float
) -> None:
    """In a process of its own: freed memory of other tests would hide the growth."""
    program = """
import sys
from pathlib import Path
import psutil
from mega_schema.tokenizer.tokenizer import open_tokenizer
tokenizer = open_tokenizer("GPT2BPETokenizer", vocab_file=Path(sys.argv[1]), merge_file=Path(sys.argv[2]))
tokenizer.limit_cache(int(sys.argv[3]))
tokenizer.encode("he")
before = psutil.Process().memory_info().rss
for number in range(2000):
    word = "".join("abcdefghij"[int(digit)] for digit in str(number))
    tokenizer.encode("abcdefghijklmnopqrst" * 12 + word)
print(psutil.Process().memory_info().rss - before)
"""
    command = [sys.executable, "-c", program, *map(str, files), str(words)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < most
    assert words == 100 or grown > 8e6  # what a limit is for
