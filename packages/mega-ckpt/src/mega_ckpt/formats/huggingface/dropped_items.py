"""List the parts of a Hugging Face folder that a Mega checkpoint cannot store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_ckpt.formats.huggingface import tokenizer as hf_tokenizer
from mega_ckpt.formats.huggingface.folder import has_tokenizer
from mega_ckpt.formats.huggingface.tokenizer import GENERATION, repeats_config
from mega_schema.tokenizer.files import COMPANION_FILES, read_companion
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

# key -> default rate of transformers
_DROPOUT: Mapping[str, float] = MappingProxyType(
    {
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "hidden_dropout": 0.0,
        "hidden_dropout_prob": 0.1,
        "dropout_rate": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
)
_LONGEST = 80  # characters of a value


def dropped_items(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield the special token ids and dropout rates of config.json, and the files, that are dropped.

    Args:
        tokenizer: the tokenizer that is converted with the model, the folder's or another; None: no
            tokenizer.
    """
    generation = json.loads(hf_tokenizer.generation_config(tokenizer) or b"{}")
    identity = tokenizer.identity if tokenizer else None
    carried = {
        "bos_token_id": identity and identity.bos,
        "eos_token_id": identity and identity.eod,
        "pad_token_id": identity and identity.pad,
    }
    for key, ours in carried.items():
        if (value := config.get(key)) is not None and value not in (ours, [ours], generation.get(key)):
            yield _describe(key, value)
    for key, missing in _DROPOUT.items():
        if key in config and (config[key] or config[key] != missing):
            yield _describe(key, config[key])
    carried_files = tokenizer.companions if isinstance(tokenizer, FastTokenizer) else {}
    alone = tokenizer is None and has_tokenizer(folder)  # the other files belong to the tokenizer
    for name in (GENERATION,) if alone else COMPANION_FILES:
        if name in carried_files or not (folder / name).is_file():
            continue
        if name != GENERATION or not repeats_config(read_companion(folder / name)):
            yield name


def _describe(key: str, value: Any) -> str:
    return f"{key} {json.dumps(value)[:_LONGEST]}"
