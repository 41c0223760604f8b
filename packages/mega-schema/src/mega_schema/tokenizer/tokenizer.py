"""Open tokenizers by Megatron's type names, save them beside data and weights, and compare them by content.

A saved tokenizer is a folder:

    identity.json    TokenizerIdentity and a format number
    tokenizer.json   Hugging Face `tokenizers` format, as read or converted from other files; absent for a
                     NullTokenizer
    tokenizer.model  instead of it, a SentencePiece model as read
    ...              Hugging Face's files that were beside a tokenizer.json, as read

Text cannot end a document: `<|endoftext|>` in a text is encoded letter by letter. Such tokens are added only
by their ids (`identity.eod`, ...).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mega_schema.checkpoint.foreign_files import MAX_COMPANION_BYTES, MAX_TOKENIZER_BYTES, check_foreign
from mega_schema.dataset.atomic_dataset import atomic_folder
from mega_schema.errors import ConfigError, FormatError
from mega_schema.outputs import is_tokenizer
from mega_schema.tokenizer import files as tokenizer_files
from mega_schema.tokenizer import sentencepiece
from mega_schema.tokenizer.fast import CONTENT, FastTokenizer, LibraryOpening, dump_compact, open_and_hash
from mega_schema.tokenizer.hints import hint_of_content, hint_of_path
from mega_schema.tokenizer.identity import (
    ALIASES,
    BERT_TYPES,
    IDENTITY,
    SENTENCEPIECE_TYPES,
    TYPES,
    TokenizerIdentity,
    check_same_tokenizer,
    content_sha256,
    content_vocab_size,
    null_sha256,
)
from mega_schema.tokenizer.json_text import dump_content
from mega_schema.tokenizer.null import NullTokenizer

__all__ = [
    "FastTokenizer",
    "NullTokenizer",
    "Tokenizer",
    "TokenizerIdentity",
    "check_same_tokenizer",
    "open_tokenizer_folder",
    "open_tokenizer",
]

T = TypeVar("T")
HF_CONFIG = "tokenizer_config.json"
FORMAT = 1

# tokens of the same meaning in different tokenizers, the more specific first
_EOD = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eod>", "<EOD>", "[EOS]", "<eos>", "<EOS>")
_BOS = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "[BOS]", "<bos>", "<BOS>")
_PAD = ("<|pad|>", "<pad>", "[PAD]", "<PAD>")


class Tokenizer(Protocol):
    """Converts text to ids and back; immutable, can be shared by threads and pickled."""

    @property
    def identity(self) -> TokenizerIdentity: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; no special token is added, none is recognised in it.

        Raises:
            RequestError: the text has no ids (a word that is not a number, for a NullTokenizer).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on several threads if the library does."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens as text.

        Ids outside the vocabulary (padding rows) have none.

        Byte-level tokenizers return exactly what was encoded; bytes that are not UTF-8, as in part of a
        character, become U+FFFD.
        """

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a readable string per id: a byte-level token that is part of a character shows as U+FFFD."""

    def save(self, folder: Path) -> None:
        """Write `folder` whole or not at all, replacing an earlier one."""


def open_tokenizer(
    type: str,
    *,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
    model: Path | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
    tiktoken_special_tokens: Sequence[str] = tokenizer_files.TIKTOKEN_SPECIAL,
    lazy: bool = False,
) -> Tokenizer:
    """Open the tokenizer that Megatron's flags of the same names describe.

    Args:
        type: "HuggingFaceTokenizer" (BigScience's fork: "PretrainedFromHF"), "TikTokenizer" and the three
            names of SentencePiece take `model`; "GPT2BPETokenizer" takes `vocab_file` and `merge_file`;
            "BertWordPieceLowerCase" and "BertWordPieceCase" take `vocab_file`; "NullTokenizer" takes
            `vocab_size` and has one id more, its eod.
        model: a tokenizer.json, or a folder that holds one: Hugging Face's, whose tokenizer_config.json names
            eod, bos and pad, or one that `Tokenizer.save` wrote. Else a SentencePiece model, or NVIDIA's JSON
            of a tiktoken vocabulary.
        vocab_size: of a TikTokenizer: ids in all, by default 131,072.
        vocab_extra_ids: sentinels to add, for BERT's types and SentencePieceTokenizer.
        lazy: the library may open a FastTokenizer on first use, or in its `open`, which raises its errors.

    Raises:
        ConfigError: the type is unknown, or one of its files is not given.
        FormatError: a file is missing or is not a tokenizer.
    """
    type = ALIASES.get(type, type)
    if type not in TYPES:
        raise ConfigError("--tokenizer-type", "unknown", found=type, wanted=" | ".join(TYPES))
    if type == "HuggingFaceTokenizer":
        return _open_hugging_face(_require(model, "--tokenizer-model", type), lazy=lazy)
    if type == "GPT2BPETokenizer":
        files = (_require(vocab_file, "--vocab-file", type), _require(merge_file, "--merge-file", type))
        return _open_gpt2(*files, lazy=lazy)
    if type in BERT_TYPES:
        path = _require(vocab_file, "--vocab-file", type)
        lower = type == "BertWordPieceLowerCase"
        content = tokenizer_files.bert(path, _read(path), lower_case=lower, extra_ids=vocab_extra_ids)
        return _open_content(content, type, path, (None, "[BOS]", "[PAD]"), lazy=lazy)
    if type in SENTENCEPIECE_TYPES:
        path = _require(model, "--tokenizer-model", type)
        extra_ids = vocab_extra_ids if type == "SentencePieceTokenizer" else 0
        return sentencepiece.open_model(path, type, extra_ids=extra_ids)
    if type == "TikTokenizer":
        path = _require(model, "--tokenizer-model", type)
        content = tokenizer_files.tiktoken(
            path,
            _read_json(path),
            pattern=_require(tiktoken_pattern, "--tiktoken-pattern", type),
            vocab_size=vocab_size or 1 << 17,
            specials=tiktoken_num_special_tokens,
            special_names=tiktoken_special_tokens,
        )
        return _open_content(content, type, path, ("</s>", "<s>", "<pad>"), lazy=lazy)
    eod = _require(vocab_size, "--vocab-size", type)
    if eod < 1:
        raise ConfigError("--vocab-size", "not a count", found=eod, wanted="an integer above 0")
    return NullTokenizer(TokenizerIdentity(type, eod + 1, eod, None, None, null_sha256(eod + 1)))


def open_tokenizer_folder(folder: Path) -> Tokenizer:
    """Open a folder that `Tokenizer.save` wrote.

    Raises:
        FormatError: a file is missing, or the content does not match the identity.
    """
    values = _read_json(path := folder / IDENTITY)
    number = values.pop("format", None) if isinstance(values, dict) else None
    if number != FORMAT:
        raise FormatError(path, "format number", found=number, wanted=FORMAT)
    identity = TokenizerIdentity.from_dict(values, path)
    tokenizer: Tokenizer
    if identity.type == "NullTokenizer":
        sha256 = null_sha256(identity.vocab_size)
        size = identity.vocab_size
        tokenizer = NullTokenizer(identity)
    elif identity.type in SENTENCEPIECE_TYPES:
        model = _read_bytes(folder / sentencepiece.MODEL)
        tokenizer = sentencepiece.SentencePiece(model, identity)
        sha256 = sentencepiece.content_sha256(model)
        size = identity.vocab_size
    else:
        source = _read(folder / CONTENT)
        library, content, sha256 = open_and_hash(source, folder / CONTENT)
        size = content_vocab_size(content)
        tokenizer = FastTokenizer(source, identity, library, tokenizer_files.read_companions(folder))
    if sha256 != identity.sha256:
        what = f"{CONTENT} does not match {IDENTITY}"
        hint = "copy the whole folder again"
        raise FormatError(folder, what, found=f"sha256 {sha256}", wanted=identity.sha256, hint=hint)
    if size != identity.vocab_size:
        raise FormatError(path, "vocab_size", found=identity.vocab_size, wanted=f"{size} as in {CONTENT}")
    return tokenizer


def _require(value: T | None, flag: str, type: str) -> T:
    if value is None:
        raise ConfigError(flag, f"missing, and required by {type}", hint=f"add {flag} ...")
    return value


def _open_hugging_face(model: Path, *, lazy: bool) -> Tokenizer:
    if (model / IDENTITY).exists():
        tokenizer = open_tokenizer_folder(model)
        if isinstance(tokenizer, NullTokenizer):
            hint = f"--tokenizer-type NullTokenizer --vocab-size {tokenizer.identity.vocab_size - 1}"
            raise ConfigError(
                "--tokenizer-model", "the folder contains a NullTokenizer", found=model, hint=hint
            )
        return tokenizer
    if not model.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(model)):
        hint = f"of Hugging Face's hub? hf download {model} --include '*token*' --local-dir tokenizer"
        hint += ", then --tokenizer-model tokenizer"
        raise ConfigError("--tokenizer-model", "no such file or folder", found=model, hint=hint)
    path = model / CONTENT if model.is_dir() else model
    if model.is_dir():
        check_foreign(path, MAX_TOKENIZER_BYTES)
        check_foreign(model / HF_CONFIG, MAX_COMPANION_BYTES)
    source = _read(path)
    library, content, sha256 = open_and_hash(source, path)
    config = (
        _read_json(config_path)
        if model.is_dir() and (config_path := path.parent / HF_CONFIG).exists()
        else {}
    )

    def special(key: str, fallbacks: tuple[str, ...]) -> int | None:
        token = config.get(key) if isinstance(config, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        ids = [library.token_to_id(name) for name in ([token] if isinstance(token, str) else fallbacks)]
        return next((i for i in ids if i is not None), None)

    identity = TokenizerIdentity(
        "HuggingFaceTokenizer",
        content_vocab_size(content),
        eod=special("eos_token", _EOD),
        bos=special("bos_token", _BOS),
        pad=special("pad_token", _PAD),
        sha256=sha256,
    )
    files = tokenizer_files.read_companions(model) if model.is_dir() else {}
    return FastTokenizer(source, identity, library, files, content=content if lazy else None)


def _open_gpt2(vocab_file: Path, merge_file: Path, *, lazy: bool) -> Tokenizer:
    vocab = _read_vocab(vocab_file)
    if not isinstance(vocab, dict) or type(vocab.get(_EOD[0])) is not int:
        hint = hint_of_content(vocab_file, _read(vocab_file), "GPT2BPETokenizer")
        wanted = f"an object of token: id with {_EOD[0]!r}"
        raise FormatError(vocab_file, "not a GPT-2 vocabulary", wanted=wanted, hint=hint)
    lines = _read(merge_file).split("\n")
    merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    content = tokenizer_files.gpt2(vocab, merges)
    where = f"{vocab_file} with {merge_file}"
    return _open_content(content, "GPT2BPETokenizer", where, (_EOD[0], None, None), lazy=lazy)


def _open_content(
    content: dict[str, Any],
    type: str,
    where: object,
    names: tuple[str | None, ...],
    *,
    lazy: bool,
) -> Tokenizer:
    """Open the content of a tokenizer.json, whose eod, bos and pad have these names."""
    source = partial(dump_content, content, ensure_ascii=False)
    opening = LibraryOpening(dump_compact(content), where, source)
    try:
        number = {token["content"]: token["id"] for token in content["added_tokens"]}
        eod, bos, pad = (number.get(name) if name else None for name in names)
        identity = TokenizerIdentity(
            type, content_vocab_size(content), eod, bos, pad, content_sha256(content)
        )
    except Exception:
        opening.open()  # if the content is invalid, the library's error says why
        raise
    tokenizer = FastTokenizer(source, identity, opening, content=content if lazy else None)
    if not lazy:
        tokenizer.open()
    return tokenizer


def save_folder(folder: Path, identity: TokenizerIdentity, files: Mapping[str, bytes]) -> None:
    """Write a tokenizer's folder whole or not at all: its identity and these files."""
    identity_json = json.dumps({"format": FORMAT, **identity.to_dict()}, indent=1) + "\n"
    with atomic_folder(folder, is_tokenizer) as new:
        for name, content in {**files, IDENTITY: identity_json.encode()}.items():
            _write(new / name, content)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        wanted = "a tokenizer file"
        hint = hint_of_path(path)
        raise FormatError(path, "not readable", found=error.strerror, wanted=wanted, hint=hint) from None


def _read(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(path, f"not UTF-8 at byte {error.start}") from None


def _read_vocab(path: Path) -> Any:
    """Read the JSON of a vocabulary, in half of the time if orjson is installed."""
    text = _read(path)
    try:
        import orjson

        vocab = orjson.loads(text)
    except (ImportError, ValueError):  # `json` explains it, or accepts it
        return _parse_json(path, text)
    # orjson reads an id above 64 bits as a float
    is_exact = isinstance(vocab, dict) and set(map(type, vocab.values())) == {int}
    return vocab if is_exact else _parse_json(path, text)


def _read_json(path: Path) -> Any:
    return _parse_json(path, _read(path))


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, "not JSON", found=str(error), hint=hint_of_content(path, text)) from None
