"""The outputs of earlier deduplications, whose documents come before those of a run.

A folder of kept keys beside the kept documents saves reading the documents again:

    dedup-keys/NAME.keys    the band keys of the documents in the file NAME, see `band_store`
    dedup-keys/preset       JSON: the version of this layout, and the preset's parameters of signatures
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mega_data.dedup.presets import Preset
from mega_data.jsonl_shards import find_shards
from mega_data.output_folder import KEYS_FOLDER
from mega_data.task_stages import write_file
from mega_schema.errors import ConfigError

OPTION: Final = "--against"
_FORMAT: Final = 1
_PRESET: Final = "preset"
_ENDING: Final = ".keys"


@dataclass(frozen=True, slots=True)
class EarlierShard:
    """A file of documents that an earlier deduplication kept.

    Attributes:
        documents: the file; need not exist if there are keys and pairs are not compared.
        keys: its band keys; None if they were not kept.
    """

    documents: Path
    keys: Path | None = None

    @property
    def source(self) -> Path:
        """Return the file that the stage `keys` depends on."""
        return self.keys or self.documents


def keys_path(folder: Path, name: str) -> Path:
    """Return the path of the keys of an output file of this name."""
    return folder / f"{name}{_ENDING}"


def write_preset(folder: Path, preset: Preset) -> None:
    """Write which preset the keys in a folder have."""
    write_file(folder / _PRESET, json.dumps(_record_preset(preset)))


def find_earlier_shards(
    folders: Iterable[Path], output: Path, preset: Preset, inputs: Sequence[Path]
) -> tuple[EarlierShard, ...]:
    """Return the shards of earlier outputs, in the order of the folders and of the names in them.

    Args:
        output: of this run.
        inputs: of this run.

    Raises:
        ConfigError: a folder is the output, contains an input, has no documents, or keys of another preset.
    """
    shards = list[EarlierShard]()
    for folder in folders:
        if folder.resolve() == output.resolve():
            hint = "name another --output; the documents of both together are the corpus"
            raise ConfigError(OPTION, "is --output", found=folder, hint=hint)
        keys = folder / KEYS_FOLDER
        shards += _list_keys(folder, keys, preset) if keys.is_dir() else _list_documents(folder)
    documents = {shard.documents.resolve() for shard in shards}
    for path in inputs:
        if path.resolve() in documents:
            raise ConfigError(OPTION, "contains an input", found=path, hint=f"leave it out of {OPTION}")
    return tuple(shards)


def _list_documents(folder: Path) -> list[EarlierShard]:
    try:
        return [EarlierShard(path) for path in find_shards([folder])]
    except ConfigError as error:
        raise ConfigError(OPTION, error.what, found=folder) from None


def _list_keys(folder: Path, keys: Path, preset: Preset) -> list[EarlierShard]:
    wanted = _record_preset(preset)
    try:
        recorded = json.loads((keys / _PRESET).read_bytes())
    except (OSError, ValueError):
        recorded = None
    if recorded != wanted:
        found = recorded.get("preset", recorded) if isinstance(recorded, dict) else "no readable preset"
        hint = f"name the same --preset, or rm -r {keys} to read the documents"
        raise ConfigError(keys, "keys of another preset", found=found, wanted=wanted["preset"], hint=hint)
    shards = list[EarlierShard]()
    for path in sorted(keys.glob(f"*{_ENDING}")):
        shard = EarlierShard(folder / path.name.removesuffix(_ENDING), path)
        if preset.jaccard is not None and not shard.documents.is_file():
            hint = "restore the documents, or leave out the check: --preset datatrove"
            raise ConfigError(shard.documents, "needed to compare documents", found="no file", hint=hint)
        shards.append(shard)
    return shards


def _record_preset(preset: Preset) -> dict[str, Any]:
    """Return the parameters that decide the keys."""
    options = {name: value for name, value in asdict(preset).items() if name != "jaccard"}
    return {"format": _FORMAT, "preset": options}
