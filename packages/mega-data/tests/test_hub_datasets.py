"""Datasets by the name `load_dataset` takes: rows of a builder over local files, and refusals in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.jsonl_shards import find_shards
from mega_data.preprocess import preprocess
from mega_data.readers.hub import HubDataset
from mega_data.readers.inputs import InputFile, expand_inputs, format_of_name
from mega_data.readers.streams import read_blocks
from mega_schema.dataset.indexed_dataset import open_dataset
from mega_schema.errors import ConfigError, MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer

ROWS = [f"{number} {number % 7}" for number in range(2500)]


class Rows:
    """A list with the interface of the library's datasets, for tests without the library."""

    def __init__(self, rows: list[str], broken: bool = False) -> None:
        self.rows, self.broken, self.column_names = rows, broken, ["id", "text"]

    def skip(self, count: int) -> Rows:
        return Rows(self.rows[count:], self.broken)

    def select(self, numbers: range) -> Rows:
        return Rows([self.rows[number] for number in numbers], self.broken)

    def select_columns(self, names: list[str]) -> Rows:
        assert names == ["text"]
        return self

    def with_format(self, form: str) -> Rows:
        assert form == "arrow"
        return self

    def __len__(self) -> int:
        return len(self.rows)

    def iter(self, size: int) -> Iterator[Any]:
        pyarrow = pytest.importorskip("pyarrow")
        for position in range(0, len(self.rows), size):
            if self.broken and position:
                raise TimeoutError("the network went away\nand more lines")
            yield pyarrow.table({"text": self.rows[position : position + size]})


class Builder:
    hash = "0123"

    def __init__(self, broken: bool) -> None:
        self.broken, self.prepared = broken, False

    def as_streaming_dataset(self, split: str) -> Rows:
        if split != "train":
            raise ValueError(f"Bad split: {split}. Available splits: ['train']")
        return Rows(ROWS, self.broken)

    def download_and_prepare(self) -> None:
        self.prepared = True

    def as_dataset(self, split: str) -> Rows:
        assert self.prepared
        assert split == "train[:10]"
        return Rows(ROWS[:10])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that knows two names, one of which breaks off."""

    def load(name: str, config: str | None, revision: str | None) -> Builder:
        if name not in ("org/rows", "org/broken"):
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub (OfflineModeIsEnabled)")
        assert (config, revision) in [(None, None), ("en", "v1")]
        return Builder(name == "org/broken")

    module = ModuleType("datasets")
    vars(module)["load_dataset_builder"] = load
    monkeypatch.setitem(sys.modules, "datasets", module)


def read(word: str, start: int = 0, size: int = 1 << 20) -> list[str]:
    (item,) = expand_inputs([word])
    texts = [block.rows(["text"]).texts for block in read_blocks(item, start, keys=["text"], size=size)]
    return [str(text) for rows in texts for (text,) in rows]


@pytest.mark.usefixtures("library")
def test_a_name_gives_its_rows_from_any_place_on() -> None:
    assert read("hf:org/rows") == ROWS == read("hf:org/rows:config=en,revision=v1", size=900)
    assert read("hf:org/rows", start=2345) == ROWS[2345:]
    assert read("hf:org/rows:split=train[:10]", start=3) == ROWS[3:10]
    (item,) = expand_inputs(["hf:org/rows"])
    all_blocks = list(read_blocks(item, keys=["text"], size=1000))
    assert len(all_blocks) > 5
    assert read("hf:org/rows", start=all_blocks[2].end) == ROWS[all_blocks[2].end :]
    assert (item.size, item.state()) == (0, ["hf:org/rows", "0123"])
    assert InputFile(item.path, format_of_name(item.path)) == item


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hf:org/none", "hf:org/none: not a dataset that can be read: found ConnectionError: Couldn't reach"),
        (
            "hf:org/rows:split=test",
            "found ValueError: Bad split: test. Available splits: ['train']; hint: hf:NAME",
        ),
        ("hf:org/rows:splt=test", "--input: no option of hf:org/rows: found splt=test, wanted split=... |"),
        (
            "hf:org/broken",
            "hf:org/broken: not read to its end: found TimeoutError: the network went away; hint:",
        ),
    ],
)
def test_errors_of_a_dataset_by_name_are_one_line(word: str, message: str) -> None:
    with pytest.raises(MegaError) as error:
        read(word)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("library")
def test_a_missing_column_is_named_and_clean_wants_files() -> None:
    with pytest.raises(
        ConfigError, match=r"hf:org/rows: no column 'body': found id, text; hint: see --json-key"
    ):
        list(HubDataset.parse("hf:org/rows").batches(["body"], 0))
    with pytest.raises(
        ConfigError, match=r"not a dataset name: found hf:org/rows; hint: datasets\.load_dataset\('org"
    ):
        find_shards(["hf:org/rows"])


@pytest.mark.usefixtures("library")
def test_a_network_that_breaks_off_leaves_what_was_read(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=3000)
    with pytest.raises(MegaError, match="run the same command again to resume"):
        preprocess(expand_inputs(["hf:org/broken"]), tmp_path / "out", tokenizer, block=100, note=100)
    assert (tmp_path / "out.unfinished/journal.json").exists()
    assert not (tmp_path / "out_text_document.idx").exists()


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"hf:org/rows: needs a library.*hint: pip install .*mega-data\[datasets\]"
    ):
        read("hf:org/rows")


OURS = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from mega_data.cli import commands
told = []
for words in json.loads(sys.argv[1]):
    outcome = CliRunner().invoke(commands, ["preprocess", *words])
    told.append([outcome.exit_code, str(outcome.exception)])
print(json.dumps(told))
"""


def test_the_library_itself_builds_from_local_files_and_is_refused_a_name_without_a_network(
    tmp_path: Path,
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    text = "".join(json.dumps({"id": n, "text": row}) + "\n" for n, row in enumerate(ROWS))
    (tmp_path / "rows/a.jsonl").write_text(text)
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "3000"]
    words = ["hf:rows", "hf:rows:split=train[:10]", "rows/a.jsonl", "hf:rows:split=test", "hf:nobody/nothing"]
    calls = [["--input", word, "--output-prefix", f"out{n}", *flags] for n, word in enumerate(words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    process = subprocess.run(
        [sys.executable, "-c", OURS, json.dumps(calls)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    reply = json.loads(process.stdout.splitlines()[-1])
    assert [code for code, _ in reply[:3]] == [0, 0, 0], reply
    streamed, part, plain = (open_dataset(tmp_path / f"out{n}_text_document") for n in range(3))
    assert all(np.array_equal(streamed[n], plain[n]) for n in range(len(ROWS)))
    assert (len(streamed), len(part)) == (len(ROWS), 10)
    assert reply[3][1].startswith(
        "hf:rows:split=test: not a dataset that can be read: found ValueError: Bad split"
    )
    assert reply[4][1].startswith("hf:nobody/nothing: not a dataset that can be read: found ConnectionError")
    assert "is the network there?" in reply[4][1]


def test_a_mistaken_key_is_answered_by_the_command(tmp_path: Path) -> None:
    words = ["preprocess", "--input", "hf:a/b:spilt=x", "--output-prefix", str(tmp_path / "o")]
    outcome = CliRunner().invoke(commands, [*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"])
    assert "did you mean split?" in str(outcome.exception)
