"""The data flags of Megatron's scripts, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_schema.errors import ConfigError
from mega_train.config import DataConfig
from mega_train.data.blend_spec import FractionRange, SplitFraction, SplitSource, parse_data_spec


def _data(**values: Any) -> DataConfig:
    """Words apart by spaces, but for BigScience's groups."""
    words = ("path", "train_path", "valid_path", "test_path")
    return DataConfig(**{key: tuple(v.split()) if key in words else v for key, v in values.items()})


def _prefixes(source: SplitSource) -> list[str]:
    return [str(part.prefix) for part in source.parts]


def _refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_data_spec(_data(**values))
    return str(caught.value)


def test_one_dataset_is_cut_in_three() -> None:
    spec = parse_data_spec(_data(path="P"))
    assert [source.name for source in spec] == ["training", "validation", "test"]
    for use, source in enumerate(spec):
        assert (_prefixes(source), source.weights) == (["P"], None)
        assert source.parts[0].fraction == SplitFraction("969, 30, 1", "mcore", use)
    ranges = [source.parts[0].fraction.sequence_range(1000) for source in spec]
    assert ranges == [(0, 969), (969, 999), (999, 1000)]


def test_a_share_of_nothing_is_no_use() -> None:
    spec = parse_data_spec(_data(path="P", split="90,0,10"))
    assert [source.name for source in spec] == ["training", "test"]


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        ("0.3 A 0.7 B", ["A", "B"], (0.3, 0.7)),
        ("1 A", ["A"], (1.0,)),
        ("1e-3 A 2 B/c.d", ["A", "B/c.d"], (1e-3, 2.0)),
        ("A B", ["A", "B"], None),
        ("A B C", ["A", "B", "C"], None),
    ],
)
def test_weights_stand_before_their_datasets(
    words: str, prefixes: list[str], weights: tuple[float, ...] | None
) -> None:
    training = parse_data_spec(_data(path=words)).training
    assert (_prefixes(training), training.weights) == (prefixes, weights)


def test_a_dataset_may_have_a_number_for_a_name(tmp_path: Path) -> None:
    """Megatron core's reading: an odd number of words, or one that is no number, means prefixes alone."""
    (tmp_path / "3.idx").touch()
    training = parse_data_spec(DataConfig(path=(str(tmp_path / "3"), "A"))).training
    assert training.weights is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0.3 A 0.7", "found nothing after A 0.7, wanted a prefix"),
        ("0.3 A B", "found 'B' after 0.3 A, wanted a weight"),
        ("0.3 A O.7 B", "found 'O.7' after 0.3 A, wanted a weight"),
        ("A 0.3 B 0.7", "found 'A' first, wanted a weight"),
        ("0.3 0.7 A B", "found '0.7' after 0.3, wanted a prefix"),
        ("17", "found nothing after 17, wanted a prefix"),
    ],
)
def test_weights_and_datasets_that_do_not_pair_are_told(words: str, message: str) -> None:
    assert _refusal(path=words) == (
        f"--data-path: weights and prefixes do not alternate: {message}; hint: --data-path 0.3 A 0.7 B"
    )


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_is_above_zero(weight: str) -> None:
    assert _refusal(path=f"{weight} A 1 B") == (
        f"--data-path: not a weight: found {weight}, wanted a number above 0"
    )


def test_each_use_has_datasets_of_its_own() -> None:
    spec = parse_data_spec(_data(train_path="0.5 A 0.5 B", valid_path="C"))
    assert [source.name for source in spec] == ["training", "validation"]
    assert spec.training.weights == (0.5, 0.5)
    assert _prefixes(spec.validation[0]) == ["C"]
    assert all(part.fraction == FractionRange() for source in spec for part in source.parts)
    assert spec.training.parts[0].fraction.sequence_range(7) == (0, 7), "whole"


def test_a_file_stands_for_the_words(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("0.3 A\n0.7 'B c'\n")
    training = parse_data_spec(_data(path_file=file)).training
    assert (_prefixes(training), training.weights) == (["A", "B c"], (0.3, 0.7))
    spec_file = tmp_path / "each.json"
    spec_file.write_text(json.dumps({"train": [0.3, "A", "0.7", "B"], "valid": ["C"], "test": None}))
    spec = parse_data_spec(_data(split_paths_file=spec_file))
    assert spec.training.weights == (0.3, 0.7)
    assert (_prefixes(spec.validation[0]), spec.test) == (["C"], ())


def test_bigsciences_groups(tmp_path: Path) -> None:
    spec = parse_data_spec(
        DataConfig(
            train_group=("TRAIN: 0.3 0:0.6 A, 0.7 0:1 B",),
            valid_groups=("ONE: 1 0.6:0.8 A", "TWO: 1 0.6:0.7 A, 3 0.9:1 B"),
        )
    )
    assert [source.name for source in spec] == ["TRAIN", "ONE", "TWO"]
    assert spec.training.weights == (0.3, 0.7)
    assert [part.fraction for part in spec.training.parts] == [FractionRange(0, 0.6), FractionRange(0, 1)]
    assert spec.validation[1].parts[0].fraction.sequence_range(25) == (15, 18), (
        "round(0.6 * 25), round(0.7 * 25): to even"
    )
    assert spec.training.separate_below == 0.95
    assert [source.weights for source in spec.validation] == [None, (1.0, 3.0)], "one alone is no blend"
    file = tmp_path / "groups.txt"
    file.write_text('"ONE: 1 0.6:0.8 A" "TWO: 1 0.6:0.7 A, 3 0.9:1 B"\n')
    repeated_spec = parse_data_spec(
        DataConfig(train_group=("TRAIN: 0.3 0:0.6 A, 0.7 0:1 B",), valid_groups_file=file)
    )
    assert repeated_spec == spec


@pytest.mark.parametrize(
    "group", ["0.3 0:1 A", "T: 0.3 A", "T: x 0:1 A", "T: 0.3 0-1 A", "T: 0.3 0:1 A,", "T:", "T: nan 0:1 A"]
)
def test_a_group_that_is_none_is_told(group: str) -> None:
    assert _refusal(train_group=(group,)).startswith(
        "--train-weighted-split-paths: not a part of a group: found '"
    )


@pytest.mark.parametrize("ends", ["0.6:0.6", "0.8:0.6", "-0.1:1", "0:1.1"])
def test_a_range_of_a_group_is_two_shares(ends: str) -> None:
    assert _refusal(train_group=(f"T: 1 {ends} A",)) == (
        f"--train-weighted-split-paths: not a range: found {ends}, wanted two fractions from 0 to 1, "
        "the smaller first"
    )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {},
            "--data-path: missing: wanted prefix of an indexed dataset; hint: --data-path P",
        ),
        (
            {"path": "P", "train_path": "Q"},
            "--train-data-path: excludes --data-path: found both, wanted only one of them",
        ),
        (
            {"path": "P", "valid_groups": ("V: 1 0:1 A",)},
            "--train-weighted-split-paths: excludes --data-path: found both, wanted only one of them",
        ),
        (
            {"train_path": "P", "split": "1,1,1"},
            "--split: splits the datasets of --data-path, but --train-data-path already defines the splits: "
            "found '1,1,1'; hint: leave --split out",
        ),
        (
            {"valid_path": "P"},
            "--train-data-path: missing: wanted training data; hint: --train-data-path P",
        ),
        (
            {"train_group": ("A: 1 0:1 A", "B: 1 0:1 B")},
            "--train-weighted-split-paths: only one training group is allowed: found 2 groups, "
            "wanted 'NAME: WEIGHT START:END PREFIX, ...'; hint: quotes around the group",
        ),
        (
            {"train_group": ("A: 1 0:1 A",), "valid_groups": ("B: 1 0:1 A", "B: 1 0:1 B")},
            "--valid-weighted-split-paths: two groups of one name: found B",
        ),
    ],
)
def test_what_contradicts_itself_is_told(values: dict[str, Any], line: str) -> None:
    assert _refusal(**values) == line


@pytest.mark.parametrize(
    ("key", "text", "line"),
    [
        ("path_file", "", "{file}: is empty: wanted what would follow --data-path"),
        ("path_file", "A 'B", "{file}: quotes are left open: found No closing quotation"),
        ("path_file", "\udcff", "{file}: is not text: found invalid start byte"),
        ("split_paths_file", "[", "{file}: is not JSON: found Expecting value: line 1 column 2 (char 1)"),
        ("split_paths_file", "[]", "{file}: keys: found list, wanted train, valid and test"),
        ("split_paths_file", '{"dev": []}', "{file}: keys: found dev, wanted train, valid and test"),
        ("split_paths_file", '{"train": "A"}', "{file}: train: not a list of words: found A"),
    ],
)
def test_a_file_that_means_nothing_is_told(tmp_path: Path, key: str, text: str, line: str) -> None:
    file = tmp_path / "words"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert _refusal(**{key: file}) == line.format(file=file)


def test_a_relative_prefix_in_a_file_of_lists_is_beside_it_or_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed").mkdir()
    for name in ("mixed/train_document.idx", "valid_document.idx"):
        (tmp_path / name).touch()
    file = tmp_path / "mixed/blend.json"
    file.write_text(
        json.dumps({"train": [0.3, "train_document", 0.7, "s3://b/x"], "valid": ["valid_document"]})
    )
    spec = parse_data_spec(_data(split_paths_file=Path("mixed/blend.json")))
    assert _prefixes(spec.training) == ["mixed/train_document", "s3://b/x"]
    assert _prefixes(spec.validation[0]) == ["valid_document"]
    (tmp_path / "train_document.idx").touch()
    assert _refusal(split_paths_file=Path("mixed/blend.json")) == (
        "mixed/blend.json: train_document: names two datasets: "
        "found mixed/train_document and train_document; "
        f"hint: write one of them: {tmp_path}/mixed/train_document"
    )
    (tmp_path / "train_document.idx").unlink()
    (tmp_path / "train_document.idx").hardlink_to(tmp_path / "mixed/train_document.idx")
    assert (
        _prefixes(parse_data_spec(_data(split_paths_file=file)).training)[0]
        == f"{tmp_path}/mixed/train_document"
    )


def test_a_file_that_is_missing_or_too_much_is_told(tmp_path: Path) -> None:
    file = tmp_path / "words"
    assert _refusal(path_file=file) == f"--data-args-path: no such file: found {file}"
    file.write_text("A")
    assert _refusal(path="B", path_file=file) == (
        "--data-args-path: excludes --data-path: found both, wanted one of them"
    )
    assert _refusal(train_path="B", split_paths_file=file) == (
        "--per-split-data-args-path: excludes --train-data-path: found both, wanted one of them"
    )
