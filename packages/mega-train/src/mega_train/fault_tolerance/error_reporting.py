"""Report a fatal error from one rank only, in torchelastic's error file, so that torchrun's summary shows it.

torchrun prints its own traceback for every failure, and a summary at the end. The summary shows the line in
the file that TORCHELASTIC_ERROR_FILE names.
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
from mega_train.config.refusals import RefusedRunError, show_table

REPORT_DELAY = 10.0  # seconds
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class RankLostError(MegaError):
    """Another rank has exited or does not reply."""


class SingleRankErrors(click.Group):
    """Commands whose errors only rank 0 reports.

    When it exits, torchrun ends the other ranks. An error that only another rank has, such as a missing file
    on its machine, is reported after a delay. The watchdog reports errors between ranks.
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
            elif isinstance(error, RefusedRunError):
                show_table(error.errors)
            text = error.format_message() if isinstance(error, click.ClickException) else str(error)
            write_error_file(f"error: {text}")
            raise


def current_rank() -> int:
    """Return this process's rank, without importing torch for a flag error in a single-process run."""
    if _ERROR_FILE not in os.environ and "mega_model.distributed.mesh" not in sys.modules:
        return 0
    from mega_model.distributed.mesh import World

    return World.from_env().rank


def write_error_file(line: str) -> None:
    """Write the line to the error file that torchrun reads."""
    if file := os.environ.get(_ERROR_FILE):
        record = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": record}), "utf-8")
