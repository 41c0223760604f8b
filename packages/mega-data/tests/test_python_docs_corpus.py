"""The sample corpus is a function of the packages, and its two parts share no text."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from mega_data.python_docs_corpus import MIN_CHARACTERS, collect, write_documents
from mega_schema.errors import ConfigError

WORDS = (
    "a sentence that is long enough to be taken for text, because it goes on and on until at last it is one;"
)


def package(root: Path, modules: int = 60) -> Path:
    for number in range(modules):
        path = root / f"pack{number % 3}" / f"mod{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        doc = f"{number} {WORDS}\n\n        More of {number}."
        path.write_text(f'class C:\n    def f(self):\n        """{doc}"""\n', "utf-8")
    return root


def test_the_same_modules_elsewhere_and_by_other_workers_give_the_same_sample(tmp_path):
    first = collect(10**6, held_out_fraction=0.3, roots=[package(tmp_path / "here")])
    two = collect(10**6, held_out_fraction=0.3, roots=[package(tmp_path / "there" / "deep")], workers=2)
    assert first == two
    assert len(first.train) + len(first.held_out) == 60
    assert 5 < len(first.held_out) < 35
    assert first.train[0].source.startswith("pack")


def test_a_docstring_loses_its_indentation(tmp_path):
    sample = collect(10**6, roots=[package(tmp_path, 1)])
    assert [document.text for document in sample.train] == [f"0 {WORDS}\n\nMore of 0."]


def test_equal_texts_are_one_document_and_never_on_both_sides(tmp_path):
    for number in range(40):
        text = f'"""{WORDS}{number % 4}"""\ndef f():\n    "{WORDS} unique {number}"'
        (tmp_path / f"m{number}.py").write_text(text)
    sample = collect(10**6, held_out_fraction=0.5, roots=[tmp_path])
    train, held_out = ([document.text for document in part] for part in (sample.train, sample.held_out))
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert len(train) + len(held_out) == 44
    assert {text for text in train if "unique" not in text} == {f"{WORDS}{number}" for number in range(4)}
    sources = {document.source for document in sample.train}
    assert not sources & {document.source for document in sample.held_out}


@pytest.mark.parametrize("size", [1, 500, 3000])
def test_training_text_is_as_much_as_asked_or_one_document_more(size, tmp_path):
    sample = collect(size, roots=[package(tmp_path)])
    last = len(sample.train[-1].text.encode())
    assert size <= sample.train_bytes < size + last
    all_texts = collect(10**6, roots=[tmp_path])
    assert {document.text for document in sample.train} <= {document.text for document in all_texts.train}


def test_files_that_are_not_python_and_texts_that_are_not_text_are_passed_over(tmp_path):
    package(tmp_path, 1)
    bad = {
        "syntax": b"def f(:",
        "null": b"x = 1\0",
        "coding": b'# coding: ascii\n"\xff"',
        "short": f'"""{WORDS[: MIN_CHARACTERS - 1]}"""'.encode(),
        "half": f'"{WORDS}\\ud800"'.encode(),
        "escape": f'"{WORDS}\\d"'.encode(),
        "number": f'f"{WORDS}"'.encode(),
    }
    for name, content in bad.items():
        (tmp_path / f"{name}.py").write_bytes(content)
    (tmp_path / "not-a-module.py").write_text(f'"""{WORDS} not a module"""')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text(f'"""{WORDS} a test"""')
    sources = {document.source for document in collect(10**6, roots=[tmp_path]).train}
    assert sources == {"pack0.mod0", "escape"}


def test_the_topics_of_help_are_documents_each_its_own_source(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(
        f"topics = {{'if': '''\n{WORDS} if\n''', 'is': 'short'}}"
    )
    (document,) = collect(10**6, roots=[tmp_path]).train
    assert (document.text, document.source) == (f"{WORDS} if", "pydoc_data.topics:if")


def test_this_python_carries_text_and_its_modules_are_not_run(tmp_path):
    sample = collect(300_000, held_out_fraction=0.02)
    assert sample.train_bytes >= 300_000
    assert all(len(document.text) >= MIN_CHARACTERS for document in sample.train)
    (tmp_path / "boom.py").write_text(f'"""{WORDS}"""\nraise SystemExit("was run")')
    assert len(collect(1, roots=[tmp_path]).train) == 1


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(ConfigError, match=f"--held-out-fraction: not a fraction: found {fraction}"):
        collect(1, held_out_fraction=fraction)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    sample = collect(10**6, roots=[package(tmp_path / "p", 3)])
    write_documents(tmp_path / "out" / "c.jsonl", sample.train)
    lines = (tmp_path / "out" / "c.jsonl").read_bytes().splitlines()
    wanted = [{"text": document.text, "source": document.source} for document in sample.train]
    assert [orjson.loads(line) for line in lines] == wanted

    def stops():
        yield sample.train[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_documents(tmp_path / "out" / "d.jsonl", stops())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.jsonl"]
