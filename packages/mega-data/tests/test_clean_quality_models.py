"""FineWeb's quality rules, and fastText classifiers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from mega_data.clean.registry import step_from_flag
from mega_data.clean.step import Row
from mega_schema.errors import ConfigError

SENTENCE = "This is a line of text that has more than thirty characters"


def apply_step(flag: str, text: str) -> str:
    """Return the reason to drop the text, or keep."""
    verdict = step_from_flag(flag).step.start()(Row({"text": text}, "text", 0, 1))
    return verdict if isinstance(verdict, str) else "keep"


def number_lines(count: int, ending: str = ".") -> list[str]:
    return [f"{SENTENCE} {number}{ending}" for number in range(count)]


@pytest.mark.parametrize(
    ("options", "text", "wanted"),
    [
        ("", " \n\t\n", "empty"),
        ("", "\n".join(number_lines(9)), "keep"),
        ("", "\n".join(number_lines(9, "")), "line_punct_ratio"),
        ("line_punct_exclude_zero=true", "\n".join(number_lines(9, "")), "keep"),
        ("", "\n".join([*number_lines(8, ""), *number_lines(1)]), "line_punct_ratio"),
        ("", "\n".join([*number_lines(7, ""), *number_lines(1)]), "keep"),
        ("line_punct_thr=0.2", "\n".join([*number_lines(7, ""), *number_lines(1)]), "line_punct_ratio"),
        ("", "\n".join(number_lines(3, "。")), "keep"),
        ("stop_chars=!+?", "\n".join(number_lines(3)), "line_punct_ratio"),
        ("", "\n".join(f"Short line {n}." for n in range(9)), "short_line_ratio"),
        ("short_line_length=5", "\n".join(f"Short line {n}." for n in range(9)), "keep"),
        ("short_line_thr=1", "\n".join(f"Short line {n}." for n in range(9)), "keep"),
        ("", "\n".join([SENTENCE + "."] * 2), "char_dup_ratio"),
        ("char_duplicates_ratio=0.5", "\n".join([SENTENCE + "."] * 2), "keep"),
        ("", "\n\n\n\n".join(f"{'x' * 40}{n}." for n in range(9)), "list_ratio"),
        ("new_line_ratio=2", "\n\n\n\n".join(f"{'x' * 40}{n}." for n in range(9)), "keep"),
        # punctuation counts as words: 2 line breaks for 3 words and 6 signs
        ("short_line_thr=1,new_line_ratio=0.25", "(one)!\n(two)!\n(three)!", "keep"),
    ],
)
def test_finewebs_rules_have_datatroves_names_and_limits(options: str, text: str, wanted: str) -> None:
    assert apply_step(f"fineweb-quality:{options}", text) == wanted


def test_a_value_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"line_punct_exclude_zero: wrong value: found 'yes', wanted true"):
        step_from_flag("fineweb-quality:line_punct_exclude_zero=yes")


def write_model(path: Path, words: Mapping[str, tuple[float, float]]) -> Path:
    """Write a fastText classifier of two labels: good for the first number of a word, bad for the second."""
    labels = {"good": (4.0, 0.0), "bad": (0.0, 4.0)}
    options = (2, 5, 1, 1, 0, 1, 3, 3, 0, 0, 0, 100)  # dimension 2, softmax, supervised, no subwords
    data = struct.pack("<2i12id", 793712314, 12, *options, 0.0001)
    data += struct.pack("<3i2q", len(words) + len(labels), len(words), len(labels), len(words), -1)
    for word in words:
        data += word.encode() + b"\0" + struct.pack("<qb", 1, 0)
    for label in labels:
        data += f"__label__{label}".encode() + b"\0" + struct.pack("<qb", 1, 1)
    for rows in (words, labels):
        data += struct.pack("<?2q", False, len(rows), 2)
        data += b"".join(struct.pack("<2f", *row) for row in rows.values())
    path.write_bytes(data)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("fasttext")
    return write_model(tmp_path / "quality.bin", {"nice": (1.0, 0.0), "awful": (0.0, 1.0)})


def test_a_classifier_keeps_or_drops_by_label_and_score(model: Path) -> None:
    flag = f"classifier:model={model}"
    assert apply_step(f"{flag},keep=good", "nice\nday") == "keep"
    assert apply_step(f"{flag},keep=good", "awful day") == "below 0.5 of good"
    assert apply_step(f"{flag},keep=good,score=0.99", "nice day") == "below 0.99 of good"
    assert apply_step(f"{flag},keep=good+bad", "awful day") == "keep"
    assert apply_step(f"{flag},keep=good", "unknown words") == "below 0.5 of good"
    assert apply_step(f"{flag},drop=bad", "awful day") == "is bad"
    assert apply_step(f"{flag},drop=bad", "unknown words") == "keep"
    row = Row({"text": "nice \ud800 day"}, "text", 0, 1)
    (result,) = step_from_flag(f"{flag},store=quality").step.start()(row)
    assert list(result.values["quality"]) == ["good", "bad"]
    assert result.values["quality"]["good"] == pytest.approx(0.982, abs=0.001)


def test_a_language_model_reads_text_without_utf8(model: Path) -> None:
    (result,) = step_from_flag(f"language:model={model}").step.start()(
        Row({"text": "nice \ud800"}, "text", 0, 1)
    )
    assert result.values["language"] == "good"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "model: missing"),
        ("model=missing.bin", "model: no such file"),
        ("model={model}", "no label: wanted keep | drop | store"),
        ("model={model},keep=good,drop=bad", "drop: has no effect with keep"),
        ("model={model},keep=godo", "keep: no such label: found godo; hint: did you mean good?"),
        ("model={other},keep=good", "model: not a fastText model"),
    ],
)
def test_a_mistake_in_a_classifier_is_answered(model: Path, options: str, message: str) -> None:
    (model.parent / "other.bin").write_bytes(b"no model")
    flag = f"classifier:{options.format(model=model, other=model.parent / 'other.bin')}"
    with pytest.raises(ConfigError) as error:
        step_from_flag(flag).step.start()
    assert message in str(error.value)
