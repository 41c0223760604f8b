"""Options of sampling, and their names in the two APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import click

from mega_schema.app.click_options import NumberRange, add_options
from mega_schema.errors import ConfigError
from mega_serve.commands.option_groups import option_group

_sampling = option_group("Sampling")


class ApiField(NamedTuple):
    """The field of a request that an option sets, by API; None where the API has none."""

    openai: str | None
    megatron: str | None


FIELDS: Final[Mapping[str, ApiField]] = MappingProxyType(
    {
        "temperature": ApiField("temperature", "temperature"),
        "top_p": ApiField("top_p", "top_p"),
        "top_k": ApiField("top_k", "top_k"),
        "min_p": ApiField("min_p", None),
        "repetition_penalty": ApiField("repetition_penalty", None),
        "presence_penalty": ApiField("presence_penalty", None),
        "frequency_penalty": ApiField("frequency_penalty", None),
        "seed": ApiField("seed", "random_seed"),
        "stop": ApiField("stop", None),
        "n": ApiField("n", None),
        "top_p_decay": ApiField(None, "top_p_decay"),
        "top_p_bound": ApiField(None, "top_p_bound"),
        "beam_width": ApiField(None, "beam_width"),
        "length_penalty": ApiField(None, "length_penalty"),
        "add_bos": ApiField(None, "add_BOS"),
        "stop_on_eol": ApiField(None, "stop_on_eol"),
        "stop_on_double_eol": ApiField(None, "stop_on_double_eol"),
    }
)
_SPELLINGS: Final = MappingProxyType({"add_bos": "--add-BOS"})  # options whose name is not the variable's


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of sampling that most servers know. Without an option the server's default holds."""
    options = (
        _sampling("--temperature", type=NumberRange(0, 100), help="0 takes the most probable token."),
        _sampling("--top-p", type=NumberRange(0, 1), help="Sample from this probability mass."),
        _sampling("--top-k", type=click.IntRange(min=0), help="Sample from the K most probable tokens."),
        _sampling("--min-p", type=NumberRange(0, 1), help="Drop tokens below this fraction of the maximum."),
        _sampling("--repetition-penalty", type=float, help="Divide the logits of earlier tokens by this."),
        _sampling(
            "--presence-penalty", type=float, help="Subtract from logits of tokens that were generated."
        ),
        _sampling(
            "--frequency-penalty", type=float, help="Subtract from logits per time a token was generated."
        ),
    )
    return add_options(function, options)


def request_fields(api: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request for the options that the user gave.

    Args:
        api: openai or megatron.
        values: by variable name, as in FIELDS; None, False and () are options that were not given.

    Raises:
        ConfigError: the API has no such field.
    """
    fields = {}
    for name, value in values.items():
        if value is None or value is False or value == ():
            continue
        field = getattr(FIELDS[name], api)
        if field is None:
            option = _SPELLINGS.get(name, f"--{name.replace('_', '-')}")
            supporting_api = "openai" if api == "megatron" else "megatron"
            what = f"is not in the {api} API"
            raise ConfigError(option, what, hint=f"remove it, or use --api {supporting_api}")
        fields[field] = list(value) if isinstance(value, tuple) else value
    if api == "megatron" and fields.get("temperature") == 0:
        # Megatron's server wants a temperature above 0; its greedy search is top_k = 1
        fields["top_k"] = 1
        del fields["temperature"]
    return fields
