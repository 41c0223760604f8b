"""Convert vocabularies of other programs to the content of a tokenizer.json: GPT-2's, BERT's, tiktoken's.

With one format for all, one class encodes, decodes and saves, and contents are compared in one way.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mega_schema.checkpoint.foreign_files import MAX_COMPANION_BYTES, read_foreign
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.hints import hint_of_content

GPT2_EOD: Final = "<|endoftext|>"
BERT_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_ADDED: Final = ("[BOS]", "[EOS]")  # Megatron adds them after the file's last word
TIKTOKEN_SPECIAL: Final = ("<unk>", "<s>", "</s>")
# files that Hugging Face's programs read besides the content: roles, chat template, stop tokens
COMPANION_FILES: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# NVIDIA's two patterns that split text into words, by the names of --tiktoken-pattern
TIKTOKEN_PATTERNS: Final = (
    ("v1", r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    (
        "v2",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)


def gpt2(vocab: dict[str, int], merges: Sequence[str]) -> dict[str, Any]:
    """Convert GPT-2's vocab.json and the lines of its merges.txt, which stay lines."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return tokenizer_json(
        special={GPT2_EOD: vocab[GPT2_EOD]},
        pre_tokenizer=level,
        post_processor=level,
        decoder=level,
        model={"type": "BPE", "vocab": vocab, "merges": [*merges]},
    )


def bert(path: Path, text: str, *, lower_case: bool, extra_ids: int) -> dict[str, Any]:
    """Convert BERT's vocab.txt, a word per line, and add Megatron's special tokens.

    As in Hugging Face's, a word of more than 100 characters is unknown, and `[MASK]` and the file's other
    special tokens are matched in text. None of them ends a document.

    Args:
        extra_ids: sentinels `<extra_id_0>` and so on, for T5.

    Raises:
        FormatError: a special token is missing, or a word occurs twice.
    """
    words = [line.strip() for line in text.rstrip("\n").split("\n")]
    vocab = {word: number for number, word in enumerate(words)}
    if len(vocab) != len(words):
        seen = set[str]()
        duplicate = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        hint = hint_of_content(path, text, "BertWordPiece")
        wanted = "each word on one line"
        raise FormatError(path, "duplicate word", found=repr(duplicate), wanted=wanted, hint=hint)
    if missing := [word for word in BERT_SPECIAL if word not in vocab]:
        hint = hint_of_content(path, text, "BertWordPiece")
        wanted = "BERT's vocab.txt, with " + " ".join(BERT_SPECIAL)
        raise FormatError(path, f"no {missing[0]}", wanted=wanted, hint=hint)
    special = dict[str, int]()
    matched = {word: vocab[word] for word in BERT_SPECIAL}
    for word in (*BERT_ADDED, *(f"<extra_id_{i}>" for i in range(extra_ids))):
        special[word] = vocab.setdefault(word, len(vocab))
    rules = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": lower_case}
    model = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return tokenizer_json(
        special=special,
        matched=matched,
        normalizer={"type": "BertNormalizer", **rules},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": False},
        model={"type": "WordPiece", **model, "vocab": vocab},
    )


def tiktoken(
    path: Path, words: Any, *, pattern: str, vocab_size: int, specials: int, special_names: Sequence[str]
) -> dict[str, Any]:
    """Convert NVIDIA's JSON of a tiktoken vocabulary.

    The JSON is a list of objects with a rank and a token's bytes in base64.

    Ids are ranks after `specials` special tokens. tiktoken joins the two neighbours whose union has the
    lowest rank, so every split of a token into two known ones is a merge, in the order of ranks.

    Args:
        pattern: v1 or v2.
        vocab_size: ids in all; the tokens of the file with the highest ranks are dropped to reach it.
        special_names: names of the first special tokens; `<SPECIAL_3>` and so on follow.

    Raises:
        ConfigError: pattern or special tokens are invalid.
        FormatError: the file is not such a vocabulary.
    """
    expression = dict(TIKTOKEN_PATTERNS).get(pattern)
    if expression is None:
        raise ConfigError("--tiktoken-pattern", "unknown", found=pattern, wanted="v1 | v2")
    if not set(TIKTOKEN_SPECIAL) <= set(special_names) or len(set(special_names)) != len(special_names):
        wanted = "different names, among them " + " ".join(TIKTOKEN_SPECIAL)
        raise ConfigError(
            "--tiktoken-special-tokens", "not a list of names", found=" ".join(special_names), wanted=wanted
        )
    if not len(special_names) <= specials < vocab_size - 256:
        wanted = f"{len(special_names)} names or more, and room for 256 bytes in {vocab_size} ids"
        raise ConfigError("--tiktoken-num-special-tokens", "does not fit", found=specials, wanted=wanted)
    ranks = _ranks(path, words, vocab_size - specials)
    names = [*special_names, *(f"<SPECIAL_{i}>" for i in range(len(special_names), specials))]
    vocab, merges = byte_level(ranks, specials)
    special = dict(zip(names, range(specials), strict=True))
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return tokenizer_json(
        special=special,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]},
        decoder=level,
        model={"type": "BPE", "ignore_merges": True, "vocab": {**special, **vocab}, "merges": merges},
    )


def byte_level(ranks: dict[bytes, int], first: int) -> tuple[dict[str, int], list[list[str]]]:
    """Return the vocabulary and the merges of tiktoken's ranks, in GPT-2's byte alphabet.

    Args:
        ranks: of every token, from 0 up, in their order.
        first: id of rank 0.
    """
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        [spell(token[:split]), spell(token[split:])]
        for token in ranks
        for split in sorted(range(1, len(token)), key=lambda split: _cut_rank(ranks, token, split))
        if token[:split] in ranks and token[split:] in ranks
    ]
    return {spell(token): first + rank for token, rank in ranks.items()}, merges


def read_companions(folder: Path) -> dict[str, bytes]:
    """Read the Hugging Face files beside a tokenizer.json, unchanged.

    They are copied into our output, and people publish that.

    Raises:
        FormatError: one is a link to another folder, larger than 16 MB, or not the JSON that its name
            promises.
    """
    return {name: read_companion(folder / name) for name in COMPANION_FILES if (folder / name).is_file()}


def read_companion(path: Path) -> bytes:
    """Read one of the files beside a tokenizer.json.

    Raises:
        FormatError: as `read_companions`.
    """
    content = read_foreign(path, MAX_COMPANION_BYTES)
    if path.suffix == ".json":
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise FormatError(path, "is not JSON", found=error) from None
        if not isinstance(value, dict):
            raise FormatError(path, "content", found=type(value).__name__, wanted="a JSON object")
    return content


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's letters.

    A printable byte is itself; the others count up from U+0100.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _cut_rank(ranks: dict[bytes, int], token: bytes, split: int) -> tuple[int, int]:
    last = len(ranks)
    return ranks.get(token[:split], last), ranks.get(token[split:], last)


def _ranks(path: Path, words: Any, count: int) -> dict[bytes, int]:
    """Return the tokens in the order of their ranks, at most `count`."""
    wanted = 'a list of {"rank": 0, "token_bytes": base64, "token_str": text}, ranks from 0 up'
    if not isinstance(words, list) or len(words) < 256:
        raise FormatError(path, "not a tiktoken vocabulary", wanted=wanted)
    ranks = dict[bytes, int]()
    for number, word in enumerate(words[:count]):
        try:
            token = base64.b64decode(word["token_bytes"], validate=True)
            rank = word["rank"]
        except (TypeError, KeyError, binascii.Error):
            raise FormatError(
                f"{path}: item {number}", "not a token", found=str(word)[:80], wanted=wanted
            ) from None
        if rank != number or token in ranks or (number < 256 and token != bytes([number])):
            raise FormatError(
                f"{path}: item {number}", "rank", found=rank, wanted=f"{number}, a token of its own"
            )
        ranks[token] = rank
    return ranks


def tokenizer_json(
    *,
    special: dict[str, int],
    model: dict[str, Any],
    matched: dict[str, int] | None = None,
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    post_processor: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    `special` tokens are not matched in text, those of `matched` are.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": word, **flags, "special": True} for word, i in special.items()]
    added += [{"id": i, "content": word, **flags, "special": False} for word, i in (matched or {}).items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: int(str(token["id"]))),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }
