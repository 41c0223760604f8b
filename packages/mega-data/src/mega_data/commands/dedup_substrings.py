"""The options of `mega-data dedup --preset substrings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mega_schema.app.click_options import NumberRange

if TYPE_CHECKING:
    from pathlib import Path

    from mega_data.dedup.span_tokens import Unit
    from mega_data.dedup.substrings import SubstringDedup
    from mega_data.range_outputs import RangeOutputs

SUBSTRINGS: Final = "substrings"
_MIN_TOKENS: Final = 50  # as in arXiv:2107.06499

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class SubstringOptions:
    """The options of the preset, None for the default.

    Attributes:
        min_tokens: tokens of the shortest repetition to remove.
        unit: words or characters, see `dedup.span_tokens`.
        max_repeated: see `substrings.SubstringDedup`.
    """

    min_tokens: int | None
    unit: str | None
    max_repeated: float | None

    def build_job(
        self,
        outputs: RangeOutputs,
        work: Path,
        *,
        key: str,
        id_key: str,
        memory: int,
    ) -> SubstringDedup:
        """Build a run; the arguments are those of `dedup.pipeline.Deduplication`."""
        from mega_data.dedup.corpus_shards import CorpusShards
        from mega_data.dedup.substrings import SubstringDedup

        corpus = CorpusShards((), outputs, key, id_key)
        unit: Unit = "characters" if self.unit == "characters" else "words"
        span = self.min_tokens or _MIN_TOKENS
        return SubstringDedup(corpus, work, unit, span, self.max_repeated, memory)


def substring_options(command: Command) -> Command:
    """Add the options of the preset to a command."""
    options = (
        click.option(
            "--min-tokens",
            type=click.IntRange(2, 1 << 20),
            help=f"With substrings: tokens of the shortest span to remove.  [default: {_MIN_TOKENS}]",
        ),
        click.option(
            "--unit",
            type=click.Choice(["words", "characters"]),
            help="With substrings: tokens; words are runs of letters or digits, and single other signs.  "
            "[default: words]",
        ),
        click.option(
            "--max-repeated",
            type=NumberRange(0, 1, max_open=True),
            help="With substrings: keep spans; drop documents with a larger share of repeated tokens.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_preset_options(
    preset: str, options: SubstringOptions, document_options: Mapping[str, bool]
) -> None:
    """Check that no option of another preset is given.

    Args:
        document_options: whether an option of the presets that compare documents is given, by name.

    Raises:
        ConfigError: one is.
    """
    from mega_schema.errors import ConfigError

    if preset == SUBSTRINGS:
        for name, is_given in document_options.items():
            if is_given:
                hint = f"leave it out with --preset {SUBSTRINGS}"
                raise ConfigError(f"--{name}", "has no effect on repeated spans", hint=hint)
        return
    values = (options.min_tokens, options.unit, options.max_repeated)
    for flag, value in zip(("--min-tokens", "--unit", "--max-repeated"), values, strict=True):
        if value is not None:
            what, hint = "has no effect on whole documents", f"--preset {SUBSTRINGS}, or leave it out"
            raise ConfigError(flag, what, hint=hint)
