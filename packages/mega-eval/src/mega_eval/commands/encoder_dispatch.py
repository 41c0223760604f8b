"""Evaluate a fine-tuned encoder with a command that also evaluates decoders.

Imports neither torch nor numpy, for `--help`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_eval.commands.classification_commands import ClassificationOptions, run_classification
from mega_eval.commands.task_options import TaskOptions
from mega_schema.errors import ConfigError
from mega_schema.spec_checks import find_task_head
from mega_schema.tasks.pair_tasks import ClassTaskName, PairFiles

ENCODER_TASKS: Mapping[str, ClassTaskName] = MappingProxyType({"mnli": "MNLI", "qqp": "QQP", "race": "RACE"})
# options of the evaluation of decoders, with their defaults
_DECODER_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "num_fewshot": 0,
        "fewshot_data": None,
        "name": None,
        "batch_invariant": False,
        "cache": None,
        "no_cache": False,
        "tp": 1,
        "pp": 1,
        "dp": None,
        "max_model_len": None,
    }
)


def run_encoder(task: str, files: PairFiles, paths: Sequence[Path], keywords: dict[str, Any]) -> bool:
    """Evaluate the model of --load if it has the head of a task; return whether it has.

    The options of encoders are removed from `keywords` otherwise.

    Raises:
        ConfigError: an option does not apply to the model.
    """
    own = {name: keywords.pop(name) for name in ("labels", "seq_length")}
    load = keywords["load"]
    if load is None or find_task_head(load) == "none":
        for name, value in own.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                hint = "leave it out, or --load a run of mega-train finetune"
                raise ConfigError(flag, "applies to a fine-tuned encoder only", found=value, hint=hint)
        return False
    refuse_decoder_options(keywords)
    common = ClassificationOptions.__dataclass_fields__.keys() & TaskOptions.__dataclass_fields__.keys()
    options = ClassificationOptions(**{name: keywords[name] for name in common}, **own)
    run_classification(task, files, paths, options)
    return True


def refuse_decoder_options(
    keywords: Mapping[str, Any], more: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Check that the options of the evaluation of decoders have their defaults.

    Args:
        more: such options of the command, with their defaults.

    Raises:
        ConfigError: one has another value.
    """
    for name, default in {**_DECODER_DEFAULTS, **more}.items():
        if keywords[name] != default:
            flag = f"--{name.replace('_', '-')}"
            what = "does not apply to a fine-tuned encoder"
            raise ConfigError(flag, what, found=keywords[name], hint="leave it out")
