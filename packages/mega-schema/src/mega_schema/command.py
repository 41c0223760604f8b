"""How every command of the house begins and ends: one line for a person's mistake, exit code 2.

A traceback on the terminal means a bug of ours. Exit codes: 0 done, 2 a mistake the line explains,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from mega_schema.errors import MegaError

MISTAKE, INTERRUPTED = 2, 130


def run(command: click.Command, argv: Sequence[str] | None = None, *, quiet: bool = False) -> NoReturn:
    """Run `command` and leave the process.

    Args:
        argv: the words after the program's name; None takes them from the process.
        quiet: say nothing on a mistake, for the ranks beside the one that speaks.
    """
    stdout = sys.stdout
    try:
        code = command.main(args=None if argv is None else list(argv), standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        _leave(error.format_message(), quiet)
    except click.ClickException as error:
        _leave(f"error: {' '.join(error.format_message().split())}", quiet)
    except MegaError as error:
        _leave(f"error: {error}", quiet)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:
        # the reader of our output went away (`| head`): that is its right, and not an error. Where click sees
        # it first, it puts a silent stream in place of stdout and exits with 1
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise
        _leave(f"error: {error.filename}: {error.strerror}", quiet)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, quiet: bool) -> NoReturn:
    if not quiet:
        click.echo(message, err=True)
    sys.exit(MISTAKE)
