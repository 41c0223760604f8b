"""Write a tokenizer as the files that Hugging Face's libraries load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mega_ckpt.checkpoint.output_dir import check_output_dir, contains_file
from mega_schema.atomic_io import disk_errors, write_text
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.atomic_dataset import atomic_folder
from mega_schema.errors import FormatError
from mega_schema.tokenizer.sentencepiece import MODEL, SentencePiece
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer, open_tokenizer_folder

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL, GENERATION = "special_tokens_map.json", "generation_config.json"
_LLAMA = "Llama2Tokenizer"


def export_tokenizer(checkpoint: Checkpoint, folder: Path, *, force: bool = False) -> list[str]:
    """Write the checkpoint's tokenizer atomically; return the file names.

    Args:
        force: replace `folder` if it holds a tokenizer.

    Raises:
        ConfigError: `folder` exists already.
        FormatError: the checkpoint has no tokenizer, or one that Hugging Face's libraries do not support.
    """
    stored = checkpoint.tokenizer_folder
    tokenizer = open_tokenizer_folder(stored)
    check_output_dir(
        folder, mark=TOKENIZER_CONFIG, what="a tokenizer", force=force, inputs=[checkpoint.folder]
    )
    if not _is_known(tokenizer):
        raise FormatError(
            stored,
            "is not supported by Hugging Face",
            found=tokenizer.identity.type,
            wanted=f"one with a {TOKENIZER_JSON}, or a {_LLAMA}",
            hint=f"{stored / MODEL} is the model itself" if (stored / MODEL).is_file() else "",
        )
    with disk_errors(folder), atomic_folder(folder, contains_file(TOKENIZER_CONFIG)) as new:
        write_tokenizer(new, tokenizer, checkpoint.spec.max_seq_len)
        return sorted(file.name for file in new.iterdir())


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """Write the files into `folder`; none for a tokenizer that Hugging Face does not support.

    The tokenizer's own Hugging Face files are copied unchanged, such as special token roles and chat
    template.

    Args:
        max_seq_len: the longest sequence of the model, in tokens.
    """
    identity = tokenizer.identity
    special = {"bos_token": identity.bos, "eos_token": identity.eod, "pad_token": identity.pad}
    config: dict[str, Any] = {"model_max_length": max_seq_len, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, FastTokenizer):
        content = json.loads(tokenizer.source)
        names = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
        vocab = content["model"]["vocab"]
        names |= {number: name for name, number in vocab.items()} if isinstance(vocab, dict) else {}
        write_text(folder / TOKENIZER_JSON, tokenizer.source)
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif isinstance(tokenizer, SentencePiece) and _is_known(tokenizer):
        ids = [number for number in (*special.values(), 0) if number is not None]
        names = dict(zip(ids, tokenizer.pieces(ids), strict=True))
        (folder / MODEL).write_bytes(tokenizer.model)
        # Hugging Face's class adds <s> before a text, ours does not. Unlike SentencePiece, it adds no space
        # before a text that begins with one: such a text has different ids
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "unk_token": names[0]}
        config |= {"add_bos_token": False, "add_eos_token": False}
    else:
        return
    roles = {key: names[number] for key, number in special.items() if number in names}
    files = {TOKENIZER_CONFIG: config | roles, SPECIAL: roles}
    defaults = {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in files.items()}
    originals = tokenizer.companions if isinstance(tokenizer, FastTokenizer) else {}
    for name, content in {**({} if TOKENIZER_CONFIG in originals else defaults), **originals}.items():
        if name != GENERATION:
            (folder / name).write_bytes(content)


def generation_config(tokenizer: Tokenizer | None) -> bytes | None:
    """Return the generation_config.json next to the tokenizer, if it was not derived from config.json.

    A derived one is replaced by a new one with more content.
    """
    original = tokenizer.companions.get(GENERATION) if isinstance(tokenizer, FastTokenizer) else None
    return None if original is None or repeats_config(original) else original


def repeats_config(generation: bytes) -> bool:
    """Return whether a generation_config.json was derived from the config.json of its folder."""
    return b'"_from_model_config": true' in generation


def _is_known(tokenizer: Tokenizer) -> bool:
    """Return whether Hugging Face has files for it; of SentencePiece's models, only Llama's."""
    return isinstance(tokenizer, FastTokenizer) or (
        isinstance(tokenizer, SentencePiece) and tokenizer.identity.type == _LLAMA
    )
