"""Who of many ranks speaks when something ends them all: one, and where torchrun's readers look.

torchrun prints a traceback of its own below every failure, with a summary at its end. A line that lies in the
file it names in TORCHELASTIC_ERROR_FILE stands in that summary as the cause.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from mega_schema.app.cli_runner import INTERRUPTED
from mega_schema.errors import MegaError
from mega_train.config.refusals import Refused, show_table

REPORT_DELAY = 10.0  # seconds
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class RankLostError(MegaError):
    """Another rank is gone or does not answer."""


class SingleRankErrors(click.Group):
    """Commands that leave it to the first rank to say what all ranks find.

    When it leaves, torchrun ends the others. A rank that found something by itself, such as a file its
    machine lacks, says so when nothing ended it. What ranks find out about each other, the watchdog says.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if current_rank():
                sys.exit(INTERRUPTED)
            raise
        except (MegaError, click.ClickException) as error:
            if current_rank():
                time.sleep(REPORT_DELAY)
            elif isinstance(error, Refused):
                show_table(error.errors)
            text = error.format_message() if isinstance(error, click.ClickException) else str(error)
            write_error_file(f"error: {text}")
            raise


def current_rank() -> int:
    """This process's rank; torch is not imported for a mistake in the flags of a run that is alone."""
    if _ERROR_FILE not in os.environ and "mega_model.distributed.mesh" not in sys.modules:
        return 0
    from mega_model.distributed.mesh import World

    return World.from_env().rank


def write_error_file(line: str) -> None:
    """Leave the line where torchrun looks for the cause."""
    if file := os.environ.get(_ERROR_FILE):
        record = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": record}), "utf-8")
