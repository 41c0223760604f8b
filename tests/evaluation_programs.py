"""Programs for the tests of mega-eval: the command, and the command killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

IMPORTS = ("mega_eval.commands.evaluate", "mega_eval.tasks.lambada", "mega_eval.tasks.wikitext")


def run() -> None:
    """Run mega-eval."""
    from mega_eval.cli import main

    main()


def run_until_killed() -> None:
    """Run mega-eval until it has kept a number of batches, the first argument; then SIGKILL."""
    from mega_eval.models.answer_cache import AnswerCache

    limit = int(sys.argv.pop(1))
    append = AnswerCache._append
    batches = 0

    def count(*words: Any) -> None:
        nonlocal batches
        append(*words)
        batches += 1
        if batches == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    AnswerCache._append = count  # type: ignore[method-assign]
    run()
