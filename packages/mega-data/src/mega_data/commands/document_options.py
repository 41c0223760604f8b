"""The options of the commands that read JSON lines or tables and write JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import ON_ERROR, Command, adapter_option, max_errors_option, open_adapter

if TYPE_CHECKING:
    from mega_data.readers.ranges import InputRange


def document_options(command: Command) -> Command:
    """Add the flags of the commands that read JSON lines or tables and write JSON lines."""
    text = (
        "JSON lines, .csv, .tsv or .parquet, also .gz .zst .xz .bz2 .lz4: files, globs, folders, URLs, "
        "saved datasets."
    )
    options = (
        click.option("--input", "inputs", multiple=True, required=True, help=text),
        click.option(
            "--json-key", default="text", help="Key of the text; meta.text: text in the object meta."
        ),
        click.option(
            "--id-key", default="", show_default=False, help="Key of a document's id, written to dropped/."
        ),
        click.option(
            "--on-error", type=ON_ERROR, default="fail", help="What to do with a line that is not a document."
        ),
        max_errors_option("wrong lines"),
        adapter_option,
        click.option(
            "--split-mb",
            type=click.IntRange(min=1),
            default=64,
            help="Megabytes of a JSON-lines or Parquet file per task; compressed lines at blocks, members or "
            "frames.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def find_documents(
    inputs: Sequence[str], adapter: str | None, split_mb: int, *, output: Path, work: Path | None, suffix: str
) -> tuple[InputRange, ...]:
    """Return the files that --input names, a large one as ranges of about --split-mb.

    Args:
        suffix: suffix of the format of the output files, see `output_formats`.

    Raises:
        ConfigError: there is no file, a folder is refused, or a library that an input needs is missing.
    """
    from mega_data.output_folder import find_checked_inputs
    from mega_data.readers.ranges import split_inputs

    items = find_checked_inputs(inputs, output, work, suffix, open_adapter(adapter))
    return split_inputs(items, split_mb * 1_000_000)
