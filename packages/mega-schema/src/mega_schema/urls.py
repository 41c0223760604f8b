"""Recognise URLs among paths. Python would take `s3://bucket/a` for the relative path `s3:/bucket/a`.

Uses Python's standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mega_schema.errors import ConfigError

# one slash: a `Path` merges the two; two letters: `C:/` is a drive
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_COPY_COMMANDS: Final = MappingProxyType(
    {
        "s3": "aws s3 cp --recursive",
        "gs": "gcloud storage cp --recursive",
        "az": "azcopy copy --recursive",
        "hf": "hf download",
        "http": "curl --remote-name",
        "https": "curl --remote-name",
    }
)


def url_scheme(path: str | Path) -> str:
    """Return the scheme of a URL in lower case; "" for a path of this machine."""
    match = _URL.match(str(path))
    return match[1].lower() if match else ""


def format_url(path: str | Path) -> str:
    """Return a URL with the two slashes that pathlib has merged."""
    scheme, _, rest = str(path).partition(":")
    return f"{scheme}://{'/' * (scheme == 'file')}{rest.lstrip('/')}"


def check_host(option: str, url: str) -> str:
    """Return a URL; refuse one without a host or bucket, as `http:///x`: a path takes the next part for it.

    Args:
        option: the command-line option that names it; "" begins the message with the URL.

    Raises:
        ConfigError: the URL is refused.
    """
    scheme, _, rest = url.partition("://")
    if rest[:1] not in ("", "/"):
        return url
    part = "host" if scheme.lower() in ("http", "https") else "bucket"
    hint = f"{scheme}://{part.upper()}/FILE"
    if not option:
        raise ConfigError(url, f"names no {part}", hint=hint)
    raise ConfigError(option, f"names no {part}", found=url, hint=hint)


def check_local(option: str, path: str | Path, schemes: Sequence[str] = ()) -> None:
    """Refuse a URL where a path of this machine is needed, or a URL of some schemes that the caller handles.

    Args:
        option: the command-line option that names the path; begins the message. "" begins it with the URL.
        schemes: the schemes that the option accepts, for the message.

    Raises:
        ConfigError: the path is a URL.
    """
    scheme = url_scheme(path)
    if not scheme:
        return
    url = format_url(path)
    if scheme == "file":
        hint = url.removeprefix("file://")
    elif command := _COPY_COMMANDS.get(scheme):
        hint = f"name a local path, and copy the files as `{command}` does"
    else:
        hint = "name a local path, and copy the files"
    wanted = "a path of this machine"
    if schemes:
        wanted += f" or a URL that begins with {', '.join(f'{name}://' for name in schemes)}"
    if not option:
        raise ConfigError(url, "is a URL", wanted=wanted, hint=hint)
    raise ConfigError(option, "is a URL", found=url, wanted=wanted, hint=hint)
