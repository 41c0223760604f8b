"""After a wrong line, earlier inputs are not repeated, and the next run gives the result of a fresh run."""

from __future__ import annotations

import errno
import gzip
import json
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mega_data.error_limit import ErrorLimit, TooManyErrors
from mega_data.preprocess import Options, PreprocessResult, preprocess
from mega_data.readers.inputs import InputFile, format_of_name
from mega_data.resumable_output import ResumableOutput
from mega_schema.errors import FormatError, MegaError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from tests.selection import every_nth

SMALL = {"block": 400, "note": 1000}
KEYS = ("text", "title")
STRICT, SKIP = Options(KEYS, append_eod=True), Options(KEYS, append_eod=True, skip=True)


def null() -> Tokenizer:
    return open_tokenizer("NullTokenizer", vocab_size=100)


def rows(rng: random.Random, count: int) -> list[str]:
    def text() -> str:
        return " ".join(str(rng.randrange(100)) for _ in range(rng.randrange(20)))

    return [json.dumps({"text": text(), "title": text()}) for _ in range(count)]


def write(path: Path, lines: list[str]) -> Path:
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def corpus(folder: Path, counts: tuple[int, ...] = (40, 0, 60, 50, 30)) -> list[Path]:
    """Files of so many rows, every third of them packed."""
    names = [f"{n}.jsonl" + ".gz" * (n % 3 == 2) for n in range(len(counts))]
    rng = random.Random(7)
    return [write(folder / name, rows(rng, count)) for name, count in zip(names, counts, strict=True)]


def break_line(path: Path, line: int, wrong: str = "{oops") -> bytes:
    """Make a line wrong; what the file held before."""
    before = path.read_bytes()
    lines_before = (gzip.decompress(before) if path.suffix == ".gz" else before).decode().splitlines()
    write(path, [*lines_before[:line], wrong, *lines_before[line:]])
    return before


def size(*paths: Path) -> int:
    return sum(
        len(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        for path in paths
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check_as_of_one_run(inputs: list[Path], folder: Path, options: Options) -> PreprocessResult:
    """Resume in `folder`, and compare with an uninterrupted run."""
    result = preprocess(inputs, folder / "p", null(), options, **SMALL)
    whole = preprocess(inputs, folder.parent / "whole/p", null(), options)
    assert files(folder) == files(folder.parent / "whole")
    assert (result.documents, result.tokens, result.size, result.skipped) == (
        whole.documents,
        whole.tokens,
        whole.size,
        whole.skipped,
    )
    return result


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_line_is_mended_the_run_goes_on_with_its_file(wrong: int, workers: int, tmp_path: Path):
    inputs, out = corpus(tmp_path), tmp_path / "out"
    before = break_line(inputs[wrong], line=(40, 0, 60, 50, 30)[wrong])
    with pytest.raises(FormatError, match=rf"{wrong}\.jsonl(\.gz)?:\d+: not JSON"):
        preprocess(inputs, out / "p", null(), STRICT, workers=workers, **SMALL)
    assert [path.name for path in out.iterdir()] == ["p.unfinished"]
    inputs[wrong].write_bytes(before)
    assert check_as_of_one_run(inputs, out, STRICT).fresh == size(*inputs[wrong:])


def test_wrong_lines_passed_over_at_the_second_start_are_not_read_twice(tmp_path: Path):
    inputs, out = corpus(tmp_path, (40, 200)), tmp_path / "out"
    break_line(inputs[1], line=190)
    with pytest.raises(FormatError, match=r"1\.jsonl:191"):
        preprocess(inputs, out / "p", null(), STRICT, **SMALL)
    result = check_as_of_one_run(inputs, out, SKIP)
    assert result.skipped == 1
    assert result.fresh < size(inputs[1]) / 4


def test_rows_passed_over_are_not_taken_over_by_a_run_that_passes_over_none(tmp_path: Path):
    inputs, out = corpus(tmp_path), tmp_path / "out"
    break_line(inputs[2], line=3)
    break_line(inputs[3], line=3)
    limited = Options(KEYS, append_eod=True, skip=True, max_errors=ErrorLimit(1))
    with pytest.raises(TooManyErrors):
        preprocess(inputs, out / "p", null(), limited, **SMALL)
    with pytest.raises(FormatError, match=r"2\.jsonl\.gz:4: not JSON"):
        preprocess(inputs, out / "p", null(), STRICT, **SMALL)
    assert check_as_of_one_run(inputs, out, SKIP).skipped == 2


def test_lines_mended_after_too_many_errors_leave_the_files_before_the_first_of_them(tmp_path: Path):
    inputs, out = corpus(tmp_path), tmp_path / "out"
    before = {index: break_line(inputs[index], line=3) for index in (2, 3, 4)}
    limited = Options(KEYS, append_eod=True, skip=True, max_errors=ErrorLimit(2))
    with pytest.raises(TooManyErrors):
        preprocess(inputs, out / "p", null(), limited, **SMALL)
    for index in (3, 4):
        inputs[index].write_bytes(before[index])
    result = check_as_of_one_run(inputs, out, limited)
    assert (result.skipped, result.fresh) == (1, size(*inputs[3:]))


@pytest.mark.parametrize("change", ["the first changed", "another order", "other keys", "other options"])
def test_what_other_inputs_or_options_decided_is_not_taken_over(change: str, tmp_path: Path):
    inputs, out = corpus(tmp_path), tmp_path / "out"
    before = break_line(inputs[4], line=3)
    with pytest.raises(FormatError):
        preprocess(inputs, out / "p", null(), STRICT, **SMALL)
    inputs[4].write_bytes(before)
    options = STRICT
    if change == "the first changed":
        write(inputs[0], rows(random.Random(1), 40))
    elif change == "another order":
        inputs.reverse()
    elif change == "other keys":
        options = Options(("text",), append_eod=True)
    else:
        options = Options(KEYS)
    assert check_as_of_one_run(inputs, out, options).fresh == size(*inputs)


def test_files_that_are_left_out_or_come_after_do_not_undo_what_is_done(tmp_path: Path):
    inputs, out = corpus(tmp_path), tmp_path / "out"
    break_line(inputs[3], line=3)
    with pytest.raises(FormatError):
        preprocess(inputs, out / "p", null(), STRICT, **SMALL)
    inputs = [*inputs[:3], write(tmp_path / "new.jsonl", rows(random.Random(2), 9))]
    assert check_as_of_one_run(inputs, out, STRICT).fresh == size(inputs[3])
    with pytest.raises(FormatError):
        preprocess([*inputs, tmp_path / "3.jsonl"], tmp_path / "left/p", null(), STRICT, **SMALL)
    assert check_as_of_one_run(inputs, tmp_path / "left", STRICT).fresh == 0


def test_a_wrong_line_before_anything_is_done_leaves_nothing(tmp_path: Path):
    inputs = corpus(tmp_path)
    break_line(inputs[0], line=0)
    with pytest.raises(FormatError):
        preprocess(inputs, tmp_path / "out/p", null(), STRICT, **SMALL)
    assert list((tmp_path / "out").iterdir()) == []


def test_files_before_a_pipe_stay_done_and_the_pipe_is_read_from_its_beginning(tmp_path, monkeypatch):
    import io

    from mega_data.readers import streams

    class Fake:
        buffer = io.BytesIO(b"")

    monkeypatch.setattr(streams.sys, "stdin", Fake)
    inputs = [
        *(InputFile(path, format_of_name(path)) for path in corpus(tmp_path)),
        InputFile(Path("-"), "jsonl"),
    ]
    line = b'{"text": "1", "title": "2"}\n'
    Fake.buffer = io.BytesIO(line * 30 + b"{oops\n")
    with pytest.raises(FormatError, match="-:31: not JSON"):
        preprocess(inputs, tmp_path / "out/p", null(), STRICT, **SMALL)
    Fake.buffer = io.BytesIO(line * 40)
    result = preprocess(inputs, tmp_path / "out/p", null(), STRICT, **SMALL)
    assert (result.documents, result.fresh) == (180 + 40, 40 * len(line))


def test_a_disk_that_is_full_when_a_line_is_wrong_hides_no_error(tmp_path: Path, monkeypatch):
    inputs, note, failed = corpus(tmp_path), ResumableOutput.write_journal, list[ResumableOutput]()
    break_line(inputs[2], line=50)

    def full(self: ResumableOutput) -> None:
        if sys.exc_info()[0] is FormatError:
            failed.append(self)
            raise OSError(errno.ENOSPC, "No space left on device")
        note(self)

    monkeypatch.setattr(ResumableOutput, "write_journal", full)
    with pytest.raises(FormatError, match=r"2\.jsonl\.gz:51: not JSON"):
        preprocess(inputs, tmp_path / "out/p", null(), STRICT, block=400, note=2000)
    assert len(failed) == 1
    monkeypatch.undo()
    result = check_as_of_one_run(inputs, tmp_path / "out", SKIP)
    assert result.fresh < result.size


class Stop(Exception):
    pass


@pytest.mark.parametrize("seed", every_nth(10, range(60)))
def test_any_history_of_stops_wrong_lines_and_changes_ends_in_the_bytes_of_one_run(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    inputs, out = corpus(tmp_path), tmp_path / "out"
    options = STRICT
    for _ in range(rng.randrange(2, 9)):
        event, index = rng.choice(("break", "mend", "drop", "limit", "skip", "strict")), rng.randrange(5)
        if event == "break":
            break_line(inputs[index % len(inputs)], line=rng.randrange(30))
        elif event == "mend":
            write(inputs[index % len(inputs)], rows(rng, rng.randrange(60)))
        elif event == "drop" and len(inputs) > 2:
            inputs.pop(index % len(inputs))
        elif event == "limit":
            options = Options(KEYS, append_eod=True, skip=True, max_errors=ErrorLimit(rng.randrange(3)))
        else:
            options = SKIP if event == "skip" else STRICT
        calls = iter(range(rng.randrange(1, 40)))

        def progress(*_: int) -> None:
            if next(calls, None) is None:  # noqa: B023
                raise Stop

        with suppress(Stop, MegaError):
            preprocess(inputs, out / "p", null(), options, progress=progress, **SMALL)
    check_as_of_one_run(inputs, out, SKIP)
