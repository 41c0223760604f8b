import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mega_eval import metrics, result
from mega_eval.models.interface import ModelIdentity
from mega_eval.result import Provenance
from mega_eval.task_result import Example, TargetToken, TaskResult
from mega_schema.errors import ConfigError

EXAMPLES = [
    Example(
        id="1",
        prompt="a b",
        expected="c",
        prediction="d",
        scores={"correct": 0.0},
        tokens=(TargetToken("c", -1.5, False),),
    )
]
MODEL = ModelIdentity(
    source="run", sha256="0123456789", tokenizer_sha256="f", iteration=7, dtype="float32", device="cpu"
)


def build_record():
    task_result = TaskResult(
        task="lambada",
        convention="strict",
        metrics={
            "accuracy": metrics.proportion([True, False], "right ones", example_score="correct"),
            "loss": metrics.mean([1.0], "nats"),
            "f1": metrics.mean([0.4, 0.6] * 50, "overlap", higher_is_better=True),
        },
        counts={"passages": 2000},
        tokens_read=300,
    )
    provenance = Provenance(
        model=MODEL, data=[], options={"a": 1}, versions={"torch": "2"}, command=("mega-eval",), date="d"
    )
    return result.build_record(task_result, provenance, seconds=2.0)


def test_a_result_read_back_is_what_was_written(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("an older result")
    result.write_result(path, build_record(), EXAMPLES)
    read = json.loads(path.read_bytes())
    samples = (tmp_path / "r.samples.jsonl").read_bytes()
    digest = hashlib.sha256(samples).hexdigest()
    assert read.pop("samples") == {"file": "r.samples.jsonl", "sha256": digest}
    assert read == json.loads(json.dumps(build_record()))
    assert read["tokens_per_second"] == 150
    assert read["metrics"]["accuracy"]["interval"][0] < 0.5 < read["metrics"]["accuracy"]["interval"][1]
    assert json.loads(samples)["tokens"] == [{"text": "c", "logprob": -1.5, "is_greedy": False}]


def test_a_write_that_is_interrupted_leaves_the_older_result(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("an older result")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        result.write_result(path, build_record(), EXAMPLES)
    assert path.read_text() == "an older result"
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_a_result_is_replaced_only_on_demand(tmp_path):
    path = tmp_path / "r.json"
    result.write_result(path, build_record(), EXAMPLES)
    with pytest.raises(
        ConfigError, match=r"a result of this name exists: found .*r.json; hint: .*--overwrite"
    ):
        result.check_writable(path)
    result.check_writable(path, overwrite=True)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="did not write"):
        result.check_writable(path, overwrite=True)


def test_the_default_name_has_task_convention_model_and_dtype():
    name = result.default_output("lambada", "strict", MODEL, [])
    assert name == Path("lambada-strict-01234567-float32.json")
    server = replace(MODEL, dtype="of the server")
    assert result.default_output("lambada", "strict", server, []) == Path("lambada-strict-01234567.json")


def test_a_second_data_file_gets_a_default_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [{"sha256": letter * 64} for letter in "abc"]
    name = result.default_output("mnli", "accuracy", MODEL, files[:1])
    result.write_result(name, {**build_record(), "data": files[:1]}, EXAMPLES)
    assert result.default_output("mnli", "accuracy", MODEL, files[:1]) == name, "which is then refused"
    second = result.default_output("mnli", "accuracy", MODEL, files[1:2])
    assert second == Path("mnli-accuracy-01234567-float32-bbbbbbbb.json")
    pair = result.default_output("mnli", "accuracy", MODEL, files[1:])
    assert pair not in (name, second)
    name.write_text("[]")
    assert result.default_output("mnli", "accuracy", MODEL, files[1:2]) == name, "which is then refused"


def test_examples_replace_no_file_that_has_none(tmp_path):
    samples = tmp_path / "r.samples.jsonl"
    samples.write_text("notes\n")
    with pytest.raises(ConfigError, match=r"--output: is a file .* did not write: found .*r\.samples\.jsonl"):
        result.check_writable(tmp_path / "r.json", overwrite=True)
    result.write_result(tmp_path / "r.json", build_record(), EXAMPLES)
    (tmp_path / "r.json").unlink()  # as a run that was killed between the two files leaves them
    result.check_writable(tmp_path / "r.json")


@pytest.mark.parametrize("name", ["u", "u.txt", "u.JSON"])
def test_an_output_that_is_not_named_json_is_refused(tmp_path, name):
    with pytest.raises(
        ConfigError, match=rf"not the name of a result: .*{name}, wanted NAME\.json; hint"
    ) as error:
        result.check_writable(tmp_path / name)
    assert str(error.value).endswith(f"--output {tmp_path / name}.json")


def test_a_folder_in_which_no_file_can_be_created_is_refused_whatever_its_mode():
    with pytest.raises(ConfigError, match="--output: no file can be created in the folder: found /proc "):
        result.check_writable(Path("/proc/r.json"))


def test_the_table_has_every_metric_and_count_in_columns():
    lines = result.format_table(build_record()).splitlines()
    assert lines[0].split()[:2] == ["accuracy", "0.5000"]
    assert "95 %" in lines[0]
    assert lines[1].split() == ["loss", "1.0000"]
    assert lines[2].endswith("95 % 0.4803 to 0.5197  smallest detectable difference 0.0398")
    assert lines[3].split() == ["passages", "2,000"]


@pytest.mark.parametrize(
    ("metric", "is_shown"),
    [
        (metrics.proportion([True, False], "right"), False),
        (metrics.proportion([True] * 2 + [False], "right"), False),
        (metrics.proportion([True, False] * 50, "right"), True),
        (metrics.mean([1.0, 3.0, 8.0], "nats", higher_is_better=False), False),
        (metrics.mean([1.0, 1.1, 1.2], "nats", higher_is_better=False), True),
        (metrics.exponential(metrics.mean([1.0, 3.0, 8.0], "nats", higher_is_better=False), "exp"), False),
    ],
)
def test_a_difference_larger_than_any_that_is_possible_is_not_shown_as_a_number(metric, is_shown):
    record = {"metrics": {"m": result.describe_metric(metric)}, "counts": {}, "seconds": 1.0}
    line = result.format_table({**record, "tokens_per_second": 2.0}).splitlines()[0]
    assert ("smallest detectable difference" in line) == is_shown
    assert (f"no difference is detectable with {metric.count} examples" in line) == (not is_shown)
    assert record["metrics"]["m"]["detectable"] == metric.detectable


def test_a_huge_perplexity_does_not_widen_the_table():
    metric = metrics.exponential(metrics.mean([600.0, 650.0], "nats"), "exp")
    record = {"metrics": {"perplexity": result.describe_metric(metric)}, "counts": {}, "seconds": 1.0}
    table = result.format_table({**record, "tokens_per_second": 2.0})
    assert "2.7168e+271" in table
    assert max(map(len, table.splitlines())) < 110
