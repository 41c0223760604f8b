"""The step that replaces personal data."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_data.clean.registry import step_from_flag
from mega_data.clean.step import Row
from mega_data.cli import commands
from mega_schema.errors import ConfigError

NO_IPV6 = "fe80::1, ::1, dead::beef, 2001:db8::7, 12:34:56"
NO_PHONES = "2020-12-31, 1234567890, 10.5-3.2, +1, 3+4155562766"


def replace_in(text: str, options: str = "style=tokens") -> str:
    (result,) = step_from_flag(f"pii:{options}").step.start()(Row({"text": text}, "text", 0, 1))
    return result.text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("write to Jane.Doe+x@mail.example.co.uk.", "write to <EMAIL>."),
        ("<a@b.org>, 'c@d.org'", "<<EMAIL>>, '<EMAIL>'"),
        ("a@b no address, a..b@c.org", "a@b no address, a..<EMAIL>"),
        ("root@[8.8.8.8]", "<EMAIL>"),
        ("@handle and a @ b", "@handle and a @ b"),
        ("DNS 8.8.8.8, 9.9.9.9.", "DNS <IP>, <IP>."),
        ("8.8.8.8:53 and http://8.8.8.8/x", "<IP>:53 and http://<IP>/x"),
        ("127.0.0.1 10.1.2.3 192.168.0.1 255.255.255.255", "127.0.0.1 10.1.2.3 192.168.0.1 255.255.255.255"),
        ("OID 1.3.6.1.4, v8.8.8.8 and 8.8.8.8.8", "OID 1.3.6.1.4, v8.8.8.8 and 8.8.8.8.8"),
        ("08.8.8.8 or 8.8.8.256", "08.8.8.8 or 8.8.8.256"),
        ("2a00:1450:4001:81b::200e is public", "<IP> is public"),
        ("[2606:4700:4700::1111]:443", "[<IP>]:443"),
        (f"not {NO_IPV6}", f"not {NO_IPV6}"),
        ("call +90 212 555 01 00 or +49 (30) 901820", "call <PHONE> or <PHONE>"),
        ("(415) 844-9759, 415-556-2766, 1-800-222-0364, 415.556.2766", "<PHONE>, <PHONE>, <PHONE>, <PHONE>"),
        (f"not {NO_PHONES}", f"not {NO_PHONES}"),
        ("415-556-27661 and 0415-556-2766", "415-556-27661 and 0415-556-2766"),
    ],
)  # fmt: skip
def test_personal_data_is_replaced_and_nothing_that_only_looks_like_it(text: str, wanted: str) -> None:
    assert replace_in(text) == wanted


def test_examples_are_reserved_addresses_and_stay_as_they_are() -> None:
    text = "a@b.org c@d.org e@f.org 8.8.8.8 9.9.9.9 2a00:1450::1 +90 212 555 01 00"
    wanted = (
        "email@example.com firstname.lastname@example.org email@example.com 192.0.2.1 198.51.100.1 "
        "2001:db8::1 +1-202-555-0100"
    )
    assert replace_in(text, "") == wanted
    assert replace_in(wanted, "") == wanted
    assert replace_in("a@b.org 8.8.8.8", "kinds=ips") == "a@b.org 192.0.2.1"


def test_replacements_are_counted_in_the_report(tmp_path: Path) -> None:
    lines = ["a@b.org, c@d.org and 8.8.8.8", "nothing", "e@f.org"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    arguments = [
        "--input",
        tmp_path / "a.jsonl",
        "--output",
        tmp_path / "out",
        "--step",
        "pii",
        "--step",
        "length",
    ]
    outcome = CliRunner().invoke(commands, ["clean", *map(str, arguments)])
    assert outcome.exit_code == 0, outcome.output
    assert "pii: 3 of 3 documents\n  3  email replaced\n  1  ipv4 replaced\nlength:" in outcome.stdout
    pii, length = json.loads((tmp_path / "out/report.json").read_bytes())["steps"]
    assert (pii["replaced"], pii["changed"]) == ({"email": 3, "ipv4": 1}, 2)
    assert length["replaced"] == {}
    assert "<td>email</td>" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/a.jsonl").read_text().splitlines()[1] == '{"text": "nothing"}'


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("pii:kinds=email", "kinds: unknown: found email, wanted emails | ips | phones; hint:"),
        ("pii:kinds=", "kinds: unknown: found nothing"),
        ("pii:style=token", "style: unknown: found token, wanted examples | tokens"),
    ],
)  # fmt: skip
def test_an_unknown_kind_or_style_is_refused(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        step_from_flag(flag).step.start()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "piece", ["a=", "a.", "1.", "2000:", "+1 ", "+1-", "a@a-", "(415) ", "1.2.3.4", "@", "a", "a@", "2a::"]
)
def test_the_time_is_proportional_to_the_text(piece: str) -> None:
    text = f"a@b.org 8.8.8.8 2a00:1450::1 +1 {piece * (100_000 // len(piece))}@"
    began = time.process_time()
    replace_in(text)
    assert time.process_time() - began < 2  # a minute, if each start reads to the end
