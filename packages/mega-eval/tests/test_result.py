import json

import pytest

from mega_eval import result
from mega_eval.result import Provenance, TaskResult


def build_record(tmp_path):
    task_result = TaskResult("lambada", {"accuracy": 0.5}, {"correct": 1, "passages": 2000}, tokens_read=300)
    provenance = Provenance(tmp_path, 7, [], {"a": 1}, {"torch": "2"}, "cpu")
    return result.build_record(task_result, provenance, seconds=2.0)


def test_a_result_read_back_is_what_was_written(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("an older result")
    result.write_record(path, build_record(tmp_path))
    assert json.loads(path.read_bytes()) == build_record(tmp_path)
    assert build_record(tmp_path)["tokens_per_second"] == 150
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_a_write_that_is_interrupted_leaves_the_older_result(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("an older result")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        result.write_record(path, build_record(tmp_path))
    assert path.read_text() == "an older result"
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_the_table_has_every_score_and_count_in_two_columns(tmp_path):
    lines = result.format_table(build_record(tmp_path)).splitlines()
    assert lines[0].split() == ["accuracy", "0.5000"]
    assert lines[2].split() == ["passages", "2,000"]
    assert len({len(line) for line in lines}) == 1
