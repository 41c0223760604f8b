"""Let the output of a command be a URL: run the command on local folders, then upload what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from mega_schema.errors import ConfigError
from mega_schema.remote_files import RemotePath

Command = TypeVar("Command", bound=Callable[..., Any])


def uploads_output(command: Command) -> Command:
    """Let `--output` be a URL; the last call of a run, without --stage, uploads."""

    @wraps(command)
    def run(*, output: Path, work: Path | None, inputs: tuple[str, ...], **values: Any) -> None:
        if not isinstance(output, RemotePath):
            command(output=output, work=work, inputs=inputs, **values)
            return
        from mega_data.remote_output import RemoteOutput, upload_after

        place = RemoteOutput("--output", output, work, inputs)
        with upload_after(place, _reporter(output), is_last_call=values["only"] is None):
            command(output=place.local, work=place.work, inputs=inputs, **values)

    return cast(Command, run)


def uploads_dataset(command: Command) -> Command:
    """Let `--output-prefix` be a URL."""

    @wraps(command)
    def run(*, output_prefix: Path, work: Path | None, words: tuple[str, ...], **values: Any) -> None:
        if not isinstance(output_prefix, RemotePath):
            if work is not None:
                what = "has an effect only if --output-prefix is a URL"
                raise ConfigError("--work-dir", what, found=work, hint="leave it out")
            command(output_prefix=output_prefix, words=words, **values)
            return
        from mega_data.remote_output import RemoteOutput, upload_after

        place = RemoteOutput("--output-prefix", output_prefix, work, words, is_prefix=True)
        with upload_after(place, _reporter(output_prefix), is_last_call=values["only"] is None):
            place.local.parent.mkdir(parents=True, exist_ok=True)
            command(output_prefix=place.local, words=words, **values)

    return cast(Command, run)


def _reporter(url: Path) -> Callable[[int], object]:
    return lambda size: click.echo(f"{url}: {size / 1e6:.2f} MB uploaded")
