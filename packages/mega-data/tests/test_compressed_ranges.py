"""A compressed JSON-lines file divided at blocks, members or frames gives the lines of one stream."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.commands.preprocess_tasks import Placement, preprocess_tasks
from mega_data.preprocess import Options, preprocess
from mega_data.readers import compression as frame_reader
from mega_data.readers.frames import range_starts
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import InputRange, count_rows_before, read_range, split_inputs
from mega_schema.errors import CorruptFileError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer

SKIPPABLE = struct.pack("<II", 0x184D2A53, 7) + b"\x28\xb5\x2f\xfdabc"
SPELLED = "aé語𝄞 \\n"
MAGICS = (b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd\x24\x05", bytes.fromhex("314159265359"))


def lines(rng: random.Random, count: int) -> bytes:
    """Lines of letters of 1 to 4 bytes, blank lines, and bytes that begin a member or frame."""
    rows = [
        rng.choice(
            [b"", b"\r", rng.choice(MAGICS), "".join(rng.choices(SPELLED, k=rng.randrange(90))).encode()]
        )
        for _ in range(count)
    ]
    return b"\n".join(rows) + rng.choice([b"", b"\n"])


def cut(rng: random.Random, data: bytes, parts: int) -> list[bytes]:
    """Parts of the data, some of them empty, cut at any byte."""
    edges = sorted(rng.randrange(len(data) + 1) for _ in range(parts - 1))
    return [data[start:end] for start, end in zip([0, *edges], [*edges, len(data)], strict=True)]


def gzip_file(rng: random.Random, parts: Sequence[bytes]) -> bytes:
    """Members of any level, some of them stored as they are, with zeros between some of them."""
    members = [gzip.compress(part, rng.choice([0, 1, 9]), mtime=0) for part in parts]
    return b"".join(member + bytes(rng.choice([0, 0, 3])) for member in members)


def zstd_file(rng: random.Random, parts: Sequence[bytes]) -> bytes:
    """Frames with and without a checksum and the size of the text, and skippable frames between them."""
    data = b""
    for part in parts:
        options = {"write_checksum": rng.random() < 0.5, "write_content_size": rng.random() < 0.5}
        data += zstandard.ZstdCompressor(level=rng.choice([1, 19]), **options).compress(part)
        data += rng.choice([b"", b"", SKIPPABLE])
    return data


def bzip2_file(rng: random.Random, parts: Sequence[bytes]) -> bytes:
    return b"".join(bz2.compress(part, rng.choice([1, 9])) for part in parts)


WRITERS: dict[str, Callable[[random.Random, Sequence[bytes]], bytes]] = {
    ".gz": gzip_file,
    ".zst": zstd_file,
    ".bz2": bzip2_file,
}


def read_ranges(path: Path, ranges: Sequence[InputRange], block: int = 50) -> list[bytes]:
    """The text of each range."""
    return [
        b"".join(item.data or b"" for item in read_range(part, ["text"], block, "file")) for part in ranges
    ]


@pytest.mark.parametrize("compression", WRITERS)
@pytest.mark.parametrize("seed", range(8))
def test_the_ranges_of_any_size_have_the_text_of_the_file(
    compression: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{compression}{seed}")
    # a frame of more text than this is read in pieces
    monkeypatch.setattr(frame_reader, "_MAX_FRAME_TEXT", rng.choice([10, 1 << 22]))
    monkeypatch.setattr(frame_reader, "_READ_BYTES", rng.choice([7, 1 << 10]))
    data = lines(rng, rng.choice([1, 5, 80]))
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(WRITERS[compression](rng, cut(rng, data, rng.choice([1, 2, 30]))))
    item = InputFile(path, "jsonl")
    for size in {1, 2, 17, *(rng.randrange(1, 2 + item.size) for _ in range(4))}:
        ranges = split_inputs([item], size)
        texts = read_ranges(path, ranges, rng.choice([1, 50, 10**6]))
        assert b"".join(texts) == data, size
        assert sum(part.size for part in ranges) == item.size
        before = 0
        for part, text in zip(ranges, texts, strict=True):
            assert not text or part is ranges[-1] or text.endswith(b"\n") or before + len(text) == len(data)
            if text:
                assert count_rows_before(part) == data[:before].count(b"\n")
            before += len(text)


def test_each_member_and_frame_of_a_file_can_begin_a_range(tmp_path: Path) -> None:
    rng = random.Random(1)
    parts = cut(rng, lines(rng, 300), 40)
    for compression, first in ((".gz", b"\x1f\x8b\x08"), (".zst", b"\x28\xb5\x2f\xfd")):
        units = [WRITERS[compression](random.Random(2), [part]) for part in parts]
        path = tmp_path / f"a{compression}"
        path.write_bytes(b"".join(units))
        starts = [sum(map(len, units[:number])) for number in range(len(units))]
        all_starts = range_starts(path, compression, 1)
        assert set(starts) <= set(all_starts)
        assert all(path.read_bytes()[start:].startswith((first, SKIPPABLE[:4])) for start in all_starts)


def stored_member(data: bytes) -> bytes:
    """A member whose data is stored as it is, in pieces of up to 65,535 bytes."""
    return gzip.compress(data, 0, mtime=0)


def test_a_gzip_file_in_the_data_of_a_member_is_text(tmp_path: Path) -> None:
    rng = random.Random(4)
    inner = gzip.compress(b'{"text": "1"}\n', mtime=0)
    noise = rng.randbytes(3_000_000).replace(b"\n", b" ")
    large = gzip.compress(noise, 1, mtime=0)  # of which the outer member interrupts the data
    for data in (inner, inner * 50, inner + b"\n" + inner, large, inner + large + inner):
        path = tmp_path / "a.jsonl.gz"
        text = b"begin\n" + data + b"\nend"
        path.write_bytes(stored_member(text) + stored_member(text))
        ranges = split_inputs([InputFile(path, "jsonl")], 1000)
        assert {part.start for part in ranges} <= {0, len(stored_member(text))}
        assert b"".join(read_ranges(path, ranges)) == text + text


def test_a_frame_in_the_data_of_a_frame_is_text(tmp_path: Path) -> None:
    inner = zstandard.ZstdCompressor().compress(random.Random(3).randbytes(5000).replace(b"\n", b" "))
    frame = zstandard.ZstdCompressor().compress(b"begin\n" + inner + b"\nend")
    assert inner[:1000] in frame
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frame * 3)
    ranges = split_inputs([InputFile(path, "jsonl")], 1000)
    assert [part.start for part in ranges] == [0, len(frame), 2 * len(frame)]
    assert b"".join(read_ranges(path, ranges)) == (b"begin\n" + inner + b"\nend") * 3


def test_a_range_that_ends_inside_a_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "1"}\n' * 100, mtime=0))
    item = InputFile(path, "jsonl")
    with pytest.raises(
        FormatError, match="a member of gzip reaches over byte 20, where another seemed to begin"
    ):
        read_ranges(path, [InputRange(item, 0, 0, 20, 20)])


@pytest.mark.parametrize("compression", WRITERS)
def test_damage_in_one_range_is_reported_by_one_range(compression: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    text = "".join(
        json.dumps({"text": " ".join(str(rng.random()) for _ in range(9))}) + "\n" for _ in range(4000)
    )
    parts = cut(rng, text.encode(), 12)
    path = tmp_path / f"a.jsonl{compression}"
    data = bytearray(WRITERS[compression](random.Random(2), parts))
    path.write_bytes(data)
    ranges = split_inputs([InputFile(path, "jsonl")], len(data) // 6)
    assert len(ranges) > 3
    whole = read_ranges(path, ranges)
    middle = (ranges[2].start + (ranges[2].end or 0)) // 2
    data[middle : middle + 40] = bytes(40)
    path.write_bytes(data)
    damaged = list[int]()
    for number, part in enumerate(ranges):
        try:
            assert whole[number].startswith(read_ranges(path, [part])[0])
        except CorruptFileError:
            damaged.append(number)
    assert damaged in ([2], [1])  # of bz2 the range before may have to report it


def words(path: Path, prefix: Path, *flags: str) -> list[str]:
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    return ["preprocess", "--input", str(path), "--output-prefix", str(prefix), *tokenizer, *flags]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compression", WRITERS)
def test_preprocess_writes_the_bytes_of_one_stream_and_names_a_wrong_row(
    compression: str, tmp_path: Path
) -> None:
    rng = random.Random(5)
    text = "".join(
        json.dumps({"text": f"{n % 100} {rng.randrange(100)}", "title": "é語"}) + "\n" for n in range(500)
    )
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(WRITERS[compression](rng, cut(rng, text.encode(), 20)))
    inputs, options = [InputFile(path, "jsonl")], Options(skip=True)
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    size = path.stat().st_size // 4
    assert len(split_inputs(inputs, size)) > 2
    for wrong in (False, True):
        if wrong:
            text = text.replace('{"text": "67 ', '{"text": 67, "', 5).replace('"99 ', '99, "', 3)
            path.write_bytes(WRITERS[compression](rng, cut(rng, text.encode(), 20)))
        preprocess(inputs, tmp_path / f"stream{wrong}/p", tokenizer, options)
        preprocess_tasks(
            inputs, tmp_path / f"tasks{wrong}/p", tokenizer, options, Placement(split_bytes=size)
        )
        assert files(tmp_path / f"tasks{wrong}") == files(tmp_path / f"stream{wrong}")
    with pytest.raises(FormatError, match=r"a\.jsonl\.\w+:68: not JSON"):
        preprocess_tasks(inputs, tmp_path / "p", tokenizer, Options(), Placement(split_bytes=size))


def test_a_dry_run_tells_which_large_file_is_one_task(tmp_path: Path) -> None:
    rng = random.Random(6)
    row = b'{"text": "%s"}\n' % b" ".join(b"%d" % rng.randrange(100) for _ in range(900_000))
    path, prefix = tmp_path / "a.jsonl.gz", tmp_path / "p"
    member = gzip.compress(row, 1, mtime=0)
    assert len(member) > 1_000_000
    for data, tasks in ((member, 1), (member * 2, 2)):
        path.write_bytes(data)
        outcome = CliRunner().invoke(commands, words(path, prefix, "--split-mb", "1", "--dry-run"))
        assert outcome.exit_code == 0, outcome.output
        first, second, *_ = outcome.output.splitlines()
        assert first.startswith(f"{tasks} task")
        assert (second == f"{path}: one task of {len(data) / 1e6:.2f} MB: it has one member") == (tasks == 1)


def test_tasks_of_other_cuts_are_not_reused_if_their_number_is_the_same(tmp_path: Path) -> None:
    """Ranges of whole row groups or members can have equal numbers and other edges."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(b'{"text": "1"}\n', 0, mtime=0) for _ in range(4)))
    inputs, tokenizer = [InputFile(path, "jsonl")], open_tokenizer("NullTokenizer", vocab_size=100)
    unit = path.stat().st_size // 4
    cuts = [[part.start for part in split_inputs(inputs, size)] for size in (2 * unit, 3 * unit)]
    assert cuts == [[0, 2 * unit], [0, 3 * unit]]
    placement = Placement(only="encode:0", split_bytes=2 * unit)
    assert preprocess_tasks(inputs, tmp_path / "p", tokenizer, Options(), placement) is None
    placement = Placement(only="encode:1", split_bytes=3 * unit)
    with pytest.raises(MegaError, match="contains a run with other inputs"):
        preprocess_tasks(inputs, tmp_path / "p", tokenizer, Options(), placement)
    result = preprocess_tasks(inputs, tmp_path / "p", tokenizer, Options(), Placement(split_bytes=3 * unit))
    assert result is not None
    assert (result.documents, result.tokens) == (4, 4)


def test_a_member_of_much_text_is_checked_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    member = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(64)) + bomb.flush()
    path.write_bytes(gzip.compress(b"\n" * 10, mtime=0) + member)
    assert range_starts(path, ".gz", 10) == [0, path.stat().st_size - len(member)]
