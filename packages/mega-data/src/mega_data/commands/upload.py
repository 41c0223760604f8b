"""Let the output of a command be a URL: run the command on local folders, then upload what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from mega_schema.errors import ConfigError
from mega_schema.remote_files import RemotePath

Command = TypeVar("Command", bound=Callable[..., Any])
_URL: Final = "mega_data.output_url"  # in the context of a command


def uploads_output(*inputs: str) -> Callable[[Command], Command]:
    """Let `--output` be a URL; the last call of a run, without --stage, uploads.

    Args:
        inputs: parameters of the command that name its inputs.
    """
    return _uploads("output", inputs, is_prefix=False)


def uploads_dataset(*inputs: str, keeps_work: bool) -> Callable[[Command], Command]:
    """Let `--output-prefix` be a URL.

    Args:
        inputs: as of `uploads_output`.
        keeps_work: the command has --work-dir also for an output on this machine.
    """
    return _uploads("output_prefix", inputs, is_prefix=True, keeps_work=keeps_work)


def _uploads(
    name: str, inputs: tuple[str, ...], *, is_prefix: bool, keeps_work: bool = True
) -> Callable[[Command], Command]:
    option = f"--{name.replace('_', '-')}"

    def add(command: Command) -> Command:
        @wraps(command)
        def run(*, work: Path | None, **values: Any) -> None:
            url = values[name]
            if not isinstance(url, RemotePath):
                if work is not None and not keeps_work:
                    what = f"has an effect only if {option} is a URL"
                    raise ConfigError("--work-dir", what, found=work, hint="leave it out")
                command(**values, **({"work": work} if keeps_work else {}))
                return
            from mega_data.remote_output import RemoteOutput, upload_after

            words = [str(word) for parameter in inputs for word in values[parameter]]
            place = RemoteOutput(option, url, work, words, is_prefix=is_prefix)
            click.get_current_context().meta[_URL] = url
            with upload_after(place, _reporter(url), is_last_call=values["only"] is None):
                if is_prefix:
                    place.local.parent.mkdir(parents=True, exist_ok=True)
                values[name] = place.local
                command(**values, **({"work": place.work} if keeps_work else {}))

        return cast(Command, run)

    return add


def output_url() -> RemotePath | None:
    """Return the URL to which the output of this command is uploaded; None for one on this machine."""
    context = click.get_current_context(silent=True)
    url = context.meta.get(_URL) if context else None
    return url if isinstance(url, RemotePath) else None


def _reporter(url: Path) -> Callable[[int], object]:
    return lambda size: click.echo(f"{url}: {size / 1e6:.2f} MB uploaded")
