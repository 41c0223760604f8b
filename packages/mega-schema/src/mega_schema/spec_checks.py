"""Checks of the kind of a model, for programs that run one kind only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from mega_schema.checkpoint.foreign_files import MAX_JSON_BYTES, read_foreign
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec
from mega_schema.task_heads import FOREIGN_HEADS, TaskHead

_NO_NEXT_TOKEN = "is of an encoder, which predicts no next token"
_NOT_RUN_YET = "is of an encoder with a decoder, which cannot be run yet"
# model_type of a config.json
_FOREIGN_ENCODERS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("bert", "megatron-bert", "modernbert"), _NO_NEXT_TOKEN)
    | dict.fromkeys(("t5", "umt5"), _NOT_RUN_YET)
)
# of the classes of a config.json


def require_decoder(spec: ModelSpec, where: Path) -> None:
    """Refuse an encoder, with or without a decoder.

    Args:
        where: the checkpoint of the model.

    Raises:
        ConfigError: the model has an encoder.
    """
    if spec.encoder_layers is not None:
        raise ConfigError(
            f"{where}: model.encoder_layers",
            _NOT_RUN_YET,
            found=spec.encoder_layers,
            wanted="a decoder, as in models of the families gpt and llama",
            hint="mega-train t5 trains and validates it",
        )
    if not spec.causal:
        export = (
            f"mega-ckpt convert --from mega --to hf --load {where} --save FOLDER lets transformers run it"
        )
        raise ConfigError(
            f"{where}: model.causal",
            _NO_NEXT_TOKEN,
            found="false",
            wanted="true, as in models of the families gpt and llama",
            hint=export,
        )


def refuse_foreign_encoder(load: Path) -> None:
    """Refuse a Hugging Face folder of an encoder, with or without a decoder.

    Call it before the error that proposes a conversion: the converted model would be refused too. Folders of
    other formats, and a config.json that cannot be read, are left to the reader of their format.

    Args:
        load: the folder, or a file in it.

    Raises:
        ConfigError: the model has an encoder.
    """
    path = (load.parent if load.is_file() else load) / "config.json"
    config = _read_config(path)
    if config.get("is_decoder"):  # a BERT may be causal
        return
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _FOREIGN_ENCODERS:
        raise ConfigError(
            f"{path}: model_type",
            _FOREIGN_ENCODERS[model_type],
            found=model_type,
            wanted="a decoder, such as gpt2 or llama",
            hint="use the folder in transformers as it is",
        )


def find_task_head(load: Path) -> TaskHead:
    """Return the head of a task that a run, a checkpoint or a Hugging Face folder has; "none" of others.

    A checkpoint that cannot be read is left to its reader.
    """
    from mega_schema.checkpoint.reader import Checkpoint  # which imports numpy, that --help does without
    from mega_schema.tasks.best_checkpoint import find_best_folder

    architectures = _read_config(load / "config.json").get("architectures")
    if isinstance(architectures, list):
        return next((FOREIGN_HEADS[name] for name in architectures if name in FOREIGN_HEADS), "none")
    try:
        return Checkpoint.open(find_best_folder(load)).spec.task_head
    except FormatError:
        return "none"


def _read_config(path: Path) -> dict[str, object]:
    """Return the content of a config.json; empty if there is none that can be read."""
    try:
        config = json.loads(read_foreign(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError, FormatError):
        return {}
    return config if isinstance(config, dict) else {}
