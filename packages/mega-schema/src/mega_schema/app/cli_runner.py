"""Run a command and report a user's mistake as one line and exit code 2.

A traceback on the terminal means a bug in this toolkit. Exit codes: 0 done, 1 different (of a command that
compares), 2 a mistake that the line explains, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import click

from mega_schema.app.click_messages import rephrase_usage, rephrase_value
from mega_schema.app.click_options import flag_of
from mega_schema.errors import MegaError

MISTAKE = 2
INTERRUPTED = 130
TERMINATED = 143
# Python's default collects after 700 new objects. A vocabulary is 100,000 lists without cycles: looking for
# cycles took a third of the time to open one.
GC_THRESHOLDS = (100_000, 20, 20)


class TerminationError(KeyboardInterrupt):
    """SIGTERM asked the process to end. Raised so that files are cleaned up."""


def raise_at_sigterm(words: str) -> None:
    """Make SIGTERM raise `TerminationError` in this process; `run_command` prints its message."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
        raise TerminationError(words)

    signal.signal(signal.SIGTERM, end)


def run_command(command: click.Command, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `command` and exit the process.

    To print more about an interruption, a command raises `KeyboardInterrupt(words)`.

    Args:
        argv: the words after the program's name; None takes them from the process.
    """
    stdout = sys.stdout
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        code = command.main(args=None if argv is None else list(argv), standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        _exit_with(error.format_message())
    except click.ClickException as error:
        _exit_with(f"error: {format_click_error(error)}")
    except MegaError as error:
        _exit_with(f"error: {error}")
    except (KeyboardInterrupt, click.Abort) as error:
        # click has ended the line of ^C, and replaced the command's exception by its own
        cause = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        is_terminated = isinstance(cause, TerminationError)
        word = "terminated" if is_terminated else "interrupted"
        click.echo(f"{word}{f': {cause}' if str(cause or '') else ''}", err=True)
        sys.exit(TERMINATED if is_terminated else INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:
        # The reader of our output has closed the pipe (`| head`), which is not an error. If click sees it
        # first, it replaces stdout by a silent stream and exits with 1.
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise
        _exit_with(f"error: {error.filename}: {error.strerror}")
    sys.exit(code if isinstance(code, int) else 0)


def format_click_error(error: click.ClickException) -> str:
    """Format click's message as one line that begins with the flag, like all messages of this toolkit."""
    text = rephrase_usage(error.format_message())
    match error:
        case click.NoSuchOption(option_name=flag, possibilities=near):
            close = get_close_matches(flag, near or (), 1)
            hint = f"did you mean {close[0]}?" if close else _usage_of_arguments(error.ctx)
            text = f"{flag}: no such option" + (f"; hint: {hint}" if hint else "")
        case click.BadOptionUsage(option_name=flag):
            text = f"{flag}: needs a value"
        case click.MissingParameter(param=click.Option() as option):
            text = f"{flag_of(option)}: missing; hint: add {flag_of(option)} ..."
        case click.MissingParameter(param=click.Parameter() as argument):
            usage = _usage_of_arguments(error.ctx)
            text = f"{flag_of(argument)}: missing" + (f"; hint: {usage}" if usage else "")
        case click.BadParameter(param=click.Parameter() as parameter):
            text = f"{flag_of(parameter)}: {rephrase_value(error.message)}"
    return " ".join(text.split())


def _usage_of_arguments(context: click.Context | None) -> str:
    """Return the usage of a command with required arguments, of which a wrong option may be one; else ""."""
    if context is None:
        return ""
    parameters = context.command.get_params(context)
    if not any(isinstance(parameter, click.Argument) and parameter.required for parameter in parameters):
        return ""
    return f"{context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"


def _exit_with(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(MISTAKE)
