"""The formats by name. Each is imported when it is used: --help needs the names but not numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mega_schema.checkpoint.formats import detect_format
from mega_schema.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
    from mega_ckpt.formats.interface import Format, ReadOptions, WriteOptions, WriteResult

# name on the command line -> module of this folder with a FORMAT, and description
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mega": ("mega.format", "a checkpoint of Mega, or a run's folder"),
        "hf": ("huggingface.format", "a Hugging Face folder"),
        "meta": ("meta.format", "Meta's folder of a Llama: params.json, consolidated.00.pth"),
        "fairseq": ("fairseq.format", "fairseq's megatron_11b: model-model_part-0.pt, dict.txt"),
        "bigscience": (
            "bigscience.format",
            "a step of Megatron-DeepSpeed, or a run's folder: BLOOM's training format",
        ),
        "llama2c": ("llama2c.format", "a .bin model file of llama2.c"),
        "megatron": ("megatron.format", "a classic checkpoint of Megatron-LM, or a run's folder"),
        "megatron-core": ("megatron.core", "the same, with the tensor names of Megatron's core class"),
        "torch_dist": (
            "torch_dist.format",
            "a Megatron core folder, written by torch.distributed.checkpoint",
        ),
    }
)
READ_ONLY = frozenset({"fairseq", "bigscience", "llama2c"})
WRITTEN = tuple(name for name in NAMES if name not in READ_ONLY)
_CHECK_THE_PATH = frozenset({"mega", "fairseq"})  # their readers have better errors for a missing path
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def format_of(name: str) -> Format:
    """Load the format of this name."""
    from mega_ckpt.formats.interface import Format

    entry = import_module(f"mega_ckpt.formats.{NAMES[name][0]}").FORMAT
    assert isinstance(entry, Format)
    return entry


def read_source(name: str, path: Path, reading: ReadOptions) -> CheckpointSource:
    """Open the checkpoint at `path` in the named format.

    Raises:
        FormatError: there is no checkpoint, or the reader refuses it.
    """
    if name not in _CHECK_THE_PATH and not path.exists():
        raise _missing_path_error(path)
    return format_of(name).read(path, reading)


def _missing_path_error(path: Path) -> FormatError:
    parent = next(folder for folder in (*path.parents, Path()) if folder.is_dir())
    hint = f"ls {parent}"
    if _HUB_NAME.fullmatch(str(path)):
        hint = f"of Hugging Face's hub? hf download {path} --local-dir {path.name}-hf"
    return FormatError(path, "no such file or folder", hint=hint)


def writer_of(
    name: str,
) -> tuple[
    Callable[[CheckpointSource, Path, WriteOptions], None],
    Callable[[CheckpointSource, Path, WriteOptions], WriteResult],
]:
    """Return `check_target` and `write` of a format.

    Raises:
        ConfigError: the format is read-only.
    """
    entry = format_of(name)
    if entry.write is None or entry.check_target is None:
        raise ConfigError("--to", "is a read-only format", found=name, wanted=" | ".join(WRITTEN))
    return entry.check_target, entry.write


def require_format(path: Path, flag: str) -> str:
    """Detect the format of the files at `path`.

    Args:
        flag: the option that names the format.

    Raises:
        ConfigError: the format cannot be detected.
    """
    name = detect_format(path)
    if name is not None:
        return name
    if not path.exists():
        raise _missing_path_error(path)
    raise ConfigError(flag, f"missing, and the format of {path} cannot be detected", wanted=" | ".join(NAMES))
