"""A dump read in parts gives the pages of the whole dump; readable pages after damage are read."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
import zstandard
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.executors.local import run
from mega_data.extract.formats import FileRange, find_inputs, read_pages, split_inputs
from mega_data.extract.pipeline import Extraction
from mega_data.extract.types import Page, SkippedPage
from mega_data.readers.bzip2 import read_bzip2
from mega_data.readers.compression import DamagedRange, TextPiece, read_pieces
from mega_schema.errors import FormatError
from tests.shared_data import SHARED, needs_shared

HEAD = """<mediawiki><siteinfo><base>https://x.org/wiki/A</base><namespaces>
<namespace key="6">Datei</namespace></namespaces></siteinfo>\n"""
BLOCK = bytes.fromhex("314159265359")
DUMPS = SHARED / "data/corpora/wikidump"


def page(number: int, text: str) -> str:
    redirect = '<redirect title="x" />' if number % 7 == 3 else ""
    ns = 4 if number % 5 == 4 else 0
    return (
        f"  <page>\n    <title>T{number}</title><ns>{ns}</ns><id>{number}</id>{redirect}\n"
        f"<revision><id>9</id><text>{text}</text></revision>\n  </page>\n"
    )


def dump(rng: random.Random, count: int, longest: int) -> list[str]:
    """A head, pages of random words, and an end."""
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(4000)]
    texts = (" ".join(rng.choices(words, k=rng.randint(1, longest))) for _ in range(count))
    return [HEAD, *(page(number, text) for number, text in enumerate(texts, 1)), "</mediawiki>\n"]


def multistream(parts: list[str]) -> bytes:
    """As Wikipedia's: the head, some pages a stream, the end."""
    groups = [
        parts[:1],
        *(parts[position : position + 9] for position in range(1, len(parts) - 1, 9)),
        parts[-1:],
    ]
    return b"".join(bz2.compress("".join(group).encode()) for group in groups)


def read_parts(path: Path, size: int = 1 << 60) -> list[Page | SkippedPage | DamagedRange]:
    return [
        page for part in split_inputs([path], "wiki-dump", size) for page in read_pages(part, "wiki-dump")
    ]


PACKINGS: dict[str, Callable[[list[str]], bytes]] = {
    "a.xml": lambda parts: "".join(parts).encode(),
    "a.xml.bz2": lambda parts: bz2.compress("".join(parts).encode(), 1),  # blocks of 100 kB, at any bit
    "multistream.xml.bz2": multistream,
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("hurt", [False, True])
def test_the_parts_of_a_dump_have_its_pages_wherever_it_is_cut(tmp_path: Path, name: str, hurt: bool) -> None:
    rng = random.Random(f"{name}{hurt}")
    data, path = bytearray(PACKINGS[name](dump(rng, 200, 400))), tmp_path / name
    for _ in range(2 if hurt else 0):
        place = rng.randrange(len(data))
        data[place : place + 8] = rng.randbytes(8)
    path.write_bytes(data)
    whole = read_parts(path)
    assert sum(isinstance(page, Page) for page in whole) > (20 if hurt else 120)
    assert any(isinstance(page, DamagedRange) for page in whole) == hurt
    sizes = [len(data) // 2, len(data) // 7, 5_000, *(rng.randrange(2_000, len(data)) for _ in range(2))]
    if name == "a.xml":
        sizes.append(701)
    for size in sizes:
        assert read_parts(path, size) == whole, size


def test_a_cut_within_a_tag_gives_no_page_twice_and_loses_none(tmp_path: Path) -> None:
    data, path = PACKINGS["a.xml"](dump(random.Random(2), 3, 3)), tmp_path / "a.xml"
    path.write_bytes(data)
    whole = read_parts(path)
    assert len(whole) == 3
    for position in range(1, len(data)):
        parts = [FileRange(path, 0, position), FileRange(path, position)]
        assert [page for part in parts for page in read_pages(part, "wiki-dump")] == whole, position


def bzip2_marker_text(count: int) -> str:
    """Text in whose block the table of bytes used has the 48 bits that a block begins with.

    The bits of that table are set for the bytes that occur: here of 80 to AF, which UTF-8 uses after others.
    """
    bits = f"{int.from_bytes(BLOCK, 'big'):048b}"
    after = [0x80 + place for place, bit in enumerate(bits) if bit == "1"]
    letters = [bytes([0xE0 | 3, middle, last]).decode() for middle in after for last in after]
    return " ".join(random.Random(4).choices(letters, k=count))


def test_the_mark_of_a_block_within_a_block_is_text(tmp_path: Path) -> None:
    parts = [HEAD, *(page(number, bzip2_marker_text(3_000)) for number in range(1, 40)), "</mediawiki>\n"]
    for level in (1, 4):
        data, path = bz2.compress("".join(parts).encode(), level), tmp_path / "a.xml.bz2"
        path.write_bytes(data)
        bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
        mark = f"{int.from_bytes(BLOCK, 'big'):048b}"
        texts = list(read_bzip2(path))
        assert bits.count(mark) >= 2 * len(texts)
        assert b"".join(text.data for text in texts if isinstance(text, TextPiece)) == "".join(parts).encode()
        whole = read_parts(path)
        assert len(whole) == 39
        for size in (len(data) // 3, 20_000, 7_000):
            assert read_parts(path, size) == whole
        first = bits.find(mark, bits.find(mark) + 1) // 8  # in the first block: no part may begin there
        assert next(read_bzip2(path, first), None) in [None, *texts[1:2]]


def test_blocks_are_what_bz2_unpacks_and_gaps_are_all_that_is_between(tmp_path: Path) -> None:
    rng, path, gaps = random.Random(5), tmp_path / "a.bz2", 0
    text = rng.randbytes(300_000) + b"a" * 3_000_000
    for data in (bz2.compress(text, 1), bz2.compress(b"") + bz2.compress(text[:99]) + bz2.compress(text)):
        path.write_bytes(data)
        whole = list(read_bzip2(path))
        assert b"".join(part.data for part in whole if isinstance(part, TextPiece)) == bz2.decompress(data)
        for _ in range(12):
            hurt = bytearray(data)
            place = rng.randrange(len(hurt))
            hurt[place : place + rng.choice([1, 50])] = rng.randbytes(rng.choice([0, 1, 50]))
            path.write_bytes(hurt[: rng.choice([len(hurt), rng.randrange(len(hurt))])])
            for part in read_bzip2(path):
                gaps += isinstance(part, DamagedRange)
                assert isinstance(part, DamagedRange) or part.data in [text.data for text in whole]
        assert list(read_bzip2(path, len(data))) == []
    assert gaps > 10


def compressor(kind: str) -> Callable[[bytes], bytes]:
    return {
        "gz": gzip.compress,
        "xz": lzma.compress,
        "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
        "bz2": bz2.compress,
        "lz4": lambda data: pytest.importorskip("lz4.frame").compress(data, content_checksum=True),
    }[kind]


@pytest.mark.parametrize("kind", ["gz", "xz", "zst", "bz2", "lz4"])
@pytest.mark.parametrize("place", ["head", "middle", "end"])
def test_what_comes_after_a_damaged_member_or_frame_is_read(tmp_path: Path, kind: str, place: str) -> None:
    rng, path = random.Random(6), tmp_path / f"a.xml.{kind}"
    parts = [HEAD, *(page(number, rng.randbytes(9_000).hex()) for number in range(1, 6)), "</mediawiki>"]
    members = [compressor(kind)(part.encode()) for part in parts]
    path.write_bytes(b"".join(members))
    assert [page.id for page in read_parts(path) if not isinstance(page, DamagedRange)] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]
    hurt, begin = bytearray(members[3]), sum(map(len, members[:3]))
    damage_offset = {"head": 0, "middle": len(hurt) // 2, "end": len(hurt) - 6}[place]
    hurt[damage_offset : damage_offset + 4] = b"\xff\0\xff\0"
    path.write_bytes(b"".join([*members[:3], hurt, *members[4:]]))
    pages = read_parts(path)
    ids = [page.id for page in pages if not isinstance(page, DamagedRange)]
    assert [number for number in ids if number != "3"] == ["1", "2", "4", "5"]
    gaps = [gap for gap in pages if isinstance(gap, DamagedRange) and gap.reason == "damaged"]
    assert len(gaps) == 1
    assert begin <= gaps[0].start < begin + len(hurt)


@pytest.mark.parametrize("kind", ["gz", "xz", "zst", "bz2", "lz4"])
def test_a_packed_file_that_is_cut_off_says_so(tmp_path: Path, kind: str) -> None:
    path, whole = tmp_path / f"a.{kind}", compressor(kind)(b"text " * 99)
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        assert any(isinstance(part, DamagedRange) for part in read_pieces(path)), size
    path.write_bytes(whole)
    assert [type(part) for part in read_pieces(path)] == [TextPiece]


def outputs(path: Path, folder: Path, size: int, workers: int = 1) -> dict[str, bytes]:
    """Return the files of an extraction with parts of this size."""
    output = folder / "pages"
    job = Extraction(split_inputs(find_inputs([path]), size=size), output, folder / "work", keep_dropped=True)
    job.begin()
    run(job.stages(), job.work, workers=workers)
    return {file.parent.name + file.name: file.read_bytes() for file in sorted(folder.glob("pages*/*"))}


@needs_shared
def test_a_real_dump_gives_the_same_bytes_in_one_task_and_in_nine(tmp_path: Path) -> None:
    path = DUMPS / "enwiki-latest-pages-articles1-shortened.xml.bz2"
    once = outputs(path, tmp_path / "once", 1 << 40)
    assert sorted(once) == sorted(f"{folder}{path.stem}.jsonl" for folder in ("pages", "pages.dropped"))
    assert outputs(path, tmp_path / "cut", 200_000, workers=2) == once
    dropped = [orjson.loads(line) for line in once[f"pages.dropped{path.stem}.jsonl"].splitlines()]
    assert len(dropped) == 100
    assert {row["dropped"] for row in dropped} == {"namespace 4", "redirect"}
    plain = tmp_path / path.stem
    plain.write_bytes(bz2.decompress(path.read_bytes()))
    assert outputs(plain, tmp_path / "plain", 500_000) == once


def rows(file: Path) -> Iterator[dict[str, object]]:
    yield from map(orjson.loads, file.read_bytes().splitlines())


def test_damage_ends_a_run_by_file_and_byte_or_is_skipped_and_counted(tmp_path: Path) -> None:
    data = bytearray(PACKINGS["a.xml.bz2"](dump(random.Random(8), 200, 400)))
    path, output = tmp_path / "a.xml.bz2", tmp_path / "all.jsonl"
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    (gap,) = [part for part in read_pieces(path) if isinstance(part, DamagedRange)]
    words = ["extract", "--input", str(path), "--output", str(output)]
    failed = CliRunner().invoke(commands, words)
    assert isinstance(failed.exception, FormatError)
    assert str(failed.exception).startswith(f"{path}: damaged at byte {gap.start:,}: found no whole block")
    assert "--on-error skip" in str(failed.exception)
    assert not output.exists()
    words += ["--work-dir", str(tmp_path / "work"), "--on-error", "skip", "--keep-dropped"]
    result = CliRunner().invoke(commands, words)
    assert result.exit_code == 0, result.output
    assert "left out 1: damaged\n" in result.output
    assert f"lost to damage: {gap.end - gap.start:,} bytes" in result.output
    dropped = list(rows(tmp_path / "all.dropped.jsonl"))
    (damage,) = [row for row in dropped if row["dropped"] == "damaged"]
    assert (damage["file"], damage["byte"], damage["to"]) == (str(path), gap.start, gap.end)
    assert {"redirect", "namespace 4", "cut off"} <= {row["dropped"] for row in dropped}
    assert len(list(rows(output))) > 80


FRUGAL = """
import resource, sys
from pathlib import Path
from mega_data.extract.mediawiki import read_dump
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]),) * 2)
assert sum(1 for _ in read_dump(Path(sys.argv[1]))) == 150
try:
    bytearray(2 * int(sys.argv[2]))
except MemoryError:
    sys.exit(0)
sys.exit("the limit does not hold")
"""


@pytest.mark.parametrize("kind", ["", ".zst"])
def test_a_dump_may_be_larger_than_memory(tmp_path: Path, kind: str) -> None:
    noise = random.Random(3).randbytes(125_000)
    texts = (noise[n * 500 :].hex() + noise[: n * 500].hex() for n in range(150))
    text = "".join([HEAD, *(page(4, text) for text in texts), "</mediawiki>\n"]).encode()
    path, memory = tmp_path / f"a.xml{kind}", 18 << 20
    assert len(text) > 1.9 * memory
    path.write_bytes(compressor(kind[1:])(text) if kind else text)
    words = [sys.executable, "-c", FRUGAL, str(path), str(memory)]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    path.unlink()
    assert process.returncode == 0, process.stderr[-2000:]
