"""Check the files of a Hugging Face model folder before `transformers` reads them, and hash them.

Nothing of the folder is executed: a config that names program code, and pickled weights, are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_schema.checkpoint.foreign_files import MAX_JSON_BYTES, read_foreign
from mega_schema.checkpoint.formats import conversion_command
from mega_schema.errors import CorruptFileError, FormatError

CONFIG, TOKENIZER, ADAPTER = "config.json", "tokenizer.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# keys of a config.json whose models are not supported, and why
_UNSUPPORTED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "auto_map": "names program code of the model's author, which is never run",
        "quantization_config": "the weights are quantized",
        "transformers_weights": f"names other weights than {WEIGHTS}",
    }
)


@dataclass(frozen=True, slots=True)
class HuggingFaceFolder:
    """A folder whose files are complete by name; the weights are not read yet.

    Attributes:
        config: content of config.json.
        weights: the files of the weights.
    """

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]

    def hash_content(self) -> str:
        """Return a SHA-256 of config.json and of the weight files, whatever the folder's place."""
        digests = []
        for path in (self.path / CONFIG, *self.weights):
            with path.open("rb") as file:
                digests.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def open_hugging_face_folder(folder: Path) -> HuggingFaceFolder:
    """Read the config, and list the weights.

    Raises:
        FormatError: a file is missing or damaged, the weights are pickled, or the config wants something that
            is not supported.
    """
    config = _read_object(folder / CONFIG)
    _check_config(config, folder)
    if (folder / ADAPTER).exists():
        hint = "merge it into the weights of its base model: merge_and_unload() and save_pretrained() of peft"
        raise FormatError(folder / ADAPTER, "is of an adapter, not of a whole model", hint=hint)
    weights = _list_weights(folder)
    if not (folder / TOKENIZER).is_file():
        code = f"T.from_pretrained('{folder}').save_pretrained('{folder}')"
        hint = f'python -c "from transformers import AutoTokenizer as T; {code}"'
        raise FormatError(folder / TOKENIZER, "no such file", hint=hint)
    return HuggingFaceFolder(folder, config, weights)


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    for key, what in _UNSUPPORTED_KEYS.items():
        if config.get(key):
            hint = conversion_command(folder, "hf")
            if key == "auto_map":
                hint = f"remove auto_map, if transformers has the model_type {config.get('model_type')}"
            raise FormatError(f"{folder / CONFIG}: {key}", what, hint=hint)
    for key, value in _list_values(config):
        # an implementation of attention with a slash is a repository of compiled code
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise FormatError(
                f"{folder / CONFIG}: {key}",
                "names program code, which is never run",
                found=value,
                hint=f"remove {key}",
            )


def _list_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of an object and of those in it."""
    for key, value in values.items():
        yield key, value
        if isinstance(value, dict):
            yield from _list_values(value)


def _list_weights(folder: Path) -> tuple[Path, ...]:
    """Return the weight files in the order of their names; `transformers` too prefers one to an index."""
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if not (folder / INDEX).is_file():
        pickled = next((name for name in PICKLED if (folder / name).is_file()), None)
        if pickled is not None:
            hint = conversion_command(folder, "hf")
            raise FormatError(
                folder,
                "has only pickled weights, which are never run",
                found=pickled,
                wanted=WEIGHTS,
                hint=hint,
            )
        hint = f"hf download ORGANIZATION/MODEL --local-dir {folder}"
        raise FormatError(folder, "has no weights", wanted=f"{WEIGHTS} or {INDEX}", hint=hint)
    places = _read_object(folder / INDEX).get("weight_map")
    names = set(places.values()) if isinstance(places, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CorruptFileError(folder / INDEX, "weight_map does not name files of the folder")
    for name in sorted(names):
        if not (folder / name).is_file():
            hint = f"hf download ORGANIZATION/MODEL --local-dir {folder}"
            raise CorruptFileError(folder / name, f"no such file, and {INDEX} names it", hint=hint)
    return tuple(folder / name for name in sorted(names))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_foreign(path, MAX_JSON_BYTES))
    except OSError as error:
        raise FormatError(path, "cannot be read", found=error.strerror) from None
    except (ValueError, RecursionError):
        hint = f"hf download ORGANIZATION/MODEL {path.name} --local-dir {path.parent}"
        raise CorruptFileError(path, "is not JSON", hint=hint) from None
    if not isinstance(value, dict):
        raise CorruptFileError(path, "is not a JSON object", found=type(value).__name__)
    return value
