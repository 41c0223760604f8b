"""The bytes of every id of a vocabulary, whatever the kind of tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from mega_schema.errors import RequestError
from mega_schema.tokenizer.files import byte_alphabet
from mega_schema.tokenizer.sentencepiece import SentencePiece
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A vocabulary as bytes.

    Attributes:
        tokens: the bytes that each id appends to a text; of a special token, its name; b"" for an unused id.
        special_ids: ids that are not text.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]


def list_token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the bytes of all ids.

    Raises:
        RequestError: the ids are not pieces of text (NullTokenizer).
    """
    if isinstance(tokenizer, FastTokenizer):
        return _from_fast(tokenizer)
    if isinstance(tokenizer, SentencePiece):
        return _from_sentencepiece(tokenizer)
    found = tokenizer.identity.type
    raise RequestError("tokenizer", "has no text for a grammar", found=found, wanted="a tokenizer of text")


def _from_fast(tokenizer: FastTokenizer) -> TokenBytes:
    content = tokenizer.content()
    vocab = content["model"]["vocab"]
    words = dict(enumerate(word for word, _ in vocab)) if isinstance(vocab, list) else _by_id(vocab)
    kinds = _decoder_kinds(content.get("decoder"))
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        pieces = {i: _letters_to_bytes(word, alphabet) for i, word in words.items()}
    elif "WordPiece" in kinds:
        pieces = {
            i: (w.removeprefix("##") if w.startswith("##") else f" {w}").encode() for i, w in words.items()
        }
    else:
        fallback = "ByteFallback" in kinds
        pieces = {i: _piece_to_bytes(word, is_byte=fallback) for i, word in words.items()}
    special = {i for i in _identity_ids(tokenizer) if i in pieces}
    for token in content.get("added_tokens") or []:
        pieces[token["id"]] = token["content"].encode()
        if token.get("special"):
            special.add(token["id"])
    size = tokenizer.identity.vocab_size
    return TokenBytes([pieces.get(i, b"") for i in range(size)], frozenset(i for i in special if i < size))


def _from_sentencepiece(tokenizer: SentencePiece) -> TokenBytes:
    import sentencepiece  # an optional dependency, which opened this tokenizer

    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    size = tokenizer.identity.vocab_size
    names = tokenizer.pieces(range(size))
    tokens = [name.encode() for name in names]
    special = {*_identity_ids(tokenizer), *range(len(library), size)}
    for i in range(min(size, len(library))):
        if library.is_byte(i) or not (library.is_control(i) or library.is_unknown(i) or library.is_unused(i)):
            tokens[i] = _piece_to_bytes(library.id_to_piece(i), is_byte=library.is_byte(i))
        else:
            special.add(i)
    return TokenBytes(tokens, frozenset(special))


@lru_cache(maxsize=4)
def keep_token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return `list_token_bytes`, kept for further calls."""
    return list_token_bytes(tokenizer)


@lru_cache(maxsize=4)
def find_special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that are no text: end-of-document, beginning, padding, and other special tokens.

    The result is kept: finding them reads all of a tokenizer.json, and each sequence asks.
    """
    ids = _identity_ids(tokenizer)
    if isinstance(tokenizer, FastTokenizer):
        added = tokenizer.content().get("added_tokens") or []
        ids |= {token["id"] for token in added if token.get("special")}
    elif isinstance(tokenizer, SentencePiece):
        ids |= _from_sentencepiece(tokenizer).special_ids
    return frozenset(ids)


def _identity_ids(tokenizer: Tokenizer) -> set[int]:
    identity = tokenizer.identity
    return {i for i in (identity.eod, identity.bos, identity.pad) if i is not None}


def _by_id(vocab: dict[str, int]) -> dict[int, str]:
    return {i: word for word, i in vocab.items()}


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Return the types of a tokenizer.json's decoder and of its parts."""
    if not decoder:
        return set()
    return {decoder["type"]}.union(*map(_decoder_kinds, decoder.get("decoders", [])))


def _letters_to_bytes(word: str, alphabet: dict[str, int]) -> bytes:
    if not set(word) <= alphabet.keys():
        return word.encode()  # a word that was added as text
    return bytes(alphabet[letter] for letter in word)


def _piece_to_bytes(piece: str, *, is_byte: bool) -> bytes:
    if is_byte and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()
