"""The engine with a small random model: text, segments, log-probabilities, limits."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_model.build import build_model
from mega_model.runtime import Runtime
from mega_schema.checkpoint.checkpoint_dir import FORMAT, TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.errors import FormatError
from mega_schema.spec import gpt
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from mega_serve.api.app import ClientDisconnected
from mega_serve.api.megatron import BadRequest, parse_request
from mega_serve.engine import ModelEngine, load_engine
from tests.shared_data import SHARED, needs_shared

GPT2 = SHARED / "data" / "tokenizers" / "gpt2"


def open_engine(run: Path, max_batch_tokens: int = 12000) -> ModelEngine:
    return load_engine(
        Checkpoint.open(run), max_batch_tokens=max_batch_tokens, device="cpu", dtype=torch.float32
    )


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> ModelEngine:
    return open_engine(checkpoint)


def generate(engine: ModelEngine, **body: Any) -> dict[str, Any]:
    return engine.generate(parse_request(body), lambda: False)


def get_error(engine: ModelEngine, **body: Any) -> tuple[str, str]:
    with pytest.raises(BadRequest) as caught:
        generate(engine, **body)
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    "prompt", ["Hello", " two  spaces ", "naïve — ☃ 😀", "\0", "a\n\n\n", "<|endoftext|>"]
)
def test_text_is_the_prompt_byte_for_byte_and_then_the_generation(engine: ModelEngine, prompt: str) -> None:
    response = generate(engine, prompts=[prompt], tokens_to_generate=8, random_seed=3, logprobs=True)
    assert response["text"][0].startswith(prompt)
    assert len(response["text"][0]) > len(prompt)
    ids = engine.tokenizer.encode(prompt)
    assert len(ids) < len(response["segments"][0]) <= len(ids) + 8
    assert len(response["logprobs"][0]) == len(response["segments"][0]) - 1


def test_only_the_pieces_of_one_token_each_are_segments(engine: ModelEngine) -> None:
    response = generate(engine, prompts=["ab"], tokens_to_generate=1, top_k=1)
    assert response["segments"][0][:2] == ["a", "b"]
    assert len(response["segments"][0]) == 3
    assert response["logprobs"] is None


def test_a_beginning_of_document_is_a_segment_but_not_in_the_text(engine: ModelEngine) -> None:
    response = generate(engine, prompts=["ab", ""], tokens_to_generate=1, top_k=1, add_BOS=True)
    assert response["segments"][0][:3] == ["<|endoftext|>", "a", "b"]
    assert response["text"][0].startswith("ab")
    assert response["segments"][1][0] == "<|endoftext|>"
    assert "endoftext" not in response["text"][0][: len("ab")]


def test_scoring_gives_the_prompt_and_its_own_logprobs(engine: ModelEngine) -> None:
    response = generate(engine, prompts=["Hello", "Hi"], tokens_to_generate=0, logprobs=True)
    assert response["text"] == ["Hello", "Hi"]
    assert [len(row) for row in response["logprobs"]] == [4, 1]
    longer = generate(engine, prompts=["Hi"], tokens_to_generate=5, logprobs=True)
    assert response["logprobs"][1] == pytest.approx(longer["logprobs"][0][:1], abs=1e-5)


def test_a_seed_belongs_to_its_request(engine: ModelEngine) -> None:
    body = {"prompts": ["Hello"], "tokens_to_generate": 20}
    first = generate(engine, **body, random_seed=5)
    unseeded = [generate(engine, **body)["text"] for _ in range(2)]
    assert generate(engine, **body, random_seed=5) == first
    assert generate(engine, **body, random_seed=6) != first
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64, 10**300])
def test_every_seed_is_a_seed(engine: ModelEngine, seed: int) -> None:
    assert len(generate(engine, prompts=["a"], tokens_to_generate=1, random_seed=seed)["text"]) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 100])
def test_every_temperature_in_range_gives_an_generate(engine: ModelEngine, temperature: float) -> None:
    response = generate(engine, prompts=["a"], tokens_to_generate=4, temperature=temperature)
    assert response["text"][0].startswith("a")


def test_beams_come_best_first_with_their_scores(engine: ModelEngine) -> None:
    response = generate(engine, prompts=["Hello"], tokens_to_generate=5, beam_width=4)
    assert list(response) == ["text", "segments", "scores"]
    assert response["scores"] == sorted(response["scores"], reverse=True)
    assert len(response["text"]) == len(response["segments"]) == 4
    assert all(text.startswith("Hello") for text in response["text"])


@pytest.mark.parametrize("stop_token", [-1, 256, 10**300])
@pytest.mark.parametrize("penalty", [-50.0, 50.0])
def test_every_stop_token_and_penalty_gives_scores_that_json_can_hold(
    engine: ModelEngine, stop_token: int, penalty: float
) -> None:
    response = generate(
        engine,
        prompts=["a"],
        tokens_to_generate=9,
        beam_width=3,
        stop_token=stop_token,
        length_penalty=penalty,
    )
    assert all(math.isfinite(score) for score in response["scores"])


def test_beams_stop_at_the_end_of_a_document_unless_told_otherwise(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = []

    def beam_search(*_: object, stop: int | None, **__: object) -> list[object]:
        stops.append(stop)
        return []

    monkeypatch.setattr("mega_serve.engine.beam_search", beam_search)
    generate(engine, prompts=["a"], beam_width=2, tokens_to_generate=1)
    generate(engine, prompts=["a"], beam_width=2, tokens_to_generate=1, stop_token=0)
    assert stops == [engine.tokenizer.identity.eod, 0]


def test_a_row_longer_than_the_context_is_refused_in_megatrons_words(engine: ModelEngine) -> None:
    words = "Length of prompt + tokens_to_generate longer than allowed"
    assert get_error(engine, prompts=["a" * 60], tokens_to_generate=5) == ("tokens_to_generate", words)
    assert get_error(engine, prompts=["a"], tokens_to_generate=10**300)[1] == words
    assert get_error(engine, prompts=["a" * 65], tokens_to_generate=0, logprobs=True)[1] == words
    assert get_error(engine, prompts=["a" * 60], tokens_to_generate=5, beam_width=1)[1] == words


def test_more_tokens_than_allowed_together_are_refused_in_megatrons_words(checkpoint: Path) -> None:
    engine = open_engine(checkpoint, max_batch_tokens=20)
    words = "Too many tokens.  21 is greater than 20"
    assert get_error(engine, prompts=["ab", "a", "a"], tokens_to_generate=5)[1] == words
    assert get_error(engine, prompts=["ab"], tokens_to_generate=5, beam_width=3)[1] == words
    assert generate(engine, prompts=["ab", "a"], tokens_to_generate=8)["text"]


def test_a_beam_with_nowhere_to_go_is_refused(engine: ModelEngine) -> None:
    body = {"prompts": ["a"], "tokens_to_generate": 0, "logprobs": True, "beam_width": 1}
    assert get_error(engine, **body)[1] == "context length + tokens_to_generate too large"


def test_the_ids_that_stop_come_from_the_tokenizer(engine: ModelEngine, tokenizer: Tokenizer) -> None:
    assert [engine.newline] == tokenizer.encode("\n")
    assert [engine.double_newline] == tokenizer.encode("\n\n")
    assert [engine.colon] == tokenizer.encode(":")


@needs_shared
def test_gpt2s_ids_that_stop_are_the_ones_megatron_has_in_its_code() -> None:
    vocab_file = GPT2 / "gpt2-vocab.json"
    merge_file = GPT2 / "gpt2-merges.txt"
    tokenizer = open_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    spec = gpt(layers=1, hidden=4, heads=1, vocab=50257, max_seq_len=8)
    engine = ModelEngine(build_model(Runtime.single_process(spec)), tokenizer)
    assert (engine.newline, engine.double_newline, engine.colon, engine.eod) == (198, 628, 25, 50256)


@pytest.mark.parametrize(
    ("field", "ids", "twice"),
    [("stop_on_eol", ("\n", "\n\n"), False), ("stop_on_double_eol", ("\n\n",), True), (None, (), False)],
)
def test_each_way_to_stop_is_megatrons(
    engine: ModelEngine,
    monkeypatch: pytest.MonkeyPatch,
    field: str | None,
    ids: tuple[str, ...],
    twice: bool,
) -> None:
    stops: list[Any] = []

    def record_stop(_: object, prompts: list[list[int]], **options: Any) -> Any:
        stops.append(options["stop"])
        raise ClientDisconnected

    monkeypatch.setattr("mega_serve.engine.generate", record_stop)
    with pytest.raises(ClientDisconnected):
        generate(engine, prompts=["a"], tokens_to_generate=1, **({field: True} if field else {}))
    tokenizer = engine.tokenizer
    expected = {tokenizer.encode(text)[0] for text in ids} or {tokenizer.identity.eod}
    assert stops[0].ids == expected
    assert stops[0].repeated_id == (tokenizer.encode("\n")[0] if twice else None)


def test_ids_past_the_vocabulary_of_the_tokenizer_are_not_generated(engine: ModelEngine) -> None:
    assert engine.vocab_size == engine.model.spec.vocab - 2


@pytest.fixture(scope="module")
def metaspace_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like SentencePiece: a token includes the space before it, except the first in a text."""
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    words = {word: i for i, word in enumerate(["<unk>", "▁Hello", "▁world", "▁again"])}
    source = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": mark,
        "post_processor": None,
        "decoder": mark,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    path.write_text(json.dumps(source), "utf-8")
    return open_tokenizer("HuggingFaceTokenizer", model=path)


@pytest.fixture(scope="module")
def metaspace_engine(metaspace_tokenizer: Tokenizer) -> ModelEngine:
    spec = gpt(layers=1, hidden=4, heads=1, vocab=4, max_seq_len=16)
    model = build_model(Runtime.single_process(spec))
    torch.nn.init.zeros_(model.embed.weight)
    return ModelEngine(model, metaspace_tokenizer)


def test_the_space_before_the_first_new_word_is_kept(
    metaspace_engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Output:
        rows = ((1, 2, 3),)
        logprobs = None

    monkeypatch.setattr("mega_serve.engine.generate", lambda *_, **__: Output)
    assert generate(metaspace_engine, prompts=["Hello"], tokens_to_generate=2)["text"] == [
        "Hello world again"
    ]


@pytest.mark.parametrize("field", ["stop_on_eol", "stop_on_double_eol", "add_BOS"])
def test_what_a_tokenizer_has_no_token_for_is_refused_and_not_ignored(
    metaspace_engine: ModelEngine, field: str
) -> None:
    param, message = get_error(metaspace_engine, prompts=["Hello"], tokens_to_generate=1, **{field: True})
    assert param == field
    assert message.startswith(f"{field} needs a tokenizer with ")


def test_a_text_without_tokens_is_refused(
    metaspace_engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(metaspace_engine.tokenizer), "encode", lambda *_: [])
    param, message = get_error(metaspace_engine, prompts=["x"], tokens_to_generate=1)
    assert (param, message) == ("prompts", "a prompt has no tokens")


@pytest.mark.parametrize("options", [{}, {"beam_width": 2}])
def test_an_aborted_request_stops_between_two_tokens(engine: ModelEngine, options: dict[str, int]) -> None:
    request = parse_request({"prompts": ["a"], "tokens_to_generate": 9, **options})
    abort = iter([False, False, True])
    with pytest.raises(ClientDisconnected):
        engine.generate(request, lambda: next(abort))
    assert list(abort) == []


def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "iter"
    folder.mkdir()
    for file in Checkpoint.open(checkpoint).folder.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    rewrite_checksums(folder, FORMAT)
    with pytest.raises(FormatError, match=f"{TOKENIZER}: the checkpoint has no tokenizer; hint: "):
        open_engine(folder)


def test_a_tokenizer_larger_than_the_vocabulary_of_the_model_is_refused(checkpoint: Path) -> None:
    small = Checkpoint.open(checkpoint)
    small.spec = replace(small.spec, vocab=200)
    message = "the tokenizer has more tokens than the model: found 258, wanted at most 200"
    with pytest.raises(FormatError, match=message):
        load_engine(small, max_batch_tokens=1, device="cpu", dtype=torch.float32)
