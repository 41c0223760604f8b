"""Write the counts of a command to the JSON file of `mega-data --result-file`, for `mega-data run`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click


def record_counts(
    *,
    documents_in: int | None = None,
    documents_out: int | None = None,
    dropped: Mapping[str, int] | None = None,
) -> None:
    """Write the counts of a finished command to the result file, if the command line names one.

    Args:
        documents_in, documents_out: None if the command does not count them.
        dropped: documents by reason.
    """
    counts = {reason: count for reason, count in (dropped or {}).items() if count}
    _write({"documents_in": documents_in, "documents_out": documents_out, "dropped": counts})


def record_stages(stages: Iterable[str]) -> None:
    """Write the names of a run's stages to the result file, if the command line names one."""
    _write({"stages": list(stages)})


def _write(values: Mapping[str, Any]) -> None:
    context = click.get_current_context(silent=True)
    path = context.find_object(Path) if context else None
    if path is not None:
        import json

        from mega_data.task_stages import write_file

        write_file(path, json.dumps(values, ensure_ascii=False))
