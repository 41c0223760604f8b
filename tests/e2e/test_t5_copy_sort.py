"""The benchmark of copying and sorting: its data, and a short run over tensor and pipeline parallelism."""

from __future__ import annotations

import json
from pathlib import Path

from bench.t5_copy_sort import LENGTH, main, write_data
from tests.selection import long


def _read(path: Path) -> dict[str, str]:
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return {row["input"]: row["target"] for row in rows}


def test_held_out_permutations_are_new_and_targets_copy_and_sort(tmp_path: Path) -> None:
    write_data(tmp_path, 300, 50, seed=1)
    train, valid = (_read(tmp_path / f"{name}.jsonl") for name in ("train", "valid"))
    assert (len(train), len(valid)) == (300, 50)
    assert not train.keys() & valid.keys()
    for text, target in (train | valid).items():
        copy, ordered = target.split(" | ")
        assert copy == text
        assert ordered.split() == sorted(text.split())
        assert len(set(text.split())) == LENGTH


@long
def test_copying_and_sorting_is_learnt_over_tensor_and_pipeline_parallelism(tmp_path: Path) -> None:
    sizes = ["--train", "9000", "--valid", "100", "--epochs", "3", "--goal", "0.9"]
    assert main(["--folder", str(tmp_path), *sizes, "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert (result["layout"]["tp"], result["layout"]["pp"]) == (2, 2)
