"""A damaged file ends a run, or with --on-error skip is named and skipped from the damage on."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import lz4.frame
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from click.testing import CliRunner, Result

from mega_data.cli import commands
from mega_data.error_limit import ErrorLimit, TooManyErrors
from mega_data.preprocess import Options, preprocess
from mega_data.readers.blocks import Block, JsonLines
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import read_range, split_inputs
from mega_data.readers.streams import read_blocks
from mega_schema import remote_files
from mega_schema.errors import ConfigError, CorruptFileError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from tests.web_server import serve_files

ROWS = [{"text": " ".join(str(n * word % 97) for word in range(1, 40))} for n in range(1, 400)]
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


def lines(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def truncated_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(lines(ROWS[:300]))[:-2000])


def wrong_frame(path: Path) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    frames = [bytearray(compressor.compress(lines(ROWS[start : start + 100]))) for start in (0, 100, 200)]
    frames[1][len(frames[1]) // 2] ^= 255
    path.write_bytes(b"".join(frames))


def no_footer(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:300]), path)
    path.write_bytes(path.read_bytes()[:-100])


def other_format(path: Path) -> None:
    path.write_bytes(lines(ROWS[:300]))


FILES: dict[str, Callable[[Path], None]] = {
    "b.jsonl.gz": truncated_gzip,
    "b.jsonl.zst": wrong_frame,
    "b.parquet": no_footer,
    "b.jsonl.xz": other_format,
}
ROWS_BEFORE = {"b.jsonl.gz": 50, "b.jsonl.zst": 100, "b.parquet": 0, "b.jsonl.xz": 0}  # at least
COMMANDS = ("preprocess", "preprocess --executor local", "clean --step whitespace", "dedup --preset exact")


def corpus(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(ROWS[300:350]))
    FILES[name](folder / name)
    (folder / "c.jsonl").write_bytes(lines(ROWS[350:]))
    return folder


def call(command: str, folder: object, output: Path, *more: str) -> Result:
    words = [*command.split(), "--input", str(folder), *more]
    words += (
        ["--output-prefix", str(output / "p"), *NULL]
        if "preprocess" in command
        else ["--output", str(output)]
    )
    return CliRunner().invoke(commands, words)


def read_quarantine(output: Path) -> list[dict[str, Any]]:
    paths = [
        *output.glob("*quarantine.jsonl"),
        *(path for path in output.rglob("quarantine/**/*") if path.is_file()),
    ]
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_file_is_named_and_the_rows_before_the_damage_and_of_other_files_are_kept(
    command: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = corpus(tmp_path / "in", name)
    failed = call(command, folder, tmp_path / "out")
    assert isinstance(failed.exception, CorruptFileError)
    assert str(failed.exception).startswith(f"{folder / name}: damaged: found ")
    result = call(command, folder, tmp_path / "out", "--on-error", "skip")
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"{folder / name}: damaged: found " in result.stderr + caplog.text
    assert "the rest of it" in result.stderr + caplog.text
    row = read_quarantine(tmp_path / "out")
    assert [(row[0]["file"], row[0]["row"], len(row))] == [(str(folder / name), "", 1)]
    assert ROWS_BEFORE[name] <= row[0]["line"] - 1 <= 300 * (ROWS_BEFORE[name] > 0)
    if command.startswith("clean"):
        report = json.loads((tmp_path / "out/report.json").read_bytes())
        assert [why.partition(": found")[0] for why in report["damaged"]] == [f"{folder / name}: damaged"]
        assert report["steps"][0]["documents_in"] == 99 + row[0]["line"] - 1
    with pytest.raises(TooManyErrors, match="--max-errors: any damaged file is above the limit"):
        raise (
            call(command, folder, tmp_path / "o", "--on-error", "skip", "--max-errors", "99%").exception
            or AssertionError
        )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz"])
def test_a_file_that_may_not_be_read_is_skipped(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner of a shard had removed its permissions: the run ended without a way to go on."""
    folder = corpus(tmp_path / "in", "b.jsonl.gz")
    (folder / "b.jsonl.gz").replace(folder / name)
    path_open = Path.open

    def refuse(path: Path, *rest: Any, **more: Any) -> Any:
        if path.name == name and path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return path_open(path, *rest, **more)

    monkeypatch.setattr(Path, "open", refuse)
    failed = call(command, folder, tmp_path / "out")
    wanted = (
        f"{folder / name}: not readable: found Permission denied; hint: check its permissions and its disk"
    )
    assert str(failed.exception) == wanted
    result = call(command, folder, tmp_path / "out", "--on-error", "skip")
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"{folder / name}: not readable: found Permission denied" in result.stderr + caplog.text


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lz4": partial(lz4.frame.compress, content_checksum=True),
}


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("seed", range(6))
def test_the_lines_before_any_damage_are_kept_and_the_loss_is_named(
    compression: str, is_cut: bool, seed: int, tmp_path: Path
) -> None:
    """A task dropped the lines of its range before the damage, and a stream did not name the byte."""
    rng = random.Random(f"{compression}{is_cut}{seed}")
    rows = [*lines(ROWS * 2).splitlines(keepends=True)]
    data = b"".join(rows)
    cuts = sorted({0, *rng.sample(range(len(data)), 20), len(data)})
    parts = [COMPRESS[compression](data[start:end]) for start, end in pairwise(cuts)]
    whole = b"".join(parts)
    damage = rng.randrange(len(whole))
    damaged_part = bisect_right([*accumulate(map(len, parts))], damage)
    damaged = bytearray(whole[:damage] if is_cut else whole)
    if not is_cut:
        damaged[damage] ^= 255
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(damaged)
    item = InputFile(path, "jsonl")
    kept_bytes = data.rfind(b"\n", 0, cuts[damaged_part]) + 1
    stream, error = read_until_damage(read_blocks(item, keys=["text"], size=5000))
    assert stream.startswith(data[:kept_bytes])
    check_error(error, path, sum(map(len, parts[:damaged_part])), damage)
    ranges = split_inputs([item], len(whole) // 4)
    errors = list[str]()
    text = b""
    for part in ranges:
        block_text, error = read_until_damage(read_range(part, ["text"], 5000, "file"))
        text += block_text
        errors += [error] if error else []
    assert text.startswith(data[:kept_bytes])
    assert set(text.splitlines()[:-1]) <= {row.strip() for row in rows} | {b""}
    assert len(errors) == (len(stream) < len(data)) or len(errors) == 1
    if errors:
        check_error(errors[0], path, sum(map(len, parts[:damaged_part])), damage)


def read_until_damage(blocks: Iterator[Block]) -> tuple[bytes, str]:
    """The text before the damage, and the error; "" for none."""
    text = b""
    try:
        for block in blocks:
            assert isinstance(block, JsonLines)
            text += block.data or b""
    except CorruptFileError as error:
        return text, str(error)
    return text, ""


def check_error(error: str, path: Path, part_start: int, damage: int) -> None:
    """Check that the named byte is in the damaged part, not after the damage."""
    place = re.search(r"from byte ([\d,]+) on; about ([\d,]+) of ([\d,]+) bytes are lost", error)
    assert place, error
    start, lost, size = (int(number.replace(",", "")) for number in place.groups())
    assert size == path.stat().st_size
    assert part_start - 1024 <= start <= damage
    assert 0 <= lost <= size - start


@pytest.mark.parametrize("compression", [".xz", ".lz4"])
@pytest.mark.parametrize("damage", [b"PADDING", b"\0\0\0\0"])
def test_a_later_stream_that_is_none_is_not_the_end_of_the_file(
    compression: str, damage: bytes, tmp_path: Path
) -> None:
    """The libraries' readers took it for the end: the streams after it were lost without an error."""
    parts = [COMPRESS[compression](lines(ROWS[start : start + 10])) for start in (0, 10)]
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(damage.join(parts))
    text, error = read_until_damage(read_blocks(InputFile(path, "jsonl"), keys=["text"], size=5000))
    if compression == ".xz" and not damage.strip(b"\0"):  # padding
        assert (text, error) == (lines(ROWS[:20]), "")
    else:
        assert text == lines(ROWS[:10])
        assert error.startswith(f"{path}: damaged: found ")


@pytest.mark.parametrize("limit", ["1%", "1000"])
@pytest.mark.parametrize("more", [(), ("--executor", "local")])
def test_a_damaged_file_is_above_any_limit(limit: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """It counted as one row: with `--max-errors 1%` half of a file was lost, and the run succeeded."""
    folder = corpus(tmp_path / "in", "b.jsonl.zst")
    words = ("--on-error", "skip", *more)
    failed = call("preprocess", folder, tmp_path / "out", *words, "--max-errors", limit)
    assert str(failed.exception).startswith("--max-errors: any damaged file is above the limit: found ")
    assert str(failed.exception).endswith("; hint: copy the file again, or run without --max-errors")
    assert not [*(tmp_path / "out").glob("*.bin")]
    assert call("preprocess", folder, tmp_path / "out", *words).exit_code == 0


def test_a_limit_counts_the_damage_that_an_earlier_process_without_one_skipped(tmp_path: Path) -> None:
    """A run that was stopped after a damaged file, and resumed with --max-errors, did not know of it."""
    folder = corpus(tmp_path / "in", "b.jsonl.zst")
    files = [folder / name for name in ("a.jsonl", "b.jsonl.zst", "c.jsonl")]
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    documents = 0

    def stop(size: int, count: int) -> None:
        nonlocal documents
        documents += count
        if documents > 160:  # in the last file
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(files, tmp_path / "p", tokenizer, Options(skip=True), block=500, note=1, progress=stop)
    limited = Options(skip=True, max_errors=ErrorLimit(count=1000))
    with pytest.raises(TooManyErrors, match=r"any damaged file is above the limit: found .*b\.jsonl\.zst"):
        preprocess(files, tmp_path / "p", tokenizer, limited, block=500, note=1)
    preprocess(files, tmp_path / "p", tokenizer, Options(skip=True), block=500, note=1)
    preprocess(files, tmp_path / "fresh", tokenizer, Options(skip=True))
    name = "_text_document.bin"
    assert (tmp_path / f"p{name}").read_bytes() == (tmp_path / f"fresh{name}").read_bytes()


def test_a_size_of_tasks_without_tasks_is_refused(tmp_path: Path) -> None:
    """It was ignored."""
    folder = corpus(tmp_path / "in", "b.jsonl.gz")
    failed = call("preprocess", folder, tmp_path / "out", "--split-mb", "1")
    assert isinstance(failed.exception, ConfigError)
    assert (
        str(failed.exception)
        == "--split-mb: has no effect without --executor: found 1; hint: --executor local --split-mb 1"
    )
    assert not (tmp_path / "out").exists()


def test_a_remote_file_that_the_server_refuses_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an archived object: the place lists it and tells its size."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote_files, "_FIRST_WAIT", 0.001)
    folder = corpus(tmp_path / "in", "b.jsonl.gz")
    with serve_files(folder) as server:
        server.denied.add("b.jsonl.gz")
        urls = [f"{server.url}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl")]
        failed = call("preprocess --executor local", urls[0], tmp_path / "out", *urls[1:])
        assert str(failed.exception) == f"{urls[1]}: access is denied: found status 403"
        result = call(
            "preprocess --executor local", urls[0], tmp_path / "out", *urls[1:], "--on-error", "skip"
        )
    assert result.exit_code == 0, (result.output, result.exception)
    assert "99 documents" in result.output
    assert f"note: {urls[1]}: access is denied: found status 403: the rest of it was skipped" in result.stderr


def test_a_large_damaged_table_is_skipped_by_its_task_and_in_a_dry_run(tmp_path: Path) -> None:
    """The plan of the tasks reads the row groups: it ended the run, also with --on-error skip."""
    folder = corpus(tmp_path / "in", "b.parquet")
    item = InputFile(folder / "b.parquet", "table")
    assert [part.is_whole for part in split_inputs([item], 100)] == [True]
    result = call("preprocess --dry-run", folder, tmp_path / "out", "--on-error", "skip")
    assert "1 of 100 rows of the sample is wrong" in result.output
    assert isinstance(call("preprocess --dry-run", folder, tmp_path / "out").exception, CorruptFileError)


def test_sentences_are_learned_from_the_whole_files(tmp_path: Path) -> None:
    """A damaged file ended a run with --split-sentences and --on-error skip before it began."""
    folder = corpus(tmp_path / "in", "b.jsonl.xz")
    inputs = [InputFile(folder / name, "jsonl") for name in ("b.jsonl.xz", "a.jsonl")]
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    result = preprocess(inputs, tmp_path / "p", tokenizer, Options(language="tr", skip=True))
    assert (result.documents, result.skipped) == (50, 1)
