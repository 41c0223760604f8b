"""The model that a person names, for a checkpoint that does not say what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from mega_schema.errors import ConfigError
from mega_schema.spec import PRESETS, ModelSpec, gpt, llama

_MAKERS: Mapping[str, Callable[..., ModelSpec]] = MappingProxyType({"gpt": gpt, "llama": llama})


def of(word: str) -> ModelSpec:
    """A named model, or that of a JSON file with fields of `ModelSpec`; "family" fills in what it leaves out.

    Raises:
        ConfigError: there is no such model or file, or its fields are of no model.
    """
    if word in PRESETS:
        return PRESETS[word]
    path = Path(word)
    if not path.is_file():
        names = " | ".join(PRESETS)
        raise ConfigError("--model", "is no file and no model's name", found=word, wanted=names)
    try:
        fields = json.loads(path.read_bytes())
        return _MAKERS[fields.pop("family")](**fields)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        found = f"{type(error).__name__} {error}"
        wanted = '{"family": "gpt", "layers": 12, ...}, fields of ModelSpec'
        raise ConfigError("--model", f"{path} is not of a model", found=found, wanted=wanted) from error
