"""What a DeepSpeed configuration says of batch, ZeRO, clipping, precision and curriculum, in our flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_schema.errors import ConfigError

CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config")

# of each key our flag; its value is a number, or where it is true or false whether the flag is given
_SAYS: Mapping[str, str] = MappingProxyType(
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
# a run is the same without them
_NEEDLESS = (
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


def read(file: Path, given: Sequence[str]) -> list[str]:
    """The words of our command line that the file means, without those that are given already.

    Args:
        given: the command line.

    Raises:
        ConfigError: the file is not one, a flag says something else, or a key is of what flags say here.
    """
    flag = CONFIG_FLAGS[0]
    if not file.is_file():
        raise ConfigError(flag, "no such file", found=file)
    try:
        told = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(file, "is not JSON", found=error) from error
    if not isinstance(told, dict):
        raise ConfigError(file, "is not a DeepSpeed configuration", wanted="a JSON object")
    words: list[str] = []
    values = _of_curriculum(file, dict(_flat(told)))
    for key, value in values.items():
        where = f"{file}: {key}"
        if key in _NEEDLESS or key.partition(".")[0] in _NEEDLESS or value == "auto":
            continue
        if key == "fp16.initial_scale_power" and isinstance(value, int):
            key, value = "--initial-loss-scale", 2.0**value
        elif key not in _SAYS:
            raise ConfigError(where, "is not read", wanted=", ".join(_sections()), hint="say it by flags")
        else:
            key = _SAYS[key]
        if key == "--loss-scale" and value == 0:
            continue  # DeepSpeed's word for a scale that moves
        if key.startswith(("--loss", "--initial-loss", "--hyst", "--min-loss")) and not values.get(
            "fp16.enabled"
        ):
            continue
        words += _words(where, key, value, given)
    return words


def _of_curriculum(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values, without what is said of a curriculum that is off, or of which one it is.

    Raises:
        ConfigError: it is one that we do not have.
    """
    at = "curriculum_learning."
    if values.get(f"{at}enabled"):
        kind = values.pop(f"{at}curriculum_type", None), values.pop(f"{at}schedule_type", None)
        if kind not in (("seqlen", "fixed_linear"), ("seqlen", "fixed_root")):
            wanted = "seqlen, fixed_linear or seqlen, fixed_root"
            found = ", ".join(map(str, kind))
            raise ConfigError(f"{file}: {at[:-1]}", "no such curriculum", found=found, wanted=wanted)
        del values[f"{at}enabled"]
        return values
    return {key: value for key, value in values.items() if not key.startswith(at)}


def _words(where: str, flag: str, value: Any, given: Sequence[str]) -> list[str]:
    if isinstance(value, bool):
        if not value and flag in given:
            raise ConfigError(where, f"disagrees with {flag}", found="false", wanted="true")
        return [flag] if value else []
    if not isinstance(value, int | float):
        raise ConfigError(where, "not a number", found=json.dumps(value), wanted=f"what {flag} takes")
    if (said := _said(flag, given)) is None:
        return [flag, f"{value:g}" if value != int(value) else str(int(value))]
    if said != value:
        raise ConfigError(where, f"disagrees with {flag}", found=value, wanted=f"{said:g}, or no {flag}")
    return []


def _said(flag: str, given: Sequence[str]) -> float | None:
    """The number that the command line gives a flag, if it does."""
    for word, after in zip(given, [*given[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            text = value if equals else after
            return float(text) if text.replace(".", "", 1).isdecimal() else None
    return None


def _flat(told: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in told.items():
        if isinstance(value, dict) and key not in _NEEDLESS:
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _sections() -> list[str]:
    return sorted({key.partition(".")[0] for key in _SAYS})
