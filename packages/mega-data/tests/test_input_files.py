"""Inputs are listed once and in order; a file that changes while it is read ends the run."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_data.extract.formats import find_inputs
from mega_data.jsonl_shards import find_shards
from mega_data.preprocess import Options, preprocess
from mega_data.readers.inputs import InputFile, expand_inputs
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def null() -> Tokenizer:
    return open_tokenizer("NullTokenizer", vocab_size=100)


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(commands, [*map(str, arguments)])


def names(root: Path, *words: object) -> list[str]:
    return [str(item.path.relative_to(root)) for item in expand_inputs([str(word) for word in words])]


def ids(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))]


def test_links_back_to_a_folder_are_followed_once(tmp_path, caplog):
    lines(tmp_path / "a.jsonl", "1")
    lines(tmp_path / "sub/b.jsonl", "2")
    (tmp_path / "sub/up").symlink_to("..")
    (tmp_path / "sub/self").symlink_to(".")
    for word in (tmp_path, f"{tmp_path}/**/*.jsonl", f"{tmp_path}/**"):
        assert names(tmp_path, word) == ["a.jsonl", "sub/b.jsonl"]
    assert "linked folders lead to folders already read" in caplog.text


def test_a_linked_folder_below_a_folder_is_read(tmp_path):
    lines(tmp_path / "real/a.jsonl", "1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/linked").symlink_to("../real")
    assert names(tmp_path, tmp_path / "in") == ["in/linked/a.jsonl"]
    assert [p.name for p in find_shards([tmp_path / "in"])] == ["a.jsonl"]
    (tmp_path / "real/page.html").write_text("<html>")
    assert [p.name for p in find_inputs([tmp_path / "in"])] == ["page.html"]


@pytest.mark.parametrize("word", ["in", "in/*.jsonl", "in/**/*.jsonl", "in/x.jsonl"])
def test_a_link_to_nothing_is_refused(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "in/a.jsonl", "1")
    (tmp_path / "in/x.jsonl").symlink_to("nothere")
    with pytest.raises(ConfigError, match=r"--input: a broken link: found in/x.jsonl -> nothere; hint: is"):
        expand_inputs([word])
    with pytest.raises(ConfigError, match="a broken link"):
        find_inputs([word])


def test_a_file_that_is_named_several_times_is_read_once(tmp_path, caplog):
    first = lines(tmp_path / "in/a.jsonl", "1")
    (tmp_path / "link.jsonl").symlink_to(first)
    words = (first, first, tmp_path / "in", tmp_path / "link.jsonl", tmp_path / "in/*")
    assert names(tmp_path, *words) == ["in/a.jsonl"]
    assert "--input: 4 files named more than once, read once" in caplog.text


def test_a_glob_takes_the_folders_it_matches_as_a_shell_would(tmp_path):
    lines(tmp_path / "a/x.jsonl", "1")
    lines(tmp_path / "b.jsonl", "1")
    assert names(tmp_path, tmp_path / "*") == names(tmp_path, tmp_path / "a", tmp_path / "b.jsonl")


def test_a_dataset_of_several_splits_is_refused_by_name(tmp_path):
    for split in ("test", "train"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        for name in ("state.json", "data-0.arrow"):
            (tmp_path / "saved" / split / name).touch()
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"several splits of a dataset: found .*saved: test, train; hint: --input"
    ):
        expand_inputs([str(tmp_path)])
    assert names(tmp_path, tmp_path / "saved/train") == ["saved/train/data-0.arrow"]


def test_a_folder_with_outputs_of_ours_is_an_input_again(tmp_path, caplog):
    folder = tmp_path / "data"
    lines(folder / "a.jsonl", "1", "2", "wrong")
    flags = ["--output-prefix", folder / "corpus", *NULL, "--on-error", "skip"]
    for word in (folder, folder, f"{folder}/*", f"{folder}/**/*"):
        assert call("preprocess", "--input", word, *flags).exit_code == 0
        assert ids(folder / "corpus_text_document") == [[1], [2]]
    assert "read without outputs of mega-data" in caplog.text
    assert (folder / "corpus_quarantine.jsonl").exists()
    quarantine = lines(folder / "of_mine_quarantine.jsonl", "3")
    assert quarantine.name in [item.path.name for item in expand_inputs([str(folder)])]


def test_pages_and_a_tokenizer_below_the_input_folder_are_not_read_again(tmp_path):
    lines(tmp_path / "in/a.jsonl", "one two three")
    (tmp_path / "in/p.html").write_text("<html><body><p>A paragraph that is long enough to be text.</p>")
    for name, *flags in (("extract",), ("train-tokenizer", "--vocab-size", "300")):
        words = [name, "--input", tmp_path / "in", "--output", tmp_path / "in" / name, *flags]
        first = call(*words)
        assert first.exit_code == 0, first.exception
        assert call(*words).stdout == first.stdout
    assert "1 document" in call("extract", *words[1:3], "--output", tmp_path / "other").stdout
    assert names(tmp_path, tmp_path / "in") == ["in/a.jsonl", "in/extract/p.html.jsonl"]


def test_files_of_other_forms_in_a_folder_are_counted(tmp_path, caplog):
    lines(tmp_path / "a.jsonl", "1")
    for name in ("b.yaml", "c.yaml", "README"):
        (tmp_path / name).touch()
    assert names(tmp_path, tmp_path) == ["a.jsonl"]
    assert "skipped 3 files of other formats: 2 .yaml, 1 no ending" in caplog.text


@pytest.mark.parametrize("ending", [".gzip", "", ".zstd", ".bz", ".lzma2"])
def test_a_compressed_file_is_unpacked_whatever_its_name(tmp_path, ending):
    pack = {".zstd": "zst", ".bz": "bz2", ".lzma2": "xz"}.get(ending, "gz")
    data = b'{"text": "1"}\n'
    path = tmp_path / f"a.jsonl{ending}"
    if pack == "zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(data))
    else:
        path.write_bytes({"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[pack](data))
    assert call("preprocess", "--input", path, "--output-prefix", tmp_path / "p", *NULL).exit_code == 0
    assert ids(tmp_path / "p_text_document") == [[1]]
    steps = ["--output", tmp_path / "out", "--step", "length"]
    assert call("clean", "--input", path, *steps).exit_code == 0
    assert b"".join(p.read_bytes() for p in (tmp_path / "out").glob("a*")) == data


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        (
            "a.json",
            b'[{"text": "x"}]',
            "is one JSON array: wanted JSON lines in UTF-8, an object a line; hint: jq -c",
        ),
        ("a.json", b'[\n  {"text": "x"}\n]', "is one JSON array"),
        ("a.json", b'{\n  "text": "x"\n}\n', "is JSON over several lines"),
        ("a.jsonl", b"PAR1xxxx", "is a Parquet file"),
        ("a.jsonl", b"PK\x03\x04xx", "is a zip archive"),
        ("a.txt", "x".encode("utf-16"), "is UTF-16"),
        ("a.jsonl", b"<html>", "is XML or HTML"),
        ("a.tar", b"x" * 257 + b"ustar\0", "is a tar archive"),
    ],
)
def test_a_form_that_is_not_read_is_named(tmp_path, name, head, message):
    path = tmp_path / name
    path.write_bytes(head)
    outcome = call(
        "preprocess", "--input", path, "--output-prefix", tmp_path / "p", *NULL, "--on-error", "skip"
    )
    assert isinstance(outcome.exception, ConfigError)
    assert f"{path}: {message}" in str(outcome.exception)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_pipe_is_an_input_of_preprocess_and_refused_by_name_elsewhere(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for data in (b'{"text": "1 2"}\n' * 3, gzip.compress(b'{"text": "1 2"}\n' * 3)):
        writer = threading.Thread(target=pipe.write_bytes, args=(data,))
        writer.start()
        assert call("preprocess", "--input", pipe, "--output-prefix", tmp_path / "p", *NULL).exit_code == 0
        writer.join()
        assert ids(tmp_path / "p_text_document") == [[1, 2]] * 3
    for command, *flags in (("clean", "--step", "length"), ("dedup",), ("extract",)):
        outcome = call(command, "--input", pipe, "--output", tmp_path / "out", *flags)
        assert "--input: a pipe is read once, and this command reads twice" in str(outcome.exception)


def test_stdin_may_be_compressed_and_named_twice(tmp_path):
    words = ["preprocess", "--input", "-", "-", "--output-prefix", str(tmp_path / "p"), *NULL]
    data = gzip.compress(b'{"text": "1"}\n')
    process = subprocess.run(
        [sys.executable, "-m", "mega_data", *words], input=data, capture_output=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert ids(tmp_path / "p_text_document") == [[1]]


def test_a_list_with_an_item_that_is_no_string_is_a_fault(tmp_path):
    path = tmp_path / "a.jsonl"
    items = ["null", "0", "false", "[]", "{}", '""']
    path.write_text("".join(f'{{"text": ["1", {item}]}}\n' for item in items))
    result = preprocess([path], tmp_path / "p", null(), Options(skip=True))
    assert (result.skipped, ids(result.prefixes[0])) == (5, [[1]])
    with pytest.raises(FormatError, match=r"a.jsonl:1: an item of 'text': found NoneType, wanted a string"):
        preprocess([path], tmp_path / "q", null())


def test_nan_and_a_byte_order_mark_are_read_as_python_reads_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "1"}\n{"text": "2", "score": NaN}\n{"x": -Infinity, "text": "3"}\n'
    )
    assert ids(preprocess([path], tmp_path / "p", null()).prefixes[0]) == [[1], [2], [3]]
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"\xef\xbb\xbf4 5\r\n\r\n6\n")
    result = preprocess([plain], tmp_path / "q", null(), Options(unit="paragraph"))
    assert ids(result.prefixes[0]) == [[4, 5], [6]]
    path.write_bytes(b'{"text": "x", "score": NaN\n')
    with pytest.raises(FormatError, match="not JSON"):
        preprocess([path], tmp_path / "p", null())


def change(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut off at a line's end":
        os.truncate(path, data.index(b"\n", len(data) * 3 // 4) + 1)
    elif how == "cut off within a line":
        os.truncate(path, len(data) * 3 // 4)
    elif how == "rewritten":
        path.write_bytes(data[: data.index(b"\n") + 1] * 3)
    elif how == "replaced":
        replacement = path.with_suffix(".new")
        replacement.write_bytes(data.replace(b"1", b"2"))
        replacement.replace(path)
    else:
        path.unlink()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("how", "packing"),
    [
        ("cut off at a line's end", ""),
        ("cut off within a line", ""),
        ("rewritten", ""),
        ("replaced", ""),
        ("deleted", ""),
        ("replaced", ".gz"),
        ("deleted", ".gz"),
    ],
)
def test_an_input_that_changes_during_a_run_ends_it(tmp_path, how, packing, workers):
    path = tmp_path / f"a.jsonl{packing}"
    data = b'{"text": "1 1 1 1"}\n' * 40_000
    path.write_bytes(gzip.compress(data) if packing else data)
    calls = 0

    def progress(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            change(path, how)

    with pytest.raises(FormatError, match=r"a\.jsonl(\.gz)?: changed while it was read: found "):
        preprocess(
            [InputFile(path, "jsonl")],
            tmp_path / "p",
            null(),
            Options(skip=True),
            workers=workers,
            block=1 << 16,
            progress=progress,
        )
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("p")] == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_file_is_left_with_on_error_skip_and_the_next_is_read(tmp_path, workers):
    good = lines(tmp_path / "in/c.jsonl", "7 8")
    whole = gzip.compress("".join(f'{{"text": "{n % 90}"}}\n' for n in range(30_000)).encode())
    for name in ("a", "b"):
        (tmp_path / f"in/{name}.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    inputs = [InputFile(tmp_path / f"in/{name}", "jsonl") for name in ("a.jsonl.gz", "b.jsonl.gz", good.name)]
    with pytest.raises(FormatError, match=r"a.jsonl.gz: damaged: found "):
        preprocess(inputs, tmp_path / "p", null(), workers=workers)
    result = preprocess(inputs, tmp_path / "p", null(), Options(skip=True), workers=workers, block=1 << 14)
    data = IndexedDataset(result.prefixes[0])
    half = (len(data) - 1) // 2
    assert half > 1000
    assert [data[i].tolist() for i in (0, half - 1, half, len(data) - 1)] == [
        [0],
        [(half - 1) % 90],
        [0],
        [7, 8],
    ]
    apart = [json.loads(line) for line in result.quarantine.read_bytes().splitlines()]
    assert [(row["file"], row["line"]) for row in apart] == [
        (str(item.path), half + 1) for item in inputs[:2]
    ]
    assert apart[0]["reason"].startswith("damaged: found ")
    for command, *how in (("clean", "--step", "length"), ("dedup", "--preset", "exact")):
        flags = ["--input", tmp_path / "in", "--workers", workers]
        error = call(command, *flags, "--output", tmp_path / f"{command}.out", *how).exception
        # with two workers either of the damaged files may be the first
        assert any(f"{name}.jsonl.gz: damaged" in str(error) for name in ("a", "b"))
        outcome = call(command, *flags, "--output", tmp_path / command, *how, "--on-error", "skip")
        assert outcome.exit_code == 0, outcome.exception
        assert "note: 2 lines were skipped" in outcome.stderr
        output_lines = (tmp_path / command / "a.jsonl").read_bytes().splitlines()
        assert len(output_lines) == (90 if command == "dedup" else len(output_lines)) > 80


def test_a_run_that_was_stopped_after_damage_does_not_meet_it_again(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n' * 9)[:-9])
    lines(tmp_path / "b.jsonl", *["2"] * 2000)
    inputs = [InputFile(tmp_path / name, "jsonl") for name in ("a.jsonl.gz", "b.jsonl")]
    calls = 0

    def stop(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    small = {"block": 1 << 10, "note": 1}
    with pytest.raises(KeyboardInterrupt):
        preprocess(inputs, tmp_path / "p", null(), Options(skip=True), progress=stop, **small)
    result = preprocess(inputs, tmp_path / "p", null(), Options(skip=True), **small)
    whole = preprocess(inputs, tmp_path / "q", null(), Options(skip=True))
    assert result.skipped == whole.skipped == 1
    assert ids(result.prefixes[0]) == ids(whole.prefixes[0])
    assert result.quarantine.read_bytes() == whole.quarantine.read_bytes()
