"""A tokenizer trained on counts of words, which tasks write, has the bytes of one trained on the text."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from mega_data.cli import commands
from mega_data.tokenizer_counts import count_tasks
from mega_data.tokenizer_counts.byte_pairs import train_byte_pairs, train_reference
from mega_data.tokenizer_counts.kernels import BytePairKernel
from mega_data.tokenizer_counts.word_counts import bert_splitter, byte_level_splitter, split_pieces
from mega_schema.cpp_library import CompileError
from mega_schema.errors import ConfigError, FormatError, MegaError

TEXTS = [
    *(f"the quick brown fox number {n} jumps over\n\n  the lazy dogs, don't it?" for n in range(60)),
    *(f"Straße İstanbul'da, naïve café no. {n}! 日本語のテキスト\u3000です。" for n in range(60)),
    "",
    "a\x0bb \x1cc\x85d \t\r\n \u00a0e \u2028f",
]


def write_inputs(folder: Path) -> None:
    """A file of several ranges, a list of sentences, and small files."""
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "large.jsonl").write_text("".join(lines) * 110)
    for number in range(5):
        (folder / f"small-{number}.jsonl").write_text("".join(random.Random(number).choices(lines, k=9)))
    (folder / "sentences.jsonl").write_text(json.dumps({"text": TEXTS[-30:]}) + "\n")


def run(*words: object) -> str:
    result = CliRunner().invoke(commands, ["train-tokenizer", *map(str, words)], catch_exceptions=True)
    if isinstance(result.exception, MegaError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["bpe", "wordpiece --lowercase"])
def test_a_run_in_tasks_writes_the_bytes_of_one_process(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_tasks, "FAN_IN", 2)
    write_inputs(tmp_path / "in")
    words = ["--input", tmp_path / "in", "--vocab-size", 600, "--type", *kind.split(), "--output"]
    run(*words, tmp_path / "one")
    for name, *options in (
        ("tasks", "--executor", "local", "--split-mb", "1"),
        ("small-memory", "--workers", "2", "--memory", "1", "--split-mb", "100", "--min-frequency", "1"),
    ):
        run(*words, tmp_path / name, *options)
        assert contents(tmp_path / name) == contents(tmp_path / "one"), name
    array = (*words, tmp_path / "array", "--split-mb", "1")
    run(*array, "--stage", "plan")
    for stage in ("count:1", "count", "merge", "merge-2"):
        run(*array, "--stage", stage)
    assert [path.name for path in (tmp_path / "array").iterdir()] == [".work"]
    run(*array)
    assert contents(tmp_path / "array") == contents(tmp_path / "one")


def test_the_counts_in_a_work_folder_serve_for_other_sizes(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    words = ["--input", tmp_path / "in", "--work-dir", tmp_path / "work", "--output", tmp_path / "out"]
    run(*words, "--vocab-size", 400)
    marker = tmp_path / "work/done/count/00000.json"
    counted_at = marker.stat().st_mtime_ns
    run(*words, "--vocab-size", 500, "--min-frequency", 2)
    assert marker.stat().st_mtime_ns == counted_at
    assert json.loads((tmp_path / "out/identity.json").read_bytes())["vocab_size"] > 400


def test_rare_words_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "aa aa bb bb cc"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "aa aa bb bb"}\n')
    sizes = ["--type", "wordpiece", "--vocab-size", "20", "--output"]
    run("--input", tmp_path / "a.jsonl", *sizes, tmp_path / "a", "--min-frequency", 2)
    run("--input", tmp_path / "b.jsonl", *sizes, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_after_a_wrong_line_only_its_task_runs_again(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    wrong = tmp_path / "in/wrong.jsonl"
    wrong.write_text('{"text": "a"}\n{"text": 5}\n')
    words = ["--input", tmp_path / "in", "--executor", "local", "--output", tmp_path / "out"]
    with pytest.raises(FormatError, match=r"wrong.jsonl:2: "):
        run(*words)
    markers = sorted((tmp_path / "out/.work/done/count").iterdir())
    times = {path: path.stat().st_mtime_ns for path in markers}
    assert times
    wrong.write_text('{"text": "a"}\n')
    before = {path: path.stat().st_mtime_ns for path in markers}
    assert before == times
    run(*words)
    run("--input", tmp_path / "in", "--output", tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_options_that_do_not_fit_tasks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    words = ["--input", tmp_path / "a.jsonl", "--output", tmp_path / "out"]
    with pytest.raises(ConfigError, match="^--workers: does not fit --type unigram: SentencePiece trains on"):
        run(*words, "--type", "unigram", "--workers", 2)
    with pytest.raises(ConfigError, match="^--max-documents: does not fit --executor; hint: leave it out"):
        run(*words, "--executor", "local", "--max-documents", 1)
    with pytest.raises(ConfigError, match="^--input: stdin cannot be divided into tasks"):
        run("--input", "-", "--output", tmp_path / "out", "--executor", "local")
    with pytest.raises(ConfigError, match="^--work-dir: is --output"):
        run(*words, "--work-dir", tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="^--input: contains no text"):
        run("--input", tmp_path / "empty.jsonl", "--output", tmp_path / "out", "--executor", "local")


def library_merges(text: str, vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, special_tokens=["ab"])
    library.train_from_iterator([text], trainer)
    model = json.loads(library.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


@settings(max_examples=150, deadline=None)
@given(
    counts=st.dictionaries(st.text("abc", min_size=1, max_size=14), st.integers(1, 5), min_size=1),
    vocab_size=st.integers(3, 40),
)
@example(counts={"ababab": 2, "aaaa": 1, "abab": 3}, vocab_size=20)  # `ab` is a special token too
def test_merges_on_counts_are_those_of_the_library_on_text(counts: dict[str, int], vocab_size: int) -> None:
    tokens = ["ab", *sorted({letter for word in counts for letter in word})]
    numbers = {token: number for number, token in enumerate(tokens)}
    words = sorted(counts)
    arrays = (
        np.array([numbers[letter] for word in words for letter in word], np.int32),
        np.cumsum([len(word) for word in words], dtype=np.int64),
        np.array([counts[word] for word in words], np.int64),
    )
    text = " ".join(word for word in words for _ in range(counts[word]))
    assert train_byte_pairs(tokens, *arrays, vocab_size) == library_merges(text, vocab_size)
    try:
        kernel = BytePairKernel()
    except CompileError as error:
        pytest.skip(f"no kernel in C++ here: {error}")
    assert kernel.train(tokens, *arrays, vocab_size) == train_reference(tokens, *arrays, vocab_size)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("aZ9é'!. \n\t\x0b\x1c\x85\u00a0\u2028\u3000ß我İ\u0301\u200b\U0001f600st"))
)
def test_pieces_of_a_text_have_its_words(text: str) -> None:
    normalizer = normalizers.BertNormalizer(lowercase=True)
    whole = [word for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    normalized = normalizer.normalize_str(text)
    bert = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalized)]
    for split, wanted in ((byte_level_splitter(), whole), (bert_splitter(lowercase=True), bert)):
        words = [word for piece in split_pieces(text) for word in split(piece)] if text else []
        assert Counter(words) == Counter(wanted)
        assert words == wanted
