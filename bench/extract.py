"""Text extraction: wikitext against mwparserfromhell, on one core, in one run; and pages of web archives.

    python bench/extract.py DUMP.xml[.bz2] [--warc FILE ...] [--json RESULT.json]

The same pages go to both, in turns. Seconds are of the processor, after imports; MB are of what is read: of
markup for a dump, of decoded HTML for an archive. mwparserfromhell (`pip install mwparserfromhell`) gets the
first pages only, as many as make a megabyte.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from fastwarc.warc import ArchiveIterator, WarcRecordType

from mega_data.extract import dump
from mega_data.extract.html import html_text
from mega_data.extract.wikitext import Wikitext

REPEATS = 5
MARKS = ("[[", "]]", "{|", "<ref", "'''", "thumb|")


def rate(work: Callable[[str], str], texts: Sequence[str]) -> tuple[float, list[str]]:
    """MB/s over the texts, and what came out."""
    began = time.process_time()
    found = [work(text) for text in texts]
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - began), found


def markup(file: Path) -> list[str]:
    """The wikitext of a dump's articles."""
    found = list[str]()

    class Gather(Wikitext):
        def plain(self, text: str) -> str:
            found.append(text)
            return "text"

    with patch.object(dump, "Wikitext", Gather):
        for _ in dump.dump_pages(file):
            pass
    return found


def archives(files: Sequence[Path]) -> dict[str, float]:
    """MB/s of HTML to text."""
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
    given = parser.parse_args()
    pages, small = markup(given.dump), list[str]()
    while pages[len(small) :] and sum(map(len, small)) < 1e6:
        small.append(pages[len(small)])
    rates: dict[str, list[float]] = {"ours": [], "mwparserfromhell": []}
    left = dict[str, dict[str, int]]()
    for _ in range(REPEATS):
        for name, work in (
            ("ours", Wikitext().plain),
            ("mwparserfromhell", lambda text: str(mwparserfromhell.parse(text).strip_code())),
        ):
            speed, found = rate(work, small)
            rates[name].append(speed)
            left[name] = {mark: sum(text.count(mark) for text in found) for mark in MARKS}
    medians = {name: statistics.median(speeds) for name, speeds in rates.items()}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, one core",
        "markup MB": sum(len(text.encode()) for text in small) / 1e6,
        "MB/s": medians,
        "spread": {name: [min(speeds), max(speeds)] for name, speeds in rates.items()},
        "ratio": medians["ours"] / medians["mwparserfromhell"],
        "marks left in the text": left,
        "whole dump, ours, MB/s": rate(Wikitext().plain, pages)[0],
        "html": archives(given.warc) if given.warc else None,
    }
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
