"""Exit codes and output streams of a command."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from mega_schema.app.cli_runner import run_command
from mega_schema.app.click_options import NumberRange
from mega_schema.errors import ConfigError


@click.group()
def cli() -> None:
    """A command of this repository."""


@cli.command()
def fine() -> None:
    click.echo("done")


@cli.command()
def five() -> int:
    return 5


@cli.command()
def mistake() -> None:
    raise ConfigError("key", "is wrong", hint="mend it")


@cli.command()
def absent() -> None:
    raise FileNotFoundError(2, "No such file or directory", "data.jsonl")


@cli.command()
def bug() -> None:
    raise ValueError("ours")


@cli.command()
def system() -> None:
    raise OSError("no file is to blame")


@cli.command()
def interrupt() -> None:
    raise KeyboardInterrupt


@cli.command()
def midway() -> None:
    raise KeyboardInterrupt("after iteration 7")


@cli.command()
@click.option("--number", type=int)
def print_number(number: int) -> None:
    click.echo(number)


@cli.command()
@click.option("--to", required=True)
@click.argument("source", metavar="FILE")
def copy(to: str, source: str) -> None:
    click.echo(f"{source} {to}")


def _leave(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        run_command(cli, words)
    return caught.value.code


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (("fine",), 0, "done\n", ""),
        (("five",), 5, "", ""),
        (("mistake",), 2, "", "error: key: is wrong; hint: mend it\n"),
        (("absent",), 2, "", "error: data.jsonl: No such file or directory\n"),
        (("interrupt",), 130, "", "\ninterrupted\n"),
        (("midway",), 130, "", "\ninterrupted: after iteration 7\n"),
        (
            ("print-number", "--number", "x"),
            2,
            "",
            "error: --number: wrong type: found x, wanted an integer\n",
        ),
    ],
)
def test_a_command_leaves_with_its_code_and_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, out: str, err: str
) -> None:
    assert _leave(*words) == code
    captured = capsys.readouterr()
    assert captured.out == out
    assert captured.err == err


@pytest.mark.parametrize(("word", "kind"), [("bug", ValueError), ("system", OSError)])
def test_a_bug_of_ours_keeps_its_traceback(word: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        run_command(cli, [word])


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _leave() == 2
    assert "A command of this repository." in capsys.readouterr().err


def test_a_word_that_click_does_not_know_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _leave("print-number", "--numbr", "1") == 2
    err = capsys.readouterr().err
    assert err == "error: --numbr: no such option; hint: did you mean --number?\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("print-number", "--number"), "error: --number: needs a value\n"),
        (("print-number", "extra"), "error: extra: unexpected argument; hint: --help lists the arguments\n"),
        (("copy", "x"), "error: --to: missing; hint: add --to ...\n"),
    ],
)
def test_what_click_asks_for_begins_with_its_name(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _leave(*words) == 2
    assert capsys.readouterr().err == message


def test_a_missing_argument_is_named_as_the_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert _leave("copy", "--to", "x") == 2
    line = capsys.readouterr().err
    assert line.startswith("error: FILE: missing; hint: ")
    assert line.endswith(" copy [OPTIONS] FILE\n")


@pytest.mark.parametrize("lines", [1, 100_000], ids=["still buffered", "in the middle"])
def test_a_reader_that_goes_away_is_no_error(lines: int) -> None:
    code = (
        "import click, time\nfrom mega_schema.app.cli_runner import run_command\n"
        f"@click.command()\ndef many():\n print('first', flush=True)\n input()\n for i in range({lines}):\n"
        "  print('x' * 100)\nrun_command(many, [])\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "first\n"
        child.stdout.close()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stderr.read() == ""
        assert child.wait() == 0


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (click.Choice(["a", "b"]), "c", "unknown value: found c, wanted a | b"),
        (click.IntRange(0, 65535), "70000", "out of range: found 70000, wanted 0 to 65535"),
        (click.IntRange(0, 65535), "abc", "wrong type: found abc, wanted an integer"),
        (click.IntRange(1), "0", "out of range: found 0, wanted at least 1"),
        (click.FloatRange(0, min_open=True), "0", "out of range: found 0.0, wanted above 0"),
        (
            click.FloatRange(0, 1, min_open=True),
            "-1",
            "out of range: found -1.0, wanted above 0 and at most 1",
        ),
        (click.FloatRange(max=5), "x", "wrong type: found x, wanted a number"),
        (click.Path(exists=True, dir_okay=False), "no.txt", "no such file: found no.txt"),
        (click.Path(exists=True, file_okay=False), "no", "no such folder: found no"),
    ],
)
def test_clicks_messages_have_the_value_found_and_the_value_wanted(
    kind: click.ParamType, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = click.Command("f", params=[click.Option(["--value"], type=kind)])
    with pytest.raises(SystemExit):
        run_command(command, ["--value", value])
    assert capsys.readouterr().err == f"error: --value: {message}\n"


@pytest.mark.parametrize("word", ["nan", "NaN", "-nan"])
def test_nan_is_in_no_range(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.option("--share", type=NumberRange(0, 1))
    def takes_share(share: float) -> None: ...

    with pytest.raises(SystemExit) as left:
        run_command(takes_share, ["--share", word])
    assert left.value.code == 2
    assert f"--share: out of range: found {word}, wanted 0 to 1" in capsys.readouterr().err
