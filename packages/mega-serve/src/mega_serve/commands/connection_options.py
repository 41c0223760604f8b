"""Options of every command that speaks to a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_schema.app.click_options import NonEmptyPath, NumberRange, add_options
from mega_schema.errors import ConfigError
from mega_serve.commands.option_groups import option_group

if TYPE_CHECKING:
    from mega_serve.client.http import ServerClient

_connection = option_group("Connection")


def connection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --api-key-file, --header, --timeout and --insecure."""
    options = (
        _connection(
            "--api-key-file",
            type=NonEmptyPath(exists=True, dir_okay=False),
            metavar="FILE",
            help="File with the API key: a line with KEY, or NAME:KEY as in the server's file.  "
            "[default: the environment's MEGA_API_KEY or OPENAI_API_KEY]",
        ),
        _connection(
            "--header",
            "headers",
            multi=True,
            metavar="KEY=VALUE ...",
            help="HTTP headers to send with every request.",
        ),
        _connection(
            "--timeout",
            type=NumberRange(min=0, min_open=True),
            default=600.0,
            show_default=True,
            metavar="SECONDS",
            help="Fail if the server sends nothing for this long.",
        ),
        _connection(
            "--insecure", is_flag=True, help="Do not verify the server's TLS certificate (https:// only)."
        ),
    )
    return add_options(function, options)


def open_client(
    address: str,
    option: str,
    *,
    api_key_file: Path | None,
    headers: Sequence[str],
    timeout: float,
    insecure: bool,
    keeps_connections: bool = True,
    megatron_option: str = "",
) -> ServerClient:
    """Return a client for the address and the values of the connection options.

    Args:
        option: the argument that holds the address.
        megatron_option: of the command, selects `PUT /api`; for a hint.

    Raises:
        ConfigError: one of the values is wrong.
    """
    from mega_serve.client.http import ServerClient, read_api_key
    from mega_serve.client.server_address import parse_address

    return ServerClient(
        parse_address(address, option),
        api_key=read_api_key(api_key_file, os.environ),
        headers=parse_pairs("--header", headers),
        timeout=timeout,
        verify_tls=not insecure,
        keeps_connections=keeps_connections,
        megatron_option=megatron_option,
    )


def parse_pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """Return the pairs of words such as KEY=VALUE.

    Raises:
        ConfigError: a word has no equals sign, or no key before it.
    """
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip() or not (word.isascii() and word.isprintable()):
            raise ConfigError(option, "is not a pair", found=word, wanted="KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs
