"""Hints of errors about unusable datasets and vocabularies."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mega_data.cli import commands
from mega_data.preprocess import preprocess
from mega_schema.errors import MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer

CUT_OFF = "the file was cut off or written to; copy or preprocess it again"


def refusal(*words: object) -> str:
    with pytest.raises(MegaError) as caught:
        commands.main([str(word) for word in words], standalone_mode=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "a.jsonl").write_text('{"text": "1 2 3"}\n{"text": "4"}\n')
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    return preprocess([folder / "a.jsonl"], folder / "corpus", tokenizer).prefixes[0]


def overwrite(offset: int, value: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset : offset + len(value)] = value
        path.write_bytes(data)

    return damage


def with_key(key: str, value: object) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value})) and None


AGAIN = "copy it again; a dataset without this file opens too, and its tokenizer is not known"
DAMAGES = {
    "magic": (".idx", overwrite(0, b"PK\3\4"), "not an index", "mega-data preprocess makes an index of text"),
    "version": (".idx", overwrite(9, struct.pack("<Q", 2)), "version", "another version of its format"),
    "dtype": (".idx", overwrite(17, b"\x63"), "dtype code", CUT_OFF),
    "boundaries": (".idx", overwrite(26, struct.pack("<Q", 0)), "document boundaries", CUT_OFF),
    "length": (".idx", overwrite(34, struct.pack("<i", -1)), "length of a sequence", CUT_OFF),
    "pointer": (".idx", overwrite(42, struct.pack("<q", 2)), "pointer of sequence 0", CUT_OFF),
    "documents": (".idx", overwrite(58, struct.pack("<q", 1)), "document index", CUT_OFF),
    "cut off": (".idx", lambda path: path.write_bytes(path.read_bytes()[:20]), "size in bytes", CUT_OFF),
    "no .bin": (".bin", Path.unlink, "no such file", "copy it to the folder of corpus_text_document.idx"),
    "token": (".bin", overwrite(2, b"\xff\x7f"), "token 1 of sequence 0", CUT_OFF),
    "no JSON": (".json", lambda path: path.write_text("{"), "not JSON", AGAIN),
    "format": (".json", with_key("format", 9), "format number", AGAIN),
    "keys": (".json", with_key("more", 1), "keys", AGAIN),
    "count": (".json", with_key("tokens", -1), "tokens: not a count", AGAIN),
    "options": (".json", with_key("options", 1), "options and sources", AGAIN),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_dataset_is_refused_with_what_to_do(name: str, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset.parent, tmp_path / "d")
    suffix, damage, what, hint = DAMAGES[name]
    path = tmp_path / "d" / f"{dataset.name}{suffix}"
    damage(path)
    line = refusal("verify", path.with_suffix(""))
    assert line.startswith(f"{path}: {what}"), line
    assert f"; hint: {hint}" in line, line


def test_ids_above_a_vocabulary_that_a_person_names_are_not_called_damage(dataset: Path) -> None:
    line = refusal("verify", dataset, "--vocab-size", 3)
    assert line.endswith("hint: --vocab-size of the tokenizer that made the ids, or leave it out")


def test_a_path_without_a_dataset_is_refused_with_what_is_near_it(dataset: Path, tmp_path: Path) -> None:
    text, prefix = dataset.parent / "a.jsonl", dataset.parent / "a"
    for command in (("verify",), ("inspect",), ("convert", "--to", "jsonl", "--output", tmp_path / "new")):
        assert refusal(*command, dataset.parent / "corpus").endswith(f"hint: did you mean {dataset}?")
        assert refusal(*command, dataset.parent).endswith(f"hint: datasets in this folder: {dataset}")
        assert refusal(*command, text).endswith(
            f"mega-data preprocess --input {text} --output-prefix {prefix} --tokenizer-type TYPE, "
            f"then {prefix}_text_document"
        )


@pytest.fixture
def vocabularies(tmp_path: Path) -> Path:
    words = {"<|endoftext|>": 0, "a": 1}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "other.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    (tmp_path / "tik.json").write_text(json.dumps([{"rank": 0}]))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "twice.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


BERT, GPT2 = "BertWordPieceCase", "GPT2BPETokenizer"


@pytest.mark.parametrize(
    ("type", "name", "what", "hint"),
    [
        (
            BERT,
            "vocab.json",
            "no [PAD]",
            f"--tokenizer-type {GPT2} --vocab-file PATH --merge-file merges.txt",
        ),
        (BERT, "tokenizer.json", "no [PAD]", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH"),
        (BERT, "tik.json", "no [PAD]", "--tokenizer-type TikTokenizer --tokenizer-model PATH"),
        (BERT, "merges.txt", "no [PAD]", "--merge-file PATH"),
        (BERT, "twice.txt", "duplicate word", "take the files that the model was trained with"),
        (BERT, "a.jsonl", "no [PAD]", "take the files that the model was trained with"),
        (BERT, "vocab.tx", "not readable", "did you mean FOLDER/vocab.txt?"),
        (BERT, "nowhere/vocab.txt", "not readable", "there is no folder FOLDER/nowhere"),
        (BERT, ".", "not readable", "in FOLDER: merges.txt, other.json, tik.json, tokenizer.json"),
        (GPT2, "vocab.txt", "not JSON", f"or {BERT}, --vocab-file PATH"),
        (GPT2, "merges.txt", "not JSON", "--merge-file PATH"),
        (
            GPT2,
            "tokenizer.json",
            "not a GPT-2",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
        ),
        (GPT2, "other.json", "not a GPT-2", "HuggingFaceTokenizer --tokenizer-model tokenizer.json"),
    ],
)
def test_a_file_that_is_not_the_vocabulary_asked_for_is_named_with_the_flags_that_take_it(
    type: str, name: str, what: str, hint: str, vocabularies: Path
) -> None:
    path = vocabularies / name
    flags = ["--tokenizer-type", type, "--vocab-file", path, "--merge-file", vocabularies / "merges.txt"]
    words = ["--input", vocabularies / "a.jsonl", "--output-prefix", vocabularies / "new/p", *flags]
    line = refusal("preprocess", *words)
    assert line.startswith(f"{path}: {what}"), line
    assert (
        hint.replace("PATH", str(path)).replace("FOLDER", str(vocabularies)) in line.partition("; hint: ")[2]
    )
    assert not (vocabularies / "new").exists()
