"""Text extraction from dumps, archives and pages: visible text, and a reason for every skipped page."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.executors.local import run
from mega_data.extract.formats import FileRange, detect_format, find_inputs, read_pages, split_inputs
from mega_data.extract.pipeline import Extraction
from mega_data.extract.types import MAX_PAGE_BYTES, Page
from mega_data.extract.wikitext import Wikitext
from mega_data.readers.compression import DamagedRange
from mega_schema.errors import ConfigError, FormatError, MegaError
from tests.shared_data import SHARED, needs_shared

CORPORA = SHARED / "data/corpora"
WIKI, WEB = CORPORA / "wikidump", CORPORA / "web"

DUMP = """<mediawiki xml:lang="de"><siteinfo><base>https://de.example.org/wiki/Start</base><namespaces>
<namespace key="0" /><namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace>
</namespaces></siteinfo>
<page><title>Eins</title><ns>0</ns><id>7</id><revision><id>70</id><contributor><id>5</id></contributor>
<model>wikitext</model><text>'''Eins''' ist [[Zahl|eine Zahl]].[[Datei:a.jpg|mini|ein [[Bild]]]]
[[Kategorie:Zahl]]</text></revision></page>
<page><title>Uno</title><ns>0</ns><id>8</id><redirect title="Eins" /><revision><id>80</id>
<text>#REDIRECT [[Eins]]</text></revision></page>
<page><title>Hilfe:Zwei</title><ns>12</ns><id>9</id><revision><text>Zwei</text></revision></page>
<page><title>Drei</title><ns>0</ns><id>10</id><revision><text>{{leer}}</text></revision></page>
<page><title>Vier &amp;amp; mehr</title><ns>0</ns><id>11</id><revision><text>Vier</text></revision></page>
</mediawiki>
"""


def http(body: bytes, content: str = "text/html; charset=utf-8", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\n\r\n".encode() + body


def record(kind: str, body: bytes, url: str = "https://example.org/a") -> bytes:
    content = {"response": "application/http; msgtype=response"}.get(kind, "text/plain")
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{len(body)}>\r\n"
    head += f"WARC-Target-URI: {url}\r\nContent-Type: {content}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


PAGE = b"""<html><head><title>A  page</title></head><body><nav><a href="/">Home</a></nav>
<main><h1>Of bridges</h1><p>A bridge carries a road over a river.</p><p>\xc3\x87ay.</p>
<script>var x</script></main></body></html>"""


def read(path: Path, form: str = "auto") -> tuple[list[Page], Counter[str]]:
    pages, reasons = list[Page](), Counter[str]()
    for page in read_pages(FileRange(path), form):
        if isinstance(page, Page):
            pages.append(page)
        else:
            reasons[page.reason] += 1
    return pages, reasons


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''A''' is ''one'' of '''''them'''''", "A is one of them"),
        ("[[Paris]], [[Paris|the city]], [[Paris (Texas)|]], [[bus]]es", "Paris, the city, Paris, buses"),
        ("x[[File:a.jpg|thumb|of [[b|c]] d]]y[[Category:Z]]z [[:Category:Z]]", "xyz Category:Z"),
        ("x [[de:Eins]][[Datei:b.png]]y", "x y"),
        ("a{{b|{{c}}|d}}e {{{1|f}}}g", "ae g"),
        ("a\n{| class=x\n! b\n|-\n| c {{d}}\n{|\n|e\n|}\n|}\nf", "a\nf"),
        ("a<ref name=x>b</ref>c<ref name=x/>d<!-- e\n -->f", "acdf"),
        ("a <nowiki>[[b]] {{c}}</nowiki> <math>x_{{1}}</math>", "a [[b]] {{c}} x_{{1}}"),
        ("[http://a.b c d] [https://a.b] http://a.b", "c d http://a.b"),
        ("a<br />b <small>c</small> &nbsp;&amp; &lt;d&gt;", "a\nb c & <d>"),
        ("# one\n## two\n: three\n; four\n*", "- one\n- two\nthree\nfour"),
        ("== A ==\n=== B ===\nb\n== C ==\n== D ==\n{{x}}\nd\n== E ==", "A\nB\nb\nD\nd"),
        ("A ({{x}}; born {{y}}) is , well .\n----\n__NOTOC__", "A (born) is, well."),
        ("A ({{x}}) b (; c)", "A b (c)"),
        ("a {{never [[closed", "a never closed"),
        ("a <ref>never closed", "a never closed"),
        ("a <!-- never closed", "a"),
        ("a }} b ]] c --> d </ref> e", "a b c d e"),
        ("a [[b\n\n[[c|d]]", "a b\nd"),
        ("{{x}}\n\n\n", ""),
    ],
)
def test_wikitext_becomes_what_a_reader_sees(markup: str, text: str) -> None:
    assert Wikitext(["Datei"]).to_text(markup) == text


def test_a_page_comes_to_an_end_whatever_is_repeated_or_nested_in_it() -> None:
    """A pass of quadratic time would take hours."""
    rng = random.Random(0)
    marks = ["{{", "}}", "{|", "\n{|\n", "\n|}\n", "[[", "]]", "<ref>", "</ref>", "<!--", "-->", "[http:"]
    marks += ["'''", "(", " ", "=", "\n==", "<", "|", "File:", "&amp;", "<nowiki>", "</nowiki>"]
    for shape in [[mark] for mark in marks] + [rng.sample(marks, rng.randint(2, 4)) for _ in range(40)]:
        text = "".join(shape) * (60_000 // len("".join(shape)))
        for whole in (text, text + "".join(reversed(shape)) + "x"):
            assert len(Wikitext().to_text(whole)) <= len(whole)


def test_a_dump_gives_its_articles_and_a_reason_for_every_other_page(tmp_path: Path) -> None:
    file = tmp_path / "dump.xml"
    file.write_text(DUMP)
    pages, reasons = read(file)
    assert pages == [
        Page("7", "https://de.example.org/wiki?curid=7", "Eins", "Eins ist eine Zahl."),
        Page("11", "https://de.example.org/wiki?curid=11", "Vier &amp; mehr", "Vier"),
    ]
    assert reasons == {"redirect": 1, "namespace 12": 1, "no text": 1}


def test_a_folder_gives_the_files_of_known_names_in_order(tmp_path: Path) -> None:
    names = ["a.warc.gz", "b/pages-articles1.xml-p1p41242.bz2", "b/x.warc.wet", "c.htm", "d.xml"]
    for name in [*names, "e.jsonl", ".f.xml", "g.xml.md5"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_inputs([tmp_path]) == [tmp_path / name for name in names]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_dump_is_read_compressed_and_in_its_encoding(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "dump.xml.bz2"
    file.write_bytes(bz2.compress(f'<?xml version="1.0" encoding="{encoding}"?>{DUMP}'.encode(encoding)))
    assert [page.title for page in read(file)[0]] == ["Eins", "Vier &amp; mehr"]


@pytest.mark.parametrize("encoding", ["klingon", "shift_jis"])
def test_a_dump_in_an_encoding_that_is_not_read_is_named(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "dump.xml"
    file.write_text(f'<?xml version="1.0" encoding="{encoding}"?>{DUMP}')
    with pytest.raises(FormatError, match=rf"dump\.xml: encoding {encoding}: found .*wanted utf-8"):
        read(file)
    file.write_bytes(
        f'<?xml version="1.0" encoding="windows-1254"?>{DUMP}'.replace("Vier<", "Çay<").encode("cp1254")
    )
    assert [page.text for page in read(file)[0]][-1] == "Çay"


def test_a_dump_that_is_cut_off_gives_the_pages_before(tmp_path: Path) -> None:
    file = tmp_path / "dump.xml"
    file.write_text(DUMP[: DUMP.index("<page><title>Vier")])
    pages, reasons = read(file)
    assert [page.id for page in pages] == ["7"]
    assert reasons == {"redirect": 1, "namespace 12": 1, "no text": 1, "cut off": 1}
    file.write_text(DUMP[: DUMP.index("Vier</text>")])
    assert read(file) == (pages, reasons)


def test_entities_that_grow_are_refused(tmp_path: Path) -> None:
    grow = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 50}">' for n in range(1, 9))
    file = tmp_path / "dump.xml"
    file.write_text(f'<!DOCTYPE x [<!ENTITY a0 "aaaa">{grow}]>' + DUMP.replace("Vier", "&a8;"))
    assert read(file)[1]["unparsable"] == 1


def test_an_archive_gives_its_pages_of_html(tmp_path: Path) -> None:
    file = tmp_path / "a.warc.gz"
    parts = [
        record("warcinfo", b"software: x"),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        record("response", http(PAGE)),
        record("response", http(PAGE.decode().encode("cp1254"), "text/html; charset=windows-1254")),
        record("response", http(b"{}", "application/json")),
        record("response", http(PAGE, status="404 Not Found")),
        record("response", http(b"<html></html>")),
    ]
    file.write_bytes(b"".join(map(gzip.compress, parts)))
    pages, reasons = read(file)
    assert [(page.url, page.title) for page in pages] == [("https://example.org/a", "A page")] * 2
    for page in pages:
        assert "A bridge carries a road over a river." in page.text
        assert "Çay." in page.text
        assert "var x" not in page.text
        assert "Home" not in page.text
    assert reasons == {
        "warcinfo record": 1,
        "request record": 1,
        "not HTML": 1,
        "status 404": 1,
        "no text": 1,
    }


PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".lz4": lambda data: import_module("lz4.frame").compress(data, content_checksum=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("harm", ["head", "middle", "end"])
def test_records_after_a_damaged_place_are_found_once_each(tmp_path: Path, kind: str, harm: str) -> None:
    if kind == ".lz4":
        pytest.importorskip("lz4.frame")
    rng, file = random.Random(9), tmp_path / f"a.warc{kind}"
    bodies = [PAGE.replace(b"bridge", f"{rng.randbytes(300).hex()} WARC/1.0".encode()) for _ in range(6)]
    parts = [record("response", http(body), f"https://example.org/{n}") for n, body in enumerate(bodies)]
    parts = [PACKED[kind](part) for part in parts]
    file.write_bytes(b"".join(parts))
    whole, reasons = read(file)
    assert [page.url[-1] for page in whole] == list("012345")
    assert not reasons
    hurt, begin = bytearray(parts[2]), len(parts[0] + parts[1])
    place = {"head": 0, "middle": len(hurt) // 2, "end": len(hurt) - 6}[harm]
    hurt[place : place + 4] = b"\xff\0\xff\0"
    file.write_bytes(b"".join([*parts[:2], hurt, *parts[3:]]))
    pages, reasons = read(file)
    others = [page for page in whole if page.url[-1] != "2"]
    assert [page for page in pages if page in others] == others
    if not kind and harm == "middle":  # there is no checksum
        assert len(pages) == 6
        return
    assert reasons["damaged"] == 1
    assert not kind or [page for page in pages if page not in whole] == []
    (gap,) = [
        part
        for part in read_pages(FileRange(file), "auto")
        if isinstance(part, DamagedRange) and part.reason == "damaged"
    ]
    assert begin <= gap.start <= begin + len(hurt)


def test_a_page_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    for name, data in (("a.warc", record("response", http(PAGE))), ("b.warc", record("conversion", PAGE))):
        (tmp_path / name).write_bytes(data[:-40])
        form = "warc" if name == "a.warc" else "wet"
        assert read(tmp_path / name, form) == ([], {"cut off": 1})


def test_a_page_larger_than_any_is_left_out_whatever_it_unpacks_to(tmp_path: Path) -> None:
    bomb = gzip.compress(b" " * (MAX_PAGE_BYTES + 1))
    page = http(bomb, "text/html\r\nContent-Encoding: gzip")
    (tmp_path / "a.warc").write_bytes(record("response", page))
    assert read(tmp_path / "a.warc") == ([], {"too long": 1})


def test_a_wet_file_gives_its_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "a.warc.wet"
    file.write_bytes(record("warcinfo", b"x") + record("conversion", "Köprü\nve yol\n".encode()))
    assert [page.text for page in read(file)[0]] == ["Köprü\nve yol"]


def test_a_file_of_html_is_one_page(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    file.write_bytes(PAGE)
    (page,) = read(file)[0]
    assert (page.title, page.id) == ("A page", file.as_posix())


def test_the_form_is_seen_by_the_first_bytes(tmp_path: Path) -> None:
    heads = {"wiki-dump": DUMP.encode(), "warc": record("warcinfo", b"x"), "html": PAGE}
    for form, data in heads.items():
        (tmp_path / form).write_bytes(data)
        assert detect_format(tmp_path / form) == form
    (tmp_path / "other").write_text("just text")
    with pytest.raises(FormatError, match=r"unknown format.*--from"):
        detect_format(tmp_path / "other")


@needs_shared
def test_damaged_archives_give_their_whole_records() -> None:
    results = {file.name: read(file, "warc") for file in sorted((WEB / "warcio").iterdir())}
    assert len(results) == 8
    assert results["example-trunc.warc"][1]["damaged"] == 1
    assert {name: len(pages) for name, (pages, _) in results.items()} == {
        "example-bad.warc.gz.bad": 1,
        "example-digest.warc": 0,
        "example-iana.org-chunked.warc": 1,
        "example-trunc.warc": 1,
        "example-wrong-chunks.warc.gz": 1,
        "example.warc": 1,
        "example.warc.gz": 1,
        "post-test.warc.gz": 0,
    }


@needs_shared
def test_real_dumps_leave_no_markup_in_their_text() -> None:
    for file in sorted(WIKI.iterdir()):
        pages, reasons = read(file)
        assert pages
        assert not reasons["damaged"]
        text = "\n".join(page.text for page in pages)
        for mark in ("[[", "]]", "{{", "{|", "<ref", "'''", "<!--"):
            assert text.count(mark) <= len(text) / 100_000, (file.name, mark)


def test_mutated_files_end_in_pages_reasons_or_an_error_that_names_them(tmp_path: Path) -> None:
    rng, archive = (
        random.Random(5),
        b"".join(record(kind, http(PAGE)) for kind in ("response", "request") * 3),
    )
    whole = {"a.xml": DUMP.encode(), "a.warc": archive, "a.html": PAGE}
    whole |= {"b.xml.bz2": bz2.compress(DUMP.encode()), "b.warc.gz": gzip.compress(archive)}
    outcomes, named = Counter[str](), True
    for name, data in whole.items():
        for _ in range(120):
            hurt = bytearray(data)
            for _ in range(rng.randint(1, 6)):
                position = rng.randrange(len(hurt))
                hurt[position : position + rng.choice([0, 1, 1, 30])] = rng.randbytes(
                    rng.choice([0, 1, 1, 20])
                )
            file = tmp_path / name
            file.write_bytes(bytes(hurt[: rng.choice([len(hurt), rng.randrange(len(hurt))])]))
            form = {"xml": "wiki-dump"}.get(name.split(".")[1], name.split(".")[1])
            try:
                pages, reasons = read(file, form)
            except FormatError as error:
                outcomes["refused"] += 1
                named &= str(error).startswith(str(file))
            else:
                outcomes["read"] += bool(pages)
                outcomes["damaged"] += any(reasons[kind] for kind in ("damaged", "unparsable", "cut off"))
    assert named
    assert min(outcomes[kind] for kind in ("refused", "read", "damaged")) > 10


def inputs(folder: Path) -> Path:
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.xml").write_text(DUMP.replace("Eins", f"Eins{number}"))
    (folder / "a.warc").write_bytes(record("response", http(PAGE)) * 3)
    return folder


def extract_files(folder: Path, output: Path, workers: int = 1) -> dict[str, bytes]:
    job = Extraction(split_inputs(find_inputs([folder])), output, output.with_name(f"{output.name}.work"))
    job.begin()
    run(job.stages(), job.work, workers=workers)
    files = [output] if output.is_file() else sorted(output.iterdir())
    return {file.name: file.read_bytes() for file in files}


def test_the_same_bytes_come_out_whatever_the_workers(tmp_path: Path) -> None:
    folder = inputs(tmp_path / "in")
    once = extract_files(folder, tmp_path / "one")
    assert sorted(once) == sorted(f"{file.name}.jsonl" for file in folder.iterdir())
    assert extract_files(folder, tmp_path / "two", workers=2) == once
    (single,) = extract_files(folder, tmp_path / "all.jsonl", workers=2).values()
    assert single == b"".join(once[f"{file.name}.jsonl"] for file in sorted(folder.iterdir()))
    rows = [json.loads(line) for line in single.splitlines()]
    assert {tuple(row) for row in rows} == {("id", "url", "title", "text")}
    assert len(rows) == 13


def extract(*arguments: object) -> str:
    outcome = CliRunner().invoke(commands, ["extract", *map(str, arguments)])
    if isinstance(outcome.exception, MegaError):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_the_command_tells_what_it_found_and_what_it_left_out(tmp_path: Path) -> None:
    folder = inputs(tmp_path / "in")
    output = extract("--input", folder, "--output", tmp_path / "all.jsonl")
    assert "all.jsonl: 13 documents" in output
    assert "left out 5: redirect" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "in"]


def test_mistakes_are_answered_by_name(tmp_path: Path) -> None:
    folder = inputs(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--input: no files there.*\.xml, \.warc"):
        extract("--input", tmp_path / "empty", "--output", tmp_path / "o")
    with pytest.raises(FormatError, match=r"a\.warc: not a MediaWiki dump"):
        extract("--input", folder / "a.warc", "--from", "wiki-dump", "--output", tmp_path / "o.jsonl")
    with pytest.raises(FormatError, match=r"0\.xml: not a web archive"):
        extract("--input", folder / "0.xml", "--from", "warc", "--output", tmp_path / "p.jsonl")
    (folder / "a.warc.gz").write_bytes(gzip.compress(b"WARC/1.0"))
    with pytest.raises(ConfigError, match=r"two files of one name.*--output all\.jsonl"):
        extract("--input", folder, "--output", tmp_path / "o")


def test_a_library_that_is_missing_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.html").write_bytes(PAGE)
    monkeypatch.delitem(sys.modules, "mega_data.extract.warc", raising=False)
    monkeypatch.setitem(sys.modules, "fastwarc.warc", None)
    with pytest.raises(ConfigError, match=r"wanted fastwarc.*pip install .*mega-data\[extract\]"):
        extract("--input", tmp_path / "a.html", "--output", tmp_path / "o")


def test_a_page_of_nested_elements_is_taken_whole_in_bounded_time() -> None:
    pytest.importorskip("resiliparse")
    import time

    from mega_data.extract.html import html_text

    began = time.process_time()
    for depth in (1000, 20_000, 200_000):
        page = f"<html><body><nav>menu</nav>{'<div>' * depth}one text{'</div>' * depth}".encode()
        _, text = html_text(page)
        assert text.split() == (["one", "text"] if depth == 1000 else ["menu", "one", "text"])
    assert time.process_time() - began < 5
