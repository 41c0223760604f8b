"""Load the model and the tokenizer that the user names with --model and --tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mega_schema.errors import ConfigError, FormatError
from mega_schema.presets import PRESETS
from mega_schema.spec import ModelSpec, bert, gpt, llama
from mega_schema.tokenizer.identity import IDENTITY
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer, open_tokenizer_folder

NO_TOKENIZER: Final = "mega-ckpt convert --no-tokenizer drops it"
"""The hint for a tokenizer that does not fit the model in the same folder."""

_MAKERS: Mapping[str, Callable[..., ModelSpec]] = MappingProxyType({"gpt": gpt, "llama": llama, "bert": bert})


def parse_model(word: str) -> ModelSpec:
    """Return a preset, or the model of a JSON file with fields of `ModelSpec`; "family" gives the defaults.

    Raises:
        ConfigError: there is no such preset or file, or its fields do not define a model.
    """
    if word in PRESETS:
        return PRESETS[word]
    path = Path(word)
    if not path.is_file():
        names = " | ".join(PRESETS)
        raise ConfigError("--model", "is neither a file nor a preset", found=word, wanted=names)
    try:
        fields = json.loads(path.read_bytes())
        return _MAKERS[fields.pop("family")](**fields)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        found = f"{type(error).__name__} {error}"
        wanted = '{"family": "gpt", "layers": 12, ...}, fields of ModelSpec'
        raise ConfigError("--model", f"{path} is not of a model", found=found, wanted=wanted) from error


def load_tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer:
    """Load the tokenizer that `Tokenizer.save` wrote to `folder`, or that of a Hugging Face folder.

    Raises:
        ConfigError: there is no such folder.
        FormatError: there is none, it is damaged, or it has ids outside the model's vocabulary.
    """
    if not folder.exists():
        wanted = "a folder with tokenizer.json, or PREFIX.tokenizer of a dataset"
        raise ConfigError("--tokenizer", "no such folder", found=folder, wanted=wanted)
    saved = (folder / IDENTITY).exists()
    tokenizer = (
        open_tokenizer_folder(folder) if saved else open_tokenizer("HuggingFaceTokenizer", model=folder)
    )
    return check_fits(tokenizer, spec, folder)


def check_fits(tokenizer: Tokenizer, spec: ModelSpec, where: object, *, hint: str = "") -> Tokenizer:
    """Check that the tokenizer's ids fit the model's vocabulary, and return the tokenizer.

    Args:
        where: its file or folder, to begin messages with.
        hint: hint of the message.

    Raises:
        FormatError: an id is outside the model's vocabulary.
    """
    size = tokenizer.identity.vocab_size
    if size > spec.vocab:
        wanted = f"at most the model's {spec.vocab}"
        raise FormatError(
            where, "has ids outside the model's vocabulary", found=size, wanted=wanted, hint=hint
        )
    return tokenizer
