"""Flags of Megatron's preprocess_data.py that change nothing here, and refused ones with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import click

from mega_data.commands.common import WORKERS
from mega_schema.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

_LEAVE_OUT: Final = "leave it out"
_WORKERS_HINT: Final = "--workers with the number of cores; --dry-run estimates the time"
_NO_SEARCH: Final = "the number of workers is not searched for"
# flag -> what is wrong with it, and the hint
_REFUSED_FLAGS: Final = MappingProxyType(
    {
        "--find-optimal-num-workers": (_NO_SEARCH, _WORKERS_HINT),
        "--tokenizer-hf-no-use-fast": (
            "ids are those of the fast tokenizer, tokenizer.json",
            _LEAVE_OUT,
        ),
        "--tokenizer-sentencepiece-legacy": (
            "special tokens in a text are not parsed with a SentencePiece model",
            _LEAVE_OUT,
        ),
        "--tokenizer-sentencepiece-ignore-extra-whitespaces": (
            "the SentencePiece model itself decides about extra white space",
            _LEAVE_OUT,
        ),
        "--trust-remote-code": (
            "code of a tokenizer's folder is never run",
            f"{_LEAVE_OUT}: tokenizer.json needs no code",
        ),
    }
)
_REFUSED_VALUES: Final = MappingProxyType(
    {
        "--max-documents": (_NO_SEARCH, _WORKERS_HINT),
        "--tokenizer-metadata": (
            "names classes of Megatron",
            "--tokenizer-type, and the tokenizer's files",
        ),
        "--workers-to-check": (_NO_SEARCH, _WORKERS_HINT),
    }
)


def megatron_flags(command: Command) -> Command:
    """Add the flags; those that change nothing and newer ones are not in the help."""
    options = (
        click.option("--partitions", type=WORKERS, default=1, help="Accepted and ignored."),
        click.option(
            "--keep-sequential-samples",
            is_flag=True,
            help="Accepted and ignored; samples are always sequential.",
        ),
        click.option(
            "--log-interval",
            type=click.IntRange(min=1),
            default=1000,
            help="Accepted and ignored; progress is on stderr.",
        ),
        click.option(
            "--make-vocab-size-divisible-by",
            type=WORKERS,
            help="Accepted and ignored; padding does not change ids.",
        ),
        click.option("--pad-vocab-size-to", type=WORKERS, help="Accepted and ignored."),
        click.option("--padded-vocab-size", type=WORKERS, hidden=True),
        click.option("--use-gigatoken", is_flag=True, hidden=True),  # used anyway where its ids are equal
        click.option("--tokenizer-hf-use-fast", is_flag=True, hidden=True),
        click.option("--null-tokenizer-pad-id", type=int, hidden=True),  # a dataset has no padding
        click.option("--null-tokenizer-eod-id", type=int, hidden=True),
        click.option("--tokenizer-special-tokens", multiple=True, hidden=True),
        *(_refused_option(flag, is_flag=True) for flag in _REFUSED_FLAGS),
        *(_refused_option(flag, multiple=True) for flag in _REFUSED_VALUES),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _refused_option(flag: str, **kind: bool) -> Callable[[Command], Command]:
    return click.option(flag, **kind, hidden=True, expose_value=False, is_eager=True, callback=_refuse)  # type: ignore[arg-type]


def _refuse(_: click.Context, option: click.Parameter, value: object) -> None:
    if value:
        what, hint = {**_REFUSED_FLAGS, **_REFUSED_VALUES}[option.opts[0]]
        raise ConfigError(option.opts[0], what, hint=hint)


def tokenizer_values(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the tokenizer with those that Megatron has renamed.

    Args:
        kind: --tokenizer-type.

    Raises:
        ConfigError: an option has no meaning for this tokenizer.
    """
    eod = values["null_tokenizer_eod_id"]
    if eod is not None and (kind != "NullTokenizer" or eod != values["vocab_size"]):
        wanted = "the value of --vocab-size, of a NullTokenizer"
        raise ConfigError("--null-tokenizer-eod-id", "not the eod", found=eod, wanted=wanted)
    special_tokens: Sequence[str] = values["tokenizer_special_tokens"]
    if not special_tokens:
        return dict(values)
    if kind != "TikTokenizer":
        what = f"are in the files of a {kind}"
        raise ConfigError("--tokenizer-special-tokens", what, found=" ".join(special_tokens), hint=_LEAVE_OUT)
    return {**values, "tiktoken_special_tokens": special_tokens}
