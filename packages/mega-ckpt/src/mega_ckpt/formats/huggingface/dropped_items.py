"""What a Hugging Face folder says beside its model and has no place in ours, to be told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mega_ckpt.formats.huggingface import tokenizer as hf_tokenizer
from mega_ckpt.formats.huggingface.folder import has_tokenizer
from mega_ckpt.formats.huggingface.tokenizer import GENERATION, repeats_config
from mega_schema.tokenizer import FastTokenizer, Tokenizer
from mega_schema.tokenizer_files import BESIDE, read_beside

# key -> the rate that transformers takes where the key is missing
_DROPOUT: Mapping[str, float] = MappingProxyType(
    {
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
)
_LONGEST = 80  # characters of a value


def left_behind(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Ids of special tokens and dropout of a config.json, and files, that are not carried over.

    Args:
        tokenizer: that goes with the model, the folder's or another; None: none does.
    """
    generation = json.loads(hf_tokenizer.generation(tokenizer) or b"{}")
    identity = tokenizer.identity if tokenizer else None
    carried = {
        "bos_token_id": identity and identity.bos,
        "eos_token_id": identity and identity.eod,
        "pad_token_id": identity and identity.pad,
    }
    for key, ours in carried.items():
        if (value := config.get(key)) is not None and value not in (ours, [ours], generation.get(key)):
            yield _described(key, value)
    for key, missing in _DROPOUT.items():
        if key in config and (config[key] or config[key] != missing):
            yield _described(key, config[key])
    came = tokenizer.beside if isinstance(tokenizer, FastTokenizer) else {}
    alone = tokenizer is None and has_tokenizer(folder)  # the others are told as the tokenizer
    for name in (GENERATION,) if alone else BESIDE:
        if name in came or not (folder / name).is_file():
            continue
        if name != GENERATION or not repeats_config(read_beside(folder / name)):
            yield name


def _described(key: str, value: Any) -> str:
    return f"{key} {json.dumps(value)[:_LONGEST]}"
