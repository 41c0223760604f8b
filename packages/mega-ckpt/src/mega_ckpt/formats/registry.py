"""The formats by name, each loaded when it is used: --help needs the names and no numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mega_schema.checkpoint_formats import detect_format
from mega_schema.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from mega_ckpt.checkpoint.checkpoint_source import Source
    from mega_ckpt.formats.interface import Format, Reading, Target, Written

# name on the command line -> module of this folder, which has a FORMAT, and what it is
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mega": ("mega.format", "a checkpoint of ours, or a run's folder"),
        "hf": ("huggingface.format", "a Hugging Face folder"),
        "meta": ("meta.format", "Meta's folder of a Llama: params.json, consolidated.00.pth"),
        "fairseq": ("fairseq.format", "fairseq's megatron_11b: model-model_part-0.pt, dict.txt"),
        "bigscience": (
            "bigscience.format",
            "a step of Megatron-DeepSpeed's, or a run's folder: BLOOM as it was trained",
        ),
        "llama2c": ("llama2c.format", "a model's .bin of llama2.c"),
        "megatron": ("megatron.format", "a classic checkpoint of Megatron-LM's, or a run's folder"),
        "megatron-core": ("megatron.core", "the same, in the names of Megatron's core class"),
        "torch_dist": (
            "torch_dist.format",
            "a folder of Megatron core's, written by torch.distributed.checkpoint",
        ),
    }
)
READ_ONLY = frozenset({"fairseq", "bigscience", "llama2c"})
WRITTEN = tuple(name for name in NAMES if name not in READ_ONLY)
_CHECK_THE_PATH = frozenset({"mega", "fairseq"})  # their own reader has more to say of a path that is missing
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def format_of(name: str) -> Format:
    """The format of this name."""
    from mega_ckpt.formats.interface import Format

    found = import_module(f"mega_ckpt.formats.{NAMES[name][0]}").FORMAT
    assert isinstance(found, Format)
    return found


def read(name: str, path: Path, reading: Reading) -> Source:
    """The checkpoint at `path`, of the format of this name.

    Raises:
        FormatError: there is none, or its reader refuses it.
    """
    if name not in _CHECK_THE_PATH and not path.exists():
        raise _missing(path)
    return format_of(name).read(path, reading)


def _missing(path: Path) -> FormatError:
    there = next(folder for folder in (*path.parents, Path()) if folder.is_dir())
    hint = f"ls {there}"
    if _HUB_NAME.fullmatch(str(path)):
        hint = f"of Hugging Face's hub? hf download {path} --local-dir {path.name}-hf"
    return FormatError(path, "no such file or folder", hint=hint)


def writing(
    name: str,
) -> tuple[Callable[[Source, Path, Target], None], Callable[[Source, Path, Target], Written]]:
    """`free` and `write` of a format.

    Raises:
        ConfigError: it is read only.
    """
    found = format_of(name)
    if found.write is None or found.free is None:
        raise ConfigError("--to", "is a format that is only read", found=name, wanted=" | ".join(WRITTEN))
    return found.free, found.write


def guessed(path: Path, flag: str) -> str:
    """The name of the format that the files at `path` tell.

    Args:
        flag: with which a person says it.

    Raises:
        ConfigError: they tell none.
    """
    name = detect_format(path)
    if name is not None:
        return name
    if not path.exists():
        raise _missing(path)
    raise ConfigError(flag, f"has to be said, for {path} does not tell", wanted=" | ".join(NAMES))
