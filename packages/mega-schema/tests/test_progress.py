"""Progress of a command: a bar of rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mega_schema.app.progress import ProgressBar, format_duration, progress_bar
from mega_schema.errors import ConfigError

# what a file's name could tell a terminal: fill the clipboard, clear the screen, reverse the text
HOSTILE = "x\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e\r"
ESCAPED = r"x\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e\r"
IMPORTS = "import os, signal, sys, time; from mega_schema.app.progress import progress_bar; "


def bar_in_log(label: str, total: int | None, times: list[float], unit: str | None = "bytes") -> ProgressBar:
    """A bar without a terminal; `times` are those of its creation and of every call."""
    clock = iter(times)
    return ProgressBar(label, total, unit=unit, now=lambda: next(clock))


def test_progress_for_a_program_is_an_object_per_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGA_PROGRESS", "json")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("encode 1/2", 3_000_000) as bar:
        bar._now = lambda: 100.0
        bar(0, show=True)
        bar._now = lambda: 104.0
        bar(2_000_000, 7, label="encode 2/2", show=True)
    with progress_bar("pairs", None, unit=None) as bar:
        bar(1, show=True)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        {"label": "encode 1/2", "completed": 0, "total": 3_000_000, "unit": "bytes"}
        | {"documents": 0, "per_second": None, "seconds_left": None},
        {"label": "encode 2/2", "completed": 2_000_000, "total": 3_000_000, "unit": "bytes"}
        | {"documents": 7, "per_second": 500_000.0, "seconds_left": 2.0},
        {"label": "pairs", "completed": 1, "total": None, "unit": None}
        | {"documents": 0, "per_second": None, "seconds_left": None},
    ]
    monkeypatch.setenv("MEGA_PROGRESS", "xml")
    message = r"MEGA_PROGRESS: no format: found xml, wanted text \| json"
    with pytest.raises(ConfigError, match=message), progress_bar("pairs", None):
        pass


@dataclass(frozen=True)
class Outcome:
    """What a process printed, and how it ended."""

    terminal: str
    stdout: str
    code: int


def on_terminal(code: str, *, columns: int = 120, term: str = "xterm") -> Outcome:
    """Run code in a process whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    # pytest-xdist sets COLUMNS, which rich takes before the size of the terminal
    environment = {**os.environ, "TERM": term}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-c", IMPORTS + code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment
    ) as process:
        os.close(theirs)
        shown = b"".join(_chunks(ours)).decode()
        os.close(ours)
        stdout, _ = process.communicate(timeout=60)
    return Outcome(shown, stdout, process.returncode)


def _chunks(terminal: int) -> Iterator[bytes]:
    try:
        while chunk := os.read(terminal, 1 << 16):
            yield chunk
    except OSError:  # the other end is closed
        return


def frames(shown: str) -> list[str]:
    """The states of the line, without colours and control sequences."""
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n", "", frame) for frame in shown.split("\r\x1b[2K")]


def cursor_is_visible(shown: str) -> bool:
    return re.findall(r"\x1b\[\?25([lh])", shown)[-1] == "h"


def test_a_log_has_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    bar = bar_in_log("encoding", 40_000_000, [0.0, 1.0, 3.0, 11.0, 12.0, 21.0])
    bar(4_000_000, 1000)  # of an earlier run: not part of the rate
    for _ in range(4):
        bar(5_000_000, 1234)
    assert capsys.readouterr().err.splitlines() == [
        "encoding: 14.0 of 40.0 MB, 3,468 documents, 1.0 MB/s, 26 s left",
        "encoding: 24.0 of 40.0 MB, 5,936 documents, 1.0 MB/s, 16 s left",
    ]


def test_an_unknown_total_has_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    bar = bar_in_log("reading", None, [0.0, 1.0, 11.0])
    bar(1_000_000)
    bar(20_000_000)
    assert capsys.readouterr().err == "reading: 21.0 MB, 2.0 MB/s\n"


def test_large_amounts_are_in_gb_and_long_times_in_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    bar = bar_in_log("converting", 100_000_000_000, [0.0, 0.0, 10.0])
    bar(0)
    bar(10_000_000_000)
    assert capsys.readouterr().err == "converting: 10.0 of 100.0 GB, 1000.0 MB/s, 90 s left\n"
    bar = bar_in_log("converting", 100_000_000_000, [0.0, 0.0, 10.0])
    bar(0)
    bar(1_000_000_000)
    assert capsys.readouterr().err == "converting: 1.0 of 100.0 GB, 100.0 MB/s, 16:30 left\n"
    assert [format_duration(seconds) for seconds in (59.6, 3599, 3661)] == ["1:00", "59:59", "1:01:01"]


@pytest.mark.parametrize(
    ("unit", "line"),
    [("windows", "scoring: 10 of 1,000 windows, 1.0 windows/s, 16:30 left"), (None, "scoring: 16:30 left")],
)
def test_a_unit_other_than_bytes_is_counted_in_whole_numbers(
    unit: str | None, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = bar_in_log("scoring", 1000, [0.0, 0.0, 10.0], unit)
    bar(0)
    bar(10)
    assert capsys.readouterr().err == f"{line}\n"


def test_zero_items_divide_nothing_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("merging", 0):
        pass
    assert capsys.readouterr().err == ""
    bar = bar_in_log("merging", 0, [0.0, 0.0, 20.0])
    bar(0)
    bar(0)
    assert capsys.readouterr().err == "merging: 0.0 of 0.0 MB, 0.0 MB/s, 0 s left\n"
    outcome = on_terminal("\nwith progress_bar('merging', 0): pass")
    assert outcome.code == 0
    assert "0.0 of 0.0 MB" in frames(outcome.terminal)[0]


def test_a_call_can_ask_for_a_line_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    bar = bar_in_log("extract", 2_000_000, [0.0, 0.0, 0.5, 1.0])
    bar(0)
    bar(1_000_000, label="extract 1/2", show=True)
    bar(1_000_000)
    assert capsys.readouterr().err == "extract 1/2: 1.0 of 2.0 MB, 2.0 MB/s, 0 s left\n"


def test_control_characters_of_a_name_reach_neither_log_nor_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = bar_in_log(HOSTILE, None, [0.0, 0.0, 20.0])
    bar(0)
    bar(1_000_000, label=HOSTILE * 2)
    assert capsys.readouterr().err.startswith(f"{ESCAPED * 2}: 1.0 MB")
    code = f"""
with progress_bar({HOSTILE!r}, None) as bar:
    bar(1, label='[red]' + {HOSTILE!r} + '{{}}', show=True)
"""
    shown = on_terminal(code).terminal
    first, *_, last = frames(shown)
    assert first.startswith(f"{ESCAPED} ")
    assert last.startswith(f"[red]{ESCAPED}{{}} ")
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
    assert "\x1b]" not in shown


def test_a_terminal_has_a_bar_with_rate_and_time_left_that_is_erased_at_the_end() -> None:
    code = """
with progress_bar("encoding", 40_000_000) as bar:
    bar(0)
    for _ in range(3):
        time.sleep(0.11)
        bar(5_000_000, 1234)
print("done")
"""
    outcome = on_terminal(code)
    shown = outcome.terminal
    assert outcome.stdout == "done\n"
    pattern = r"encoding ━+[╸╺]━+ 15\.0 of 40\.0 MB, 3,702 documents, \d+\.\d MB/s, \d s left"
    assert [frame for frame in frames(shown) if re.fullmatch(pattern, frame)]
    assert shown.endswith("\r\x1b[1A\x1b[2K")
    assert cursor_is_visible(shown)


def test_a_bar_that_is_not_transient_stays_with_its_last_state() -> None:
    shown = on_terminal("\nwith progress_bar('keys', 3, unit=None, transient=False) as bar: bar(3)").terminal
    assert frames(shown)[-1].startswith("keys ━")
    assert frames(shown)[-1].endswith(" 0 s left")
    assert "\x1b[1A" not in shown


def test_a_bar_is_drawn_ten_times_a_second_at_most() -> None:
    code = """
with progress_bar("reading", 1_000_000) as bar:
    for _ in range(10_000):
        bar(100)
"""
    shown = on_terminal(code).terminal
    assert len(frames(shown)) < 20


def test_a_narrow_terminal_has_one_line() -> None:
    code = """
with progress_bar("a label of thirty-one characters", 10**9) as bar:
    for _ in range(5):
        bar(10**8, 10**6, show=True)
"""
    shown = on_terminal(code, columns=30).terminal
    assert len(frames(shown)) > 5
    assert [frame for frame in frames(shown) if len(frame) > 30] == []
    assert shown.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 1), ("SIGKILL", -signal.SIGKILL)])
def test_a_process_that_is_interrupted_or_killed_leaves_a_visible_cursor(number: str, code: int) -> None:
    body = f"""
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
try:
    with progress_bar("reading", None) as bar:
        bar(1)
        os.kill(os.getpid(), signal.{number})
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit("interrupted")
"""
    outcome = on_terminal(body)
    shown = outcome.terminal
    assert outcome.code == code
    assert cursor_is_visible(shown)
    if number == "SIGINT":
        assert shown.endswith("\x1b[1A\x1b[2Kinterrupted\r\n"), "on a line of its own"


def test_a_warning_is_printed_above_the_bar() -> None:
    code = """
import logging
with progress_bar("reading", None, transient=False) as bar:
    bar(1)
    logging.getLogger("x").warning("a file is empty")
"""
    shown = on_terminal(code).terminal
    assert "a file is empty\r\n" in shown
    assert frames(shown)[-1].startswith("reading ━")


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_without_cursor_movement_has_plain_lines(term: str) -> None:
    code = "\nwith progress_bar('reading', None) as bar: bar(10**6, show=True)"
    shown = on_terminal(code, term=term).terminal
    assert shown == "reading: 1.0 MB\r\n"


def test_rich_is_imported_for_a_terminal_only() -> None:
    code = """
with progress_bar("reading", None) as bar:
    bar(10**6, show=True)
print("rich" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", IMPORTS + code], capture_output=True, text=True, check=True
    )
    assert (process.stdout, process.stderr) == ("False\n", "reading: 1.0 MB\n")
    assert on_terminal(code).stdout == "True\n"
