"""The identity of the tokenizer that made the ids, stored in datasets and checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mega_schema.errors import FormatError
from mega_schema.tokenizer.json_text import dump_content

IDENTITY = "identity.json"  # of a tokenizer's folder
BERT_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    *BERT_TYPES,
    *SENTENCEPIECE_TYPES,
    "TikTokenizer",
    "NullTokenizer",
)
ALIASES = MappingProxyType({"PretrainedFromHF": "HuggingFaceTokenizer"})


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """The identity of a tokenizer, as stored in datasets and checkpoints.

    Attributes:
        type: Megatron's name for it, one of TYPES.
        vocab_size: one past the highest id, special tokens included, padding not.
        eod, bos, pad: ids of the special tokens; None if there is none.
        sha256: of the content that determines the ids (vocabulary, merges, normalisation, pre-tokenisation),
            so that two files that encode alike but are written differently have one hash.
    """

    type: str
    vocab_size: int
    eod: int | None
    bos: int | None
    pad: int | None
    sha256: str

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: object, where: object) -> TokenizerIdentity:
        """Build the identity from a mapping of its fields.

        Raises:
            FormatError: a field is missing, unknown, or invalid.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(names):
            found = sorted(values) if isinstance(values, Mapping) else type(values).__name__
            raise FormatError(where, "keys of a tokenizer identity", found=found, wanted=sorted(names))
        size = values["vocab_size"]
        if type(size) is not int or size < 1:
            raise FormatError(f"{where}: vocab_size", "not a count", found=size, wanted="an integer above 0")
        if values["type"] not in TYPES:
            raise FormatError(f"{where}: type", "unknown", found=values["type"], wanted=" | ".join(TYPES))
        for name in ("eod", "bos", "pad"):
            token = values[name]
            if token is not None and (type(token) is not int or not 0 <= token < size):
                wanted = f"null or an id below {size}"
                raise FormatError(f"{where}: {name}", "outside the vocabulary", found=token, wanted=wanted)
        if not isinstance(values["sha256"], str) or len(values["sha256"]) != 64:
            raise FormatError(f"{where}: sha256", "length", found=values["sha256"], wanted="64 hex digits")
        return cls(**values)


def check_same_tokenizer(dataset: TokenizerIdentity, model: TokenizerIdentity, where: object) -> None:
    """Refuse a dataset whose tokenizer is not the model's.

    The types may differ: GPT-2's vocab.json and merges.txt give the same ids as its tokenizer.json.

    Args:
        where: the dataset's prefix or path; begins the message.

    Raises:
        FormatError: the content, the vocabulary size or the eod differs; the message names both tokenizers.
    """
    if _id_content(dataset) != _id_content(model):
        raise FormatError(
            where,
            "tokenizer of the dataset is not the model's",
            found=_describe(dataset),
            wanted=_describe(model),
            hint="preprocess the text again with the checkpoint's tokenizer folder",
        )


def _id_content(identity: TokenizerIdentity) -> tuple[object, ...]:
    return identity.sha256, identity.vocab_size, identity.eod


def _describe(identity: TokenizerIdentity) -> str:
    numbers = f"vocab_size {identity.vocab_size}, eod {identity.eod}, sha256 {identity.sha256[:12]}"
    return f"{identity.type} ({numbers})"


def content_sha256(content: Mapping[str, Any]) -> str:
    """Return the hash of the content of a tokenizer.json that determines ids.

    It is independent of the library's version and defaults.
    """
    model = {k: v for k, v in content["model"].items() if v is not None and v is not False and v != ""}
    model.setdefault("type", "BPE")  # files older than the field hold BPE
    if model["type"] == "BPE":
        model["merges"] = _uniform_merges(model.get("merges", []))
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = _sort_vocab(model["vocab"])
    # a special token is never matched in text, so only its id counts, not its matching rules
    added = content.get("added_tokens", [])
    added = [{k: t[k] for k in ("id", "content")} if t.get("special") else t for t in added]
    essence = {
        "model": model,
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": _without_offsets(content.get("pre_tokenizer")),
    }
    return hashlib.sha256(dump_content(essence, sort_keys=True).encode()).hexdigest()


def _uniform_merges(merges: Sequence[Any]) -> Sequence[Any]:
    """Return merges that are all lines unchanged, and others as lists of tokens."""
    if set(map(type, merges)) == {str}:
        return merges
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _sort_vocab(vocab: dict[str, Any]) -> dict[str, Any]:
    """Return the vocabulary sorted by word, if orjson is installed.

    Otherwise `json` sorts it, which dominates the hash's time.
    """
    if set(map(type, vocab.values())) != {int}:  # orjson may write other numbers differently
        return vocab
    try:
        import orjson

        ordered: dict[str, Any] = orjson.loads(orjson.dumps(vocab, option=orjson.OPT_SORT_KEYS))
    except (ImportError, TypeError):  # not installed; a word that UTF-8 cannot encode, or an id above 64 bits
        return vocab
    return ordered


def _without_offsets(part: Any) -> Any:
    """Return a pre-tokenizer without `trim_offsets`, and with the regex that older byte-level files imply."""
    if not isinstance(part, dict):
        return part
    part = {k: v for k, v in part.items() if k != "trim_offsets"}
    if part.get("type") == "ByteLevel":
        part.setdefault("use_regex", True)
    if "pretokenizers" in part:
        part["pretokenizers"] = [_without_offsets(inner) for inner in part["pretokenizers"]]
    return part


def content_vocab_size(content: Mapping[str, Any]) -> int:
    """Return one past the highest id: ids may have gaps, and an embedding must have a row for each."""
    vocab = content["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
    return 1 + int(max([-1, *ids, *(token["id"] for token in content.get("added_tokens", []))]))


def null_sha256(vocab_size: int) -> str:
    return hashlib.sha256(f"NullTokenizer/{vocab_size}".encode()).hexdigest()
