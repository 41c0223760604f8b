"""Span corruption from a decoder: lengths, spans, sentinels, and the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.data.prefix_reader import PREFIX
from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN
from mega_train.data.span_corruption import SpanLengths, SpanRule, SpanVocabulary
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.train_command import run_mega_train

SENTINELS = tuple(range(200, 230))
VOCABULARY = SpanVocabulary(SENTINELS, 199)


def test_the_lengths_are_those_of_bigscience() -> None:
    """4B8-en-ND-MLM.sh has 1675 tokens of inputs and 373 of targets in 2048."""
    lengths = SpanLengths.fit(2047, 0.15, 3)
    assert (lengths.inputs, lengths.targets) == (1675, 373)


@pytest.mark.parametrize("length", [16, 63, 64, 65, 512])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3), (0.5, 3), (0.5, 8), (0.3, 1)])
def test_a_sample_reads_as_many_tokens_as_fit(length: int, density: float, mean: float) -> None:
    lengths = SpanLengths.fit(length, density, mean)
    assert lengths.inputs + lengths.targets == lengths.tokens + 2 * lengths.spans + 2
    assert length - 1 <= lengths.inputs + lengths.targets <= length + 1
    longer = SpanLengths.from_tokens(lengths.tokens + 1, density, mean)
    assert longer.inputs + longer.targets > length + 1


@pytest.mark.parametrize("is_prefix", [True, False])
def test_inputs_and_targets_give_the_text_again(is_prefix: bool) -> None:
    lengths = SpanLengths.fit(40, 0.3, 2)
    rule = SpanRule(40, lengths, 7, is_prefix)
    rows = [rule.corrupt(np.arange(lengths.tokens), number, VOCABULARY) for number in range(50)]
    for row in rows:
        end = lengths.inputs + lengths.targets
        inputs, targets = row[TOKEN, : lengths.inputs].tolist(), row[TOKEN, lengths.inputs : end].tolist()
        assert (inputs.pop(), targets.pop()) == (199, 199)
        spans = dict[int, list[int]]()
        for token in targets:
            if token in SENTINELS:
                spans[token] = []
            else:
                spans[[*spans][-1]].append(token)
        assert [*spans] == list(SENTINELS[: lengths.spans])
        text = [x for token in inputs for x in spans.get(token, [token])]
        assert text == list(range(lengths.tokens))
        assert inputs[0] == 0, "text is first"
        assert all(spans.values())
        assert sum(map(len, spans.values())) == lengths.noise
        is_target = (np.arange(41) >= lengths.inputs) & (np.arange(41) < end)
        np.testing.assert_array_equal(row[LEARNT], is_target)
        np.testing.assert_array_equal(row[PREFIX], is_prefix & (np.arange(41) < lengths.inputs))
        np.testing.assert_array_equal(row[EXAMPLE], np.arange(41) >= end)
        np.testing.assert_array_equal(row[POSITION], np.arange(41))
        assert set(row[TOKEN, end:]) <= {199}
    np.testing.assert_array_equal(rows[9], rule.corrupt(np.arange(lengths.tokens), 9, VOCABULARY))
    assert len({row.tobytes() for row in rows}) > 40


def test_every_partition_is_equally_likely() -> None:
    lengths = SpanLengths(8, 4, 2)  # 4 tokens of text and 4 of noise in 2 spans each: 3 x 3 partitions
    rule = SpanRule(13, lengths, 0, is_prefix=True)
    counts = Counter(rule.corrupt(np.arange(8), i, VOCABULARY).tobytes() for i in range(900))
    assert len(counts) == 9
    assert 70 < min(counts.values()) <= max(counts.values()) < 130


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy", sentinels=30)
    tokenizer = open_tokenizer(
        "BertWordPieceLowerCase", vocab_file=corpus.with_name("vocab.txt"), vocab_extra_ids=30
    )
    vocabulary = SpanVocabulary.from_tokenizer(tokenizer)
    pieces = tokenizer.pieces([*vocabulary.sentinels, vocabulary.separator])
    assert pieces == [*(f"<extra_id_{i}>" for i in range(30)), "[SEP]"]
    assert SpanVocabulary.from_tokenizer(corpus.with_name("toy.tokenizer")) == vocabulary
    with pytest.raises(ConfigError, match=r"^--noise-density: the tokenizer of the data has no sentinels"):
        SpanVocabulary.from_tokenizer(open_tokenizer("NullTokenizer", vocab_size=9))
    with pytest.raises(ConfigError, match=r"^--tokenizer-type: missing, and no dataset records"):
        SpanVocabulary.from_tokenizer(None)


MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "48"]
TRAINING = ["--global-batch-size", "8", "--micro-batch-size", "8", "--lr", "1e-2", "--lr-decay-style"]
TRAINING += ["constant", "--eval-iters", "1", "--eval-interval", "10", "--log-interval", "10"]
TRAINING += ["--split", "80,20,0", "--train-iters", "20", "--noise-density", "0.15"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a dataset with its tokenizer beside it, which has sentinels."""
    return write_corpus(tmp_path_factory.mktemp("spans") / "toy", sentinels=30)


@pytest.mark.parametrize("command", ["prefix", "gpt"])
def test_a_run_learns_and_validates(corpus: Path, tmp_path: Path, command: str) -> None:
    run = tmp_path / "run"
    run_mega_train(command, "--data-path", str(corpus), *MODEL, *TRAINING, "--save", str(run))
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    assert validations[1]["loss"] < validations[0]["loss"] < np.log(234)
    text = (run / "iter_0000020/run.toml").read_text("utf-8")
    assert "noise_density = 0.15" in text
    assert ("prefix_lm = true" in text) == (command == "prefix")


REFUSED = {
    "--noise-density 1": "--noise-density: out of range: found 1.0, wanted above 0, below 1",
    "--mean-noise-span-length 0.5": "--mean-noise-span-length: out of range: found 0.5, ",
    "--noise-density 0.01": "--noise-density: leaves no whole spans ",
    "--noise-density 0.9 --mean-noise-span-length 1": "--noise-density: leaves no whole spans ",
    "--reweight-loss-based-on-position-frequency": "--reweight-loss-based-on-position-frequency: ",
    "--seq-length 1000 --max-position-embeddings 1000": "--noise-density: the tokenizer of ",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_fit_are_one_line(corpus: Path, tmp_path: Path, words: str) -> None:
    run = tmp_path / "run"
    data = ["--data-path", str(corpus), "--save", str(run)]
    _, err = run_mega_train("prefix", *data, *MODEL, *TRAINING, *words.split(), code=2)
    assert REFUSED[words] in err
    assert "Traceback" not in err
    assert not run.exists()


def test_a_span_length_needs_a_density(corpus: Path) -> None:
    words = ["--data-path", str(corpus), *MODEL, *TRAINING[:-2], "--mean-noise-span-length", "3"]
    _, err = run_mega_train("gpt", *words, code=2)
    assert err.splitlines()[-1] == (
        "error: --mean-noise-span-length: needs --noise-density: found 3.0; hint: --noise-density 0.15, or "
        "leave it out"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "data__reset_attention_mask",
            "--reset-attention-mask: does not apply to span corruption: a sample is",
        ),
        (
            "data__reset_position_ids",
            "--reset-position-ids: does not apply to span corruption: a sample is one",
        ),
        (
            "data__eod_mask_loss",
            "--eod-mask-loss: does not apply to span corruption: only the spans of noise",
        ),
        ("data__sft", "--sft: does not apply to span corruption: it corrupts text, not prompts and answers"),
    ],
)
def test_a_sample_is_text_of_one_document(
    resolve_config: Callable[..., Any], option: str, message: str
) -> None:
    corpus = open_tokenizer("NullTokenizer", vocab_size=32).identity
    assert resolve_config(corpus=corpus, objective__noise_density=0.5).span_rule is not None
    with pytest.raises(ConfigError, match=message):
        resolve_config(corpus=corpus, objective__noise_density=0.5, **{option: True})
