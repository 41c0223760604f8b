"""Expensive set-up happens once per process, not once per task: a corpus has thousands of shards."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from mega_data.clean.registry import step_from_flag
from mega_data.clean.step import Row, Verdict
from mega_data.dedup.presets import PRESETS
from mega_data.dedup.shingles import Shingles


def forbid(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} is called again")

    patch.setattr(owner, name, refuse)


def start_step(flag: str) -> Callable[..., Verdict]:
    work = step_from_flag(flag).step.start()
    return lambda **values: work(Row({"text": "", **values}, "text", 0, 1))


def test_the_table_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Shingles(PRESETS["datatrove"]).keys(["one two three four five six"])
    monkeypatch.setattr("mega_data.dedup.shingles.unicodedata", None)
    after = Shingles(PRESETS["datatrove"]).keys(["one two three four five six"])
    assert len(after) == 2
    assert after.tolist() == before.tolist()
    assert unicodedata.category("a") == "Ll"


def test_the_model_of_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    start_step("language")
    langid = import_module("py3langid.langid")
    forbid(monkeypatch, langid.LanguageIdentifier, "from_model_file")
    assert start_step("language:keep=en")(text="The cat sat on the mat, as cats do.") != []


def test_the_rules_of_addresses_and_a_list_of_domains_that_did_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "domains"
    listed.write_text("bad.example.org\n")
    flag, url = f"urls:domains={listed}", "https://bad.example.org/page"
    assert start_step(flag)(url=url) == "domain bad.example.org"
    with monkeypatch.context() as patch:
        forbid(patch, Path, "read_text")
        forbid(patch, import_module("tldextract"), "TLDExtract")
        assert start_step(flag)(url=url) == "domain bad.example.org"
    listed.write_text("worse.example.org\n")
    assert isinstance(start_step(flag)(url=url), list)


def test_a_tokenizer_that_did_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    path = tmp_path / "tokenizer.json"
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(path))
    flag = f"tokens:minimum=3,tokenizer={path}"
    assert start_step(flag)(text="a b") == "fewer than 3 tokens"
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "Tokenizer", None)
        assert isinstance(start_step(flag)(text="a b c"), list)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": None}))
    assert start_step(flag)(text="a b c") == "fewer than 3 tokens"


def test_a_fasttext_model_that_did_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def predict(self, text: str, k: int) -> tuple[list[str], list[float]]:
            return ["__label__en"], [1.0]

    class Library:
        loaded = 0

        def load_model(self, path: str) -> Model:
            self.loaded += 1
            return Model()

    fasttext, path = Library(), tmp_path / "lid.bin"
    path.write_bytes(b"model")
    monkeypatch.setattr("mega_data.clean.classifier.import_for_step", lambda *_: fasttext)
    for shard, text in enumerate((b"model", b"model", b"another")):
        if shard == 2:
            path.write_bytes(text)
        assert isinstance(start_step(f"language:keep=en,model={path}")(text="words"), list)
    assert fasttext.loaded == 2
