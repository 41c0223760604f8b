"""Translate a DeepSpeed configuration (batch, ZeRO, clipping, precision, curriculum) into our flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError, MegaError

CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config")

# the flag of each key; a number is its value, true gives the flag and false does not
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "train_batch_size": "--global-batch-size",
        "train_micro_batch_size_per_gpu": "--micro-batch-size",
        "gradient_accumulation_steps": "--update-freq",
        "gradient_clipping": "--clip-grad",
        "zero_optimization.stage": "--zero-stage",
        "zero_optimization.reduce_bucket_size": "--ddp-bucket-size",
        "zero_optimization.overlap_comm": "--overlap-grad-reduce",
        "fp16.enabled": "--fp16",
        "fp16.loss_scale": "--loss-scale",
        "fp16.loss_scale_window": "--loss-scale-window",
        "fp16.hysteresis": "--hysteresis",
        "fp16.min_loss_scale": "--min-loss-scale",
        "bf16.enabled": "--bf16",
        "bfloat16.enabled": "--bf16",
        "curriculum_learning.min_difficulty": "--curriculum-start-length",
        "curriculum_learning.max_difficulty": "--seq-length",
        "curriculum_learning.schedule_config.total_curriculum_step": "--curriculum-steps",
        "curriculum_learning.schedule_config.difficulty_step": "--curriculum-length-multiple",
        "curriculum_learning.schedule_config.root_degree": "--curriculum-root",
    }
)
# keys without effect on a run
_IGNORED_KEYS = (
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_allow_untested_optimizer",
    "tensorboard",
    "communication_data_type",
    "fp16.auto_cast",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.reduce_scatter",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.round_robin_gradients",
)


@dataclass(slots=True)
class DeepSpeedFlags:
    """A command line with the flags that are equivalent to a DeepSpeed configuration.

    Attributes:
        words: the command line, in the flags of `mega-train`.
        left_out: flags that the configuration overrides, and the reason.
        refused: an error for every unsupported key, or key that disagrees with a flag.
    """

    words: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    refused: list[MegaError] = field(default_factory=list)


def read_deepspeed_config(file: Path, words: Sequence[str]) -> DeepSpeedFlags:
    """Add the flags of a DeepSpeed configuration to a command line.

    Args:
        words: the command line, every flag in its own spelling.

    Raises:
        ConfigError: the file is not a DeepSpeed configuration.
    """
    flags = DeepSpeedFlags(list(words))
    values = _curriculum_values(file, dict(_flatten(_read_json(file))))
    for key, value in values.items():
        try:
            _add_flag(flags, file, key, value, bool(values.get("fp16.enabled")))
        except MegaError as error:
            flags.refused.append(error)
    return flags


def _read_json(file: Path) -> dict[str, Any]:
    flag = CONFIG_FLAGS[0]
    if not file.is_file():
        raise ConfigError(flag, "no such file", found=file)
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(file, "is not JSON", found=error) from error
    if not isinstance(content, dict):
        raise ConfigError(file, "is not a DeepSpeed configuration", wanted="a JSON object")
    return content


def _add_flag(flags: DeepSpeedFlags, file: Path, key: str, value: Any, fp16: bool) -> None:
    where = f"{file}: {key}"
    if key in _IGNORED_KEYS or key.partition(".")[0] in _IGNORED_KEYS or value == "auto":
        return
    if key == "fp16.initial_scale_power" and isinstance(value, int):
        flag, value = "--initial-loss-scale", 2.0**value
    elif key not in _FLAGS:
        raise ConfigError(where, "is not read", wanted=", ".join(_known_sections()), hint="use flags instead")
    else:
        flag = _FLAGS[key]
    if flag == "--loss-scale" and value == 0:  # DeepSpeed's value for a dynamic scale
        if flag in (word.partition("=")[0] for word in flags.words) and fp16:
            # under DeepSpeed its own scaler runs, and Megatron's flag has no effect
            flags.words = _remove_flag(flag, flags.words)
            flags.left_out[flag] = f"{key} 0 in a DeepSpeed configuration selects dynamic loss scaling"
        return
    if flag.startswith(("--loss", "--initial-loss", "--hyst", "--min-loss")) and not fp16:
        return
    flags.words += _flag_words(where, flag, value, flags.words)


def _remove_flag(flag: str, words: Sequence[str]) -> list[str]:
    """Remove a flag and its value."""
    remaining = list[str]()
    iterator = iter(words)
    for word in iterator:
        if word == flag:
            next(iterator, None)
        elif not word.startswith(f"{flag}="):
            remaining.append(word)
    return remaining


def _curriculum_values(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Drop the values of a disabled curriculum, and those that name the kind of an enabled one.

    Raises:
        ConfigError: it is not supported.
    """
    prefix = "curriculum_learning."
    if values.get(f"{prefix}enabled"):
        curriculum = values.pop(f"{prefix}curriculum_type", None), values.pop(f"{prefix}schedule_type", None)
        if curriculum not in (("seqlen", "fixed_linear"), ("seqlen", "fixed_root")):
            wanted = "seqlen, fixed_linear or seqlen, fixed_root"
            found = ", ".join(map(str, curriculum))
            raise ConfigError(f"{file}: {prefix[:-1]}", "no such curriculum", found=found, wanted=wanted)
        del values[f"{prefix}enabled"]
        return values
    return {key: value for key, value in values.items() if not key.startswith(prefix)}


def _flag_words(where: str, flag: str, value: Any, words: Sequence[str]) -> list[str]:
    if isinstance(value, bool):
        if not value and flag in words:
            raise ConfigError(where, f"disagrees with {flag}", found="false", wanted="true")
        return [flag] if value and flag not in words else []
    if not isinstance(value, int | float):
        raise ConfigError(where, "not a number", found=json.dumps(value), wanted=f"what {flag} takes")
    values = _values_of(flag, words)
    if not values:
        return [flag, f"{value:g}" if value != int(value) else str(int(value))]
    for text in values:
        number = _parse_number(text)  # click reports values that are not numbers
        if number is not None and number != value:
            raise ConfigError(
                where, f"disagrees with {flag}", found=value, wanted=f"{number:g}, or no {flag}"
            )
    return []


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """List the values that a command line gives a flag."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    split = [(*word.partition("="), next_word) for word, next_word in pairs]
    return [value if equals else next_word for name, equals, value, next_word in split if name == flag]


def _parse_number(text: str) -> float | None:
    try:
        return float(text)  # takes 1_024 and 1e0, as click does
    except ValueError:
        return None


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and key not in _IGNORED_KEYS:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _known_sections() -> list[str]:
    return sorted({key.partition(".")[0] for key in _FLAGS})
