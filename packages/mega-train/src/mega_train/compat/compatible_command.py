"""A command that accepts the launch scripts of Megatron-LM, its forks and fairseq unchanged.

Flags are translated before click parses them. Flags that cannot be translated are refused in one table: the
flag, the reason and a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from mega_schema.app.click_options import MultiValueCommand
from mega_schema.errors import ConfigError, MegaError
from mega_train.compat.flag_translation import (
    DROPOUT_FLAGS,
    MEGATRON_DEFAULTS,
    Translation,
    format_skipped,
    translate_flags,
)
from mega_train.config.refusals import RefusedRunError
from mega_train.fault_tolerance.error_reporting import current_rank

_TRANSLATION = "mega_train.translation"


class MegatronCompatibleCommand(MultiValueCommand):
    """A command that accepts Megatron's flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                [MEGATRON_DEFAULTS],
                is_flag=True,
                expose_value=False,
                help="Use Megatron's defaults where they differ: dropout 0.1, saves in the foreground.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Translate the arguments, then parse them as click does.

        Raises:
            ConfigError: a flag is not supported, or two disagree; the message has a hint.
            RefusedRunError: there are several.
        """
        options = {name: option for option in self.get_params(ctx) for name in _names(option)}
        translation = translate_flags(args, options)
        ctx.meta[_TRANSLATION] = translation
        if not {"-h", "--help", "--help-all"} & set(args):
            _raise_refused(translation.refused, list(_wrong_values(ctx, translation.words, options)))
        return super().parse_args(ctx, translation.words)

    def invoke(self, ctx: click.Context) -> Any:
        """Report ignored flags and differing defaults, then invoke as click does."""
        translation: Translation = ctx.meta[_TRANSLATION]
        if current_rank() == 0:
            if translation.left_out:
                click.echo(f"left out: {format_skipped(translation.left_out)}", err=True)
            if missing := _missing_dropout(translation):
                says = " and ".join(missing)
                verb = "are" if len(missing) > 1 else "is"
                click.echo(
                    f"{says} {verb} 0 unless given, 0.1 in Megatron: {MEGATRON_DEFAULTS} takes its defaults",
                    err=True,
                )
        return super().invoke(ctx)


def _names(option: click.Parameter) -> Sequence[str]:
    return (*option.opts, *option.secondary_opts)


def _missing_dropout(translation: Translation) -> list[str]:
    """List the dropout flags that a script of another program leaves to its own default."""
    given_flags = {word.partition("=")[0] for word in translation.words}
    # Megatron requires --max-position-embeddings and we do not, so its scripts give it
    foreign = translation.is_foreign or "--max-position-embeddings" in given_flags
    if not foreign or "--config" in given_flags or MEGATRON_DEFAULTS in given_flags:
        return []
    return [flag for flag in DROPOUT_FLAGS if flag not in given_flags]


def _wrong_values(
    ctx: click.Context, words: Sequence[str], options: dict[str, click.Parameter]
) -> Iterator[MegaError]:
    """Yield an error for every value that click will not accept."""
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        option = options.get(name)
        if not isinstance(option, click.Option) or option.is_flag or option.multiple or option.nargs != 1:
            continue
        try:
            option.type.convert(value if equals else next_word, option, ctx)
        except click.BadParameter as error:
            yield ConfigError(name, error.message)


def _raise_refused(refused: Sequence[MegaError], wrong: Sequence[MegaError]) -> None:
    """Raise the errors; click itself reports a single wrong value.

    Raises:
        ConfigError: there is one.
        RefusedRunError: there are several.
    """
    errors = [*refused, *wrong]
    if len(errors) == 1 and refused:
        raise errors[0]
    if len(errors) > 1:
        raise RefusedRunError.combine(errors, "command line", "arguments are refused")
