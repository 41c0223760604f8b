"""Benchmark text extraction on one core: wikitext against mwparserfromhell, and pages of web archives.

    python bench/extract.py DUMP.xml[.bz2] [--warc FILE ...] [--json RESULT.json]

The same pages go to both, in turns. Seconds are of the processor, after imports; MB are of what is read: of
markup for a dump, of decoded HTML for an archive. mwparserfromhell (`pip install mwparserfromhell`) gets the
first pages only, as many as make a megabyte.

A whole dump, its pages repeated, is then read plain and as bz2 in one task and in several, and unpacked by
Python's bz2 alone: MB are of XML.
"""

from __future__ import annotations

import argparse
import bz2
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from fastwarc.warc import ArchiveIterator, WarcRecordType

from mega_data.extract import mediawiki
from mega_data.extract.formats import read_pages, split_inputs
from mega_data.extract.html import html_text
from mega_data.extract.wikitext import Wikitext
from mega_data.readers.compression import read_pieces

REPEATS = 5
COPIES, TASKS = 8, 3  # of a dump's pages; tasks of a bz2 file are then 4.5 MB, where 32 is the default
MARKS = ("[[", "]]", "{|", "<ref", "'''", "thumb|")


def rate(work: Callable[[str], str], texts: Sequence[str]) -> tuple[float, list[str]]:
    """Return MB/s over the texts, and the results."""
    began = time.process_time()
    outputs = [work(text) for text in texts]
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - began), outputs


def markup(file: Path) -> list[str]:
    """Read the wikitext of a dump's articles."""
    texts = list[str]()

    class Gather(Wikitext):
        def plain(self, text: str) -> str:
            texts.append(text)
            return "text"

    with patch.object(mediawiki, "Wikitext", Gather):
        for _ in mediawiki.read_dump(file):
            pass
    return texts


def read_rates(file: Path) -> dict[str, float]:
    """Measure MB/s from XML to documents, by compression and split."""
    packed = file.read_bytes()
    text = bz2.decompress(packed) if file.suffix == ".bz2" else packed
    first, last = text.index(b"<page>"), text.rindex(b"</page>") + len(b"</page>")
    text = text[:first] + text[first:last] * COPIES + text[last:]
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain, blocks = Path(folder) / "a.xml", Path(folder) / "a.xml.bz2"
        plain.write_bytes(text)
        blocks.write_bytes(bz2.compress(text))
        ways: dict[str, Callable[[], object]] = {
            "bz2 module alone": lambda: bz2.decompress(blocks.read_bytes()),
            "blocks of bz2 alone": lambda: sum(1 for _ in read_pieces(blocks)),
        }
        for name, path in (("plain", plain), ("bz2", blocks)):
            for tasks in (1, TASKS):
                parts = split_inputs([path], "wiki-dump", -(-path.stat().st_size // tasks))
                ways[f"{name}, {len(parts)} tasks"] = lambda parts=parts: [
                    sum(1 for _ in read_pages(part, "wiki-dump")) for part in parts
                ]
        for _ in range(3):
            for name, work in ways.items():
                began = time.process_time()
                work()
                rates.setdefault(name, []).append(len(text) / 1e6 / (time.process_time() - began))
    return {"XML MB": len(text) / 1e6} | {name: statistics.median(seconds) for name, seconds in rates.items()}


def archives(files: Sequence[Path]) -> dict[str, float]:
    """Measure MB/s from HTML to text."""
    pages = list[bytes]()
    for file in files:
        for record in ArchiveIterator(str(file), WarcRecordType.response, auto_decode="all"):
            pages.append(record.reader.read())
    rates = []
    for _ in range(REPEATS):
        began = time.process_time()
        for page in pages:
            html_text(page)
        rates.append(sum(map(len, pages)) / 1e6 / (time.process_time() - began))
    return {"pages": len(pages), "MB": sum(map(len, pages)) / 1e6, "MB/s": statistics.median(rates)}


def main() -> None:
    import mwparserfromhell

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--warc", type=Path, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pages, small = markup(args.dump), list[str]()
    while pages[len(small) :] and sum(map(len, small)) < 1e6:
        small.append(pages[len(small)])
    rates: dict[str, list[float]] = {"ours": [], "mwparserfromhell": []}
    left = dict[str, dict[str, int]]()
    for _ in range(REPEATS):
        for name, work in (
            ("ours", Wikitext().to_text),
            ("mwparserfromhell", lambda text: str(mwparserfromhell.parse(text).strip_code())),
        ):
            speed, output = rate(work, small)
            rates[name].append(speed)
            left[name] = {mark: sum(text.count(mark) for text in output) for mark in MARKS}
    medians = {name: statistics.median(speeds) for name, speeds in rates.items()}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, one core",
        "markup MB": sum(len(text.encode()) for text in small) / 1e6,
        "MB/s": medians,
        "spread": {name: [min(speeds), max(speeds)] for name, speeds in rates.items()},
        "ratio": medians["ours"] / medians["mwparserfromhell"],
        "marks left in the text": left,
        "whole dump, ours, MB/s": rate(Wikitext().to_text, pages)[0],
        "whole dump to documents, MB/s": read_rates(args.dump),
        "html": archives(args.warc) if args.warc else None,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
