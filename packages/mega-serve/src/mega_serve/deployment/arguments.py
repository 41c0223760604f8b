"""Arguments NAME=VALUE of another program as parameters of the command `mega-serve serve`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from mega_schema.app.cli_runner import format_click_error
from mega_schema.errors import ConfigError
from mega_serve.commands.serve import serve

# the program that holds the port decides these
_OPTIONS_OF_THE_PORT = ("host", "port", "ssl_certfile", "ssl_keyfile", "drain_timeout", "root_path")
_BOOLEANS = MappingProxyType({"true": True, "false": False})


def parse_arguments(args: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of the command `serve`.

    Raises:
        ConfigError: an argument is no option, or has a wrong value.
    """
    options = {
        option.name: option
        for option in serve.params
        if isinstance(option, click.Option) and option.name and option.name not in _OPTIONS_OF_THE_PORT
    }
    by_flag = {flag.lstrip("-").replace("-", "_"): name for name in options for flag in options[name].opts}
    words: list[str] = []
    for argument, text in args.items():
        name = by_flag.get(argument.replace("-", "_"))
        if name is None:
            hint = "mega-serve serve --help lists the options"
            raise ConfigError(argument, "no such argument of a replica", found=text, hint=hint)
        option = options[name]
        if option.is_flag:
            if text not in _BOOLEANS:
                raise ConfigError(argument, "is a switch", found=text, wanted="true | false")
            flags = option.opts if _BOOLEANS[text] else option.secondary_opts
            words += flags[:1]
        else:
            words += [f"{option.opts[0]}={text}"]
    try:
        return serve.make_context("mega-serve", words).params
    except click.UsageError as error:
        flag, _, what = format_click_error(error).partition(": ")
        raise ConfigError(flag, what) from None
