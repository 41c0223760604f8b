"""Translate the command line of another program's launch script into that of `mega-train`.

Other spellings are replaced, flags that change no result are ignored, and a DeepSpeed configuration becomes
flags. Errors are collected, so that one start reports all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from mega_schema.errors import ConfigError, MegaError
from mega_train.compat.deepspeed_config import CONFIG_FLAGS, read_deepspeed_config
from mega_train.compat.megatron_flags import FlagTable, find_flag, flag_table

DROPOUT_FLAGS = ("--hidden-dropout", "--attention-dropout")
MEGATRON_DEFAULTS = "--megatron-defaults"
# Megatron-LM's defaults where ours differ, and flags that override them
DEFAULTS = (
    (("--hidden-dropout", "0.1"), ()),
    (("--attention-dropout", "0.1"), ()),
    (("--no-async-save",), ("--async-save",)),
    (("--no-exit-signal-handler",), ("--exit-signal-handler",)),
    (("--num-dataset-builder-threads", "1"), ()),
)
_FLAG = re.compile(r"--[A-Za-z]")
SIMILAR = 0.84  # of difflib: below it a suggestion is more often wrong than right


@dataclass(slots=True)
class Translation:
    """A translated command line.

    Attributes:
        left_out: flags that change no result, and the reason.
        refused: an error for every unsupported flag.
        is_foreign: whether any flag belongs to another program.
    """

    words: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    refused: list[MegaError] = field(default_factory=list)
    is_foreign: bool = False


def translate_flags(args: Sequence[str], known_flags: Collection[str]) -> Translation:
    """Translate a command line.

    Args:
        known_flags: the flags of the command.
    """
    return _Translator(args, frozenset(known_flags)).run()


def refusal_of(flag: str, table: FlagTable) -> ConfigError | None:
    """Build the error of an unsupported flag; None if the table does not contain it."""
    refusal = find_flag(table.refused, flag)
    return None if refusal is None else ConfigError(flag, refusal.why, hint=refusal.instead)


def format_skipped(left_out: dict[str, str]) -> str:
    """Format the flags that have no effect, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for flag, why in left_out.items():
        reasons.setdefault(why, []).append(flag)
    return "; ".join(f"{', '.join(flags)} ({why})" for why, flags in reasons.items())


def suggest_flag(flag: str, known_flags: Collection[str], table: FlagTable) -> str:
    """Suggest the most similar flag; empty if none is similar enough."""
    prefixed = [name for name in known_flags if name.startswith(flag)]  # argparse takes a unique beginning
    candidates = sorted({*known_flags, *table.names})
    close = prefixed if len(prefixed) == 1 else get_close_matches(flag, candidates, 1, SIMILAR)
    return f"did you mean {close[0]}?" if close else ""


class _Translator:
    """One pass over the command line, front to back."""

    def __init__(self, args: Sequence[str], known_flags: frozenset[str]) -> None:
        self.args = list(args)
        self.known_flags = known_flags
        self.table = flag_table()
        self.remaining = list(args)
        self.given_flags = {word.partition("=")[0] for word in args if _FLAG.match(word)}
        # with positions that need no table, Megatron's --no-position-embedding has no effect
        self.has_positions = any(
            "rotary-position" in word or word.endswith(("rope", "rotary", "alibi")) for word in args
        )
        self.translation = Translation()

    def run(self) -> Translation:
        self._read_folder()
        while self.remaining:
            word = self.remaining.pop(0)
            flag, equals, value = word.partition("=") if _FLAG.match(word) else (word, "", "")
            try:
                self._read(word, flag, value if equals else None)
            except MegaError as error:
                self.translation.refused.append(error)
        self._read_defaults()
        self._read_deepspeed()
        self.translation.is_foreign |= bool(self.translation.left_out)
        return self.translation

    def _read(self, word: str, flag: str, value: str | None) -> None:
        table = self.table
        words = self.translation.words
        if flag in table.read_as:
            *first, last = table.read_as[flag]
            words.extend([*first, last if value is None else f"{last}={value}"])
            self.translation.is_foreign = True
        elif flag in table.values:
            words.extend(self._meaning(flag, self._value(flag, value)))
            self.translation.is_foreign |= flag not in self.known_flags
        elif flag in table.in_context:
            self._read_in_context(flag, value)
            self.translation.is_foreign = True
        elif flag == "--eval-only":
            words.append(flag)
            self._drop_switch_value(flag, value)
        elif flag in self.known_flags or flag == MEGATRON_DEFAULTS or not _FLAG.match(word):
            words.append(word)
        else:
            self._drop_values()
            if (why := find_flag(table.left_out, flag)) is not None:
                self.translation.left_out[flag] = why
            elif (refusal := refusal_of(flag, table)) is not None:
                raise refusal
            else:
                raise ConfigError(flag, "no such option", hint=suggest_flag(flag, self.known_flags, table))

    def _read_in_context(self, flag: str, value: str | None) -> None:
        words = self.translation.words
        if flag == "--no-position-embedding":
            words.extend([] if self.has_positions else ["--position-embedding-type", "none"])
        elif flag == "--adam-betas":
            words.extend(_split_betas(self._value(flag, value)))
        elif flag == "--group-query-attention":
            if "--num-query-groups" not in self.given_flags:
                words.extend(["--num-query-groups", "1"])  # Megatron's default
        elif flag == "--distributed-world-size":
            self._check_world(flag, self._value(flag, value))
        elif flag in CONFIG_FLAGS:
            self._value(flag, value)  # read last, with the whole command line in view

    def _read_folder(self) -> None:
        """Read fairseq's first positional argument, its data folder."""
        if "--task" not in self.given_flags or not self.remaining or self.remaining[0].startswith("-"):
            return
        folder = Path(self.remaining.pop(0))
        for use, split in (("train", "train"), ("valid", "valid"), ("test", "test")):
            if use == "train" or (folder / f"{split}.idx").is_file():
                self.translation.words.extend([f"--{use}-data-path", str(folder / split)])

    def _read_defaults(self) -> None:
        """Add fairseq's default of --arch, and with --megatron-defaults Megatron's defaults."""
        words = self.translation.words
        if "--arch" in self.given_flags and "--share-decoder-input-output-embed" not in self.given_flags:
            words.append("--untie-embeddings-and-output-weights")
        if MEGATRON_DEFAULTS not in self.given_flags:
            return
        if "--config" in self.given_flags:
            self.translation.refused.append(
                ConfigError(
                    MEGATRON_DEFAULTS,
                    "would override the file",
                    found="--config",
                    wanted="a command line without it",
                    hint="--hidden-dropout 0.1 --attention-dropout 0.1",
                )
            )
        given_flags = {word.partition("=")[0] for word in words}
        for default, alternatives in DEFAULTS:
            if not given_flags & {default[0], *alternatives}:
                words.extend(default)

    def _read_deepspeed(self) -> None:
        positions = [
            position for position, word in enumerate(self.args) if word.partition("=")[0] in CONFIG_FLAGS
        ]
        for position in positions:
            _, equals, value = self.args[position].partition("=")
            if not equals:
                value = next(iter(self.args[position + 1 :]), "")
            try:
                flags = read_deepspeed_config(Path(value), self.translation.words)
            except MegaError as error:
                self.translation.refused.append(error)
                continue
            self.translation.words = flags.words
            self.translation.left_out |= flags.left_out
            self.translation.refused += flags.refused

    def _check_world(self, flag: str, text: str) -> None:
        world = _value_of("--world", self.args)
        if world is None and "--world" in self.known_flags:
            self.translation.words.extend(["--world", text])
            return
        actual = world or os.environ.get("WORLD_SIZE", "1")
        if text != actual:
            hint = f"torchrun --nproc-per-node {text} -m mega_train ..."
            raise ConfigError(flag, "is not the number of processes", found=text, wanted=actual, hint=hint)

    def _meaning(self, flag: str, value: str) -> Sequence[str]:
        values = self.table.values[flag]
        if value in values:
            return values[value]
        if flag in self.known_flags:
            return flag, value
        raise ConfigError(flag, "not a known value", found=value, wanted=" | ".join(values))

    def _value(self, flag: str, value: str | None) -> str:
        if value is not None:
            return value
        if not self.remaining or _FLAG.match(self.remaining[0]):
            raise ConfigError(flag, "needs a value")
        return self.remaining.pop(0)

    def _drop_switch_value(self, flag: str, value: str | None) -> None:
        """Drop the value of BigScience's --eval-only: any word after it means true there."""
        word = value
        if word is None and self.remaining and self.remaining[0].lower() in ("true", "false", "1", "0"):
            word = self.remaining.pop(0)
        if word is not None and word.lower() in ("false", "0"):
            hint = f"leave {flag} out"
            raise ConfigError(flag, "is a switch, and any value enables it", found=word, hint=hint)
        if value is not None:
            self.translation.words[-1] = flag

    def _drop_values(self) -> None:
        while self.remaining and not _FLAG.match(self.remaining[0]) and self.remaining[0] not in ("-h", "--"):
            self.remaining.pop(0)


def _split_betas(text: str) -> Sequence[str]:
    match = re.fullmatch(r"[(\[]?\s*([\d.]+)\s*,\s*([\d.]+)\s*[)\]]?", text)
    if match is None:
        raise ConfigError("--adam-betas", "not two numbers", found=text, wanted='"(0.9, 0.98)"')
    return "--adam-beta1", match[1], "--adam-beta2", match[2]


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the last value that a command line gives a flag."""
    result = None
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == flag:
            result = value if equals else next_word
    return result
