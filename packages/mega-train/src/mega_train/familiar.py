"""A command that reads the launch scripts of Megatron-LM, its forks and fairseq as they are.

Words of theirs become words of ours before anything is parsed: another spelling is put right, what a run is
the same without is left out and said in one line, and of a DeepSpeed configuration batch, ZeRO and float16
are taken. What is left and not ours is refused with what replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mega_schema.config import Wordy
from mega_schema.errors import ConfigError
from mega_train.deepspeed_config import CONFIG_FLAGS, read
from mega_train.megatron_flags import ABSENT, ALIKE, INSTEAD, MEANS, NEEDLESS
from mega_train.voice import own_rank

_LEFT_OUT = "mega_train.left_out"
_FLAG = re.compile(r"--[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Translated:
    """A command line in our words.

    Attributes:
        left_out: flags that a run is the same without, and why.
    """

    words: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


class Familiar(Wordy):
    """A command that knows what a Megatron user meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does.

        Raises:
            ConfigError: a flag is not ours; the line says what to do. Or two flags disagree.
        """
        done = translated(args, known={name for option in self.get_params(ctx) for name in option.opts})
        ctx.meta[_LEFT_OUT] = done.left_out
        try:
            return super().parse_args(ctx, done.words)
        except click.NoSuchOption as error:
            if told := explained(error.option_name):
                raise told from error
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """As click does, after a line that says what was left out."""
        if (left_out := ctx.meta[_LEFT_OUT]) and own_rank() == 0:
            click.echo(f"left out: {in_words(left_out)}", err=True)
        return super().invoke(ctx)


def translated(args: Sequence[str], known: Iterable[str] = ()) -> Translated:
    """The command line in our words.

    Args:
        known: our flags; any value that another program has no meaning for is theirs.

    Raises:
        ConfigError: a value means nothing here, or two flags disagree.
    """
    done, ours, rest = Translated(), frozenset(known), list(args)
    # beside a kind of positions that needs no table, Megatron's --no-position-embedding says nothing more
    placed = any("rotary-position" in word or word.endswith(("rope", "rotary", "alibi")) for word in args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=") if _FLAG.match(word) else (word, "", "")
        if flag in ALIKE:
            *first, last = ALIKE[flag]
            done.words.extend([*first, last + equals + value])
        elif flag in MEANS:
            value = value if equals or not rest else rest.pop(0)
            done.words.extend(_meant(flag, value, flag in ours))
        elif flag == "--no-position-embedding":
            done.words.extend([] if placed else ["--position-embedding-type", "none"])
        elif flag == "--adam-betas":
            value = value if equals or not rest else rest.pop(0)
            done.words.extend(_betas(value))
        elif flag in CONFIG_FLAGS:
            value = value if equals or not rest else rest.pop(0)
            done.words.extend(read(Path(value), args))
        elif flag in ("--group-query-attention", "--share-decoder-input-output-embed"):
            pass  # what follows of them is below
        elif (why := find(NEEDLESS, flag)) is not None:
            done.left_out[flag] = why
            while rest and not _FLAG.match(rest[0]) and rest[0] not in ("-h", "--"):
                rest.pop(0)
        else:
            done.words.append(word)
    given = {word.partition("=")[0] for word in args}
    if "--group-query-attention" in given and "--num-query-groups" not in given:
        done.words.extend(["--num-query-groups", "1"])  # Megatron's default
    if "--arch" in given and "--share-decoder-input-output-embed" not in given:
        done.words.append("--untie-embeddings-and-output-weights")  # fairseq's default
    return done


def explained(flag: str) -> ConfigError | None:
    """What to answer to a flag that we do not have and cannot do without, or None where it is nobody's."""
    if instead := find(INSTEAD, flag):
        return ConfigError(flag, "is said otherwise here", hint=instead)
    nearest = find(ABSENT, flag)
    return None if nearest is None else ConfigError(flag, "Megatron has it and we do not yet", hint=nearest)


def find(table: Mapping[str, str], flag: str) -> str | None:
    """What a table says of a flag, by its name or by how it begins."""
    if flag in table:
        return table[flag]
    return next((text for key, text in table.items() if key.endswith("-") and flag.startswith(key)), None)


def in_words(left_out: Mapping[str, str]) -> str:
    """Flags with why they are needless, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for flag, why in left_out.items():
        reasons.setdefault(why, []).append(flag)
    return "; ".join(f"{', '.join(flags)} ({why})" for why, flags in reasons.items())


def _meant(flag: str, value: str, ours: bool) -> Sequence[str]:
    if value in MEANS[flag]:
        return MEANS[flag][value]
    if ours:
        return flag, value
    raise ConfigError(flag, "means nothing here", found=value, wanted=" | ".join(MEANS[flag]))


def _betas(text: str) -> Sequence[str]:
    found = re.fullmatch(r"\(?\s*([\d.]+)\s*,\s*([\d.]+)\s*\)?", text)
    if found is None:
        raise ConfigError("--adam-betas", "not two numbers", found=text, wanted='"(0.9, 0.98)"')
    return "--adam-beta1", found[1], "--adam-beta2", found[2]
