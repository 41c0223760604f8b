"""Text of ids that arrive in parts equals the text of all ids, up to the stop string."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from mega_serve.engine.detokenizer import Detokenizer
from tests.serving.sentencepiece_model import train_sentencepiece
from tests.shared_data import require_shared

TEXTS = [
    "Hello world, how are you?\n\nFine.",
    "naïve café — “quotes” 日本語のテキスト 😀👨‍👩‍👧 e\u0301",
    "   leading and   many    blanks\t\ttabs   ",
    "\ufffd literal \ufffd\ufffd replacement \ufffd",
]


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece model with Llama's settings: dummy prefix and byte fallback."""
    return train_sentencepiece(
        tmp_path_factory.mktemp("sentencepiece"),
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
    )


@pytest.fixture(params=["bytes", "byte_fallback", "gpt2", "sentencepiece", "t5"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Tokenizers of all kinds; the real ones need the shared data."""
    if request.param in ("bytes", "byte_fallback"):
        fixture = {"bytes": "tokenizer", "byte_fallback": "byte_fallback"}[request.param]
        tokenizer: Tokenizer = request.getfixturevalue(fixture)
        return tokenizer
    folder = require_shared() / "data" / "tokenizers"
    if request.param == "gpt2":
        return open_tokenizer("HuggingFaceTokenizer", model=folder / "gpt2" / "tokenizer.json")
    pytest.importorskip("sentencepiece")
    models = {"sentencepiece": Path("sentencepiece", "test_model.model"), "t5": Path("t5", "spiece.model")}
    return open_tokenizer("Llama2Tokenizer", model=folder / models[request.param])


def split_ids(ids: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    cuts = sorted(rng.sample(range(len(ids) + 1), min(len(ids), rng.choice([0, 1, 5, len(ids)]))))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(detokenizer: Detokenizer, parts: Sequence[Sequence[int]]) -> tuple[str, str | None]:
    text = ""
    for part in parts:
        new, stop = detokenizer.append(part)
        text += new
        if stop is not None:
            assert detokenizer.append([0]) == ("", None)
            assert detokenizer.flush() == ""
            return text, stop
    return text + detokenizer.flush(), None


def random_ids(tokenizer: Tokenizer, rng: random.Random, most: int = 40) -> list[int]:
    identity = tokenizer.identity
    special = {identity.eod, identity.bos, identity.pad}
    if rng.random() < 0.5:
        text = "".join(rng.choice(TEXTS) for _ in range(rng.randrange(1, 3)))
        ids = tokenizer.encode(text)
        start = rng.randrange(len(ids))
        return ids[start : start + most]
    ids = [rng.randrange(identity.vocab_size) for _ in range(rng.randrange(1, most))]
    return [i for i in ids if i not in special]


def continued_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Text after the prompt's; a character that the prompt begins belongs to it."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *ids])
    size = 0
    while size < len(before) and whole[size : size + 1] == before[size]:
        size += 1
    return whole[size:]


def test_parts_join_to_the_text_of_all_ids(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        prompt = random_ids(any_tokenizer, rng) if rng.random() < 0.9 else []
        ids = random_ids(any_tokenizer, rng, most=80)
        text, stop = run(Detokenizer(any_tokenizer, prompt), split_ids(ids, rng))
        assert stop is None
        assert text == continued_text(any_tokenizer, prompt, ids), (prompt, ids)


def naive_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None, int]:
    """The string that is complete first, the longest of several; the text before and its end."""
    for end in range(len(text) + 1):
        complete = sorted((s for s in stop if text[:end].endswith(s)), key=len)
        if complete:
            return text[: end - len(complete[-1])], complete[-1], end
    return text, None, len(text)


def test_text_is_cut_at_the_stop_string_for_every_split(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    stops = 0
    for _ in range(300):
        prompt = random_ids(any_tokenizer, rng)
        ids = random_ids(any_tokenizer, rng, most=60)
        whole = continued_text(any_tokenizer, prompt, ids)
        stop = ["never in a text", "ab" * 3]
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(whole) + 1)
            stop.append(whole[start : start + rng.randrange(1, 6)] or "x")
        include = rng.random() < 0.5
        wanted, wanted_stop, end = naive_stop(whole, stop)
        detokenizer = Detokenizer(any_tokenizer, prompt, stop=stop, include_stop_str=include)
        text, stop_string = run(detokenizer, split_ids(ids, rng))
        # a stop string that ends in the text of the flush ends nothing any more, but cuts the text
        assert stop_string in (wanted_stop, None)
        assert text == (whole[:end] if include else wanted)
        stops += stop_string is not None
    assert stops > 100


def test_a_stop_string_that_overlaps_itself_is_met_at_its_first_end(tokenizer: Tokenizer) -> None:
    text, stop = run(
        Detokenizer(tokenizer, [], stop=["abab" + "c"]), [[i] for i in tokenizer.encode("abababcx")]
    )
    assert (text, stop) == ("ab", "ababc")


def test_text_is_held_only_while_it_may_become_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["END"])
    steps = [detokenizer.append([i])[0] for i in tokenizer.encode("xEENx")]
    assert steps == ["x", "", "E", "", "ENx"]


def test_min_tokens_is_the_length_in_which_no_stop_string_counts(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], stop=["aa"], min_tokens=3)
    assert run(detokenizer, [tokenizer.encode("aaaaaa")]) == ("aaa", "aa")


def test_no_half_character_is_returned(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.append([i])[0] for i in tokenizer.encode("é😀")] == ["", "é", "", "", "", "😀"]
    assert detokenizer.append(tokenizer.encode("€")[:2]) == ("", None)
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_at_the_end_have_no_text(tokenizer: Tokenizer) -> None:
    eod = tokenizer.identity.eod
    assert eod is not None
    a, b = tokenizer.encode("ab")
    assert run(Detokenizer(tokenizer, []), [[a], [eod]]) == ("a", None)
    assert run(Detokenizer(tokenizer, []), [[a], [eod], [b]]) == ("a<|endoftext|>b", None)


def count_decoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    decode = tokenizer.decode
    decoded = 0

    def decode_and_count(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", decode_and_count)
    return lambda: decoded


@pytest.mark.parametrize("text", ["word ", " ", "\n", "\ufffd", "日"])
def test_the_work_for_an_id_does_not_grow(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    ids = tokenizer.encode(text) * 1000
    decoded_ids = count_decoded(tokenizer, monkeypatch)
    detokenizer = Detokenizer(tokenizer, ids)
    for i in ids:
        detokenizer.append([i])
    most = 80 if text == " " else 30
    assert decoded_ids() < most * len(ids)
