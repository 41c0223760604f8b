"""Llama 3's tokenizer.model: the ids equal tiktoken's, and other files are refused."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest

from mega_ckpt.formats.meta import tokenizer as llama3_tokenizer
from mega_schema.errors import FormatError

# the expression of Meta's own program
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = (
    *(
        "th",
        "he",
        "the",
        "in",
        "an",
        "er",
        " t",
        " a",
        " th",
        " the",
        "nd",
        "re",
        "on",
        "at",
        "en",
        "12",
        "123",
    ),
    *("\n\n", "  ", "    ", "é", "ll", "'re", "here", "there", "ing"),
)
BYTES = [bytes([i]) for i in (*range(33, 256), *range(33))]


def _ranks() -> dict[bytes, int]:
    # the last one is no union of two others: it is found whole, or not at all
    tokens = dict.fromkeys([*BYTES, *(word.encode() for word in WORDS), b"qzxj"])
    return {token: rank for rank, token in enumerate(tokens)}


def _write(path: Path, ranks: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


def test_ids_are_tiktokens(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = _ranks()
    theirs = tiktoken.Encoding("llama 3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours = llama3_tokenizer.read_tokenizer(_write(tmp_path / "tokenizer.model", ranks), len(ranks) + 256)
    rng, letters = random.Random(2), "thea nrd 123 \n'éRqzxj漢"
    texts = ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(400)]
    texts += ["the  theRE\n\n there're 12345", "qzxj qzx", "<|eot_id|>", ""]
    assert [ours.encode(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]
    assert [ours.decode(ours.encode(text)) for text in texts] == texts


def test_special_tokens_have_metas_places(tmp_path: Path) -> None:
    ranks = _ranks()
    size = len(ranks) + 256
    ours = llama3_tokenizer.read_tokenizer(_write(tmp_path / "tokenizer.model", ranks), size)
    first = len(ranks)
    assert (ours.identity.vocab_size, ours.identity.bos, ours.identity.eod) == (size, first, first + 1)
    assert ours.decode([first + 6, first + 9, first + 2, first + 255]) == (
        "<|start_header_id|><|eot_id|><|reserved_special_token_0|><|reserved_special_token_250|>"
    )


BROKEN: dict[str, tuple[bytes, str]] = {
    "a hole": (
        b"IQ== 0\nIg== 2\n",
        "tokenizer.model:2: is not a token: found b'Ig== 2', wanted a token of its own",
    ),
    "twice": (b"IQ== 0\nIQ== 1\n", "tokenizer.model:2: is not a token"),
    "no base64": (b"I! 0\n", "tokenizer.model:1: is not a token: found b'I! 0'"),
    "no rank": (b"IQ==\n", "tokenizer.model:1: is not a token"),
    "empty": (b"", "tokenizer.model: tokens: found 0 and 256 special ones, wanted the model's 300"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_none_is_refused(tmp_path: Path, what: str) -> None:
    content, message = BROKEN[what]
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        llama3_tokenizer.read_tokenizer(tmp_path / "tokenizer.model", 300)
    assert message in str(caught.value)
