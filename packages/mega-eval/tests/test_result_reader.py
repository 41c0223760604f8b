import copy
import json
import random

import pytest
from click.testing import CliRunner

from mega_eval.cli import cli
from mega_eval.presets.choice_presets import CHOICE_PRESETS
from mega_eval.result import KEYS
from mega_eval.result_reader import load_schema, read_result
from mega_eval.schema_check import find_violations
from mega_schema.errors import CorruptFileError, FormatError
from mega_schema.spec import gpt
from tests.evaluation.choice_rows import ROWS, write_core_bundle, write_rows, write_squad
from tests.result_files import make_examples, write_made_up
from tests.serving.random_checkpoint import open_byte_tokenizer, save_random_checkpoint


@pytest.fixture
def sample_result(tmp_path):
    return write_made_up(tmp_path / "r.json", make_examples([True, False, True]))


def test_a_result_that_was_read_has_its_metrics_and_examples(sample_result):
    assert (sample_result.task, sample_result.convention, sample_result.model_name) == (
        "lambada",
        "strict",
        "a/iter_0000010",
    )
    accuracy = sample_result.metrics["accuracy"]
    assert (accuracy.value, accuracy.count, accuracy.example_score) == (2 / 3, 3, "correct")
    assert accuracy.interval[0] < 2 / 3 < accuracy.interval[1]
    assert sample_result.metrics["perplexity"].max_exponent == 700
    assert sample_result.examples == make_examples([True, False, True])


def test_the_schema_requires_every_key_of_a_result():
    schema = load_schema()
    assert schema["required"] == list(KEYS) == list(schema["properties"])


@pytest.fixture(scope="module")
def task_files(tmp_path_factory):
    """Data of every kind of task, and a run whose tokenizer has bytes for the tasks with letters."""
    folder = tmp_path_factory.mktemp("tasks")
    open_byte_tokenizer(folder).save(folder / "tokenizer")
    spec = gpt(layers=1, hidden=16, heads=2, vocab=258, max_seq_len=256)
    save_random_checkpoint(folder / "text-run", spec, folder / "tokenizer")
    (folder / "data.jsonl").write_text('{"text": "1 2 3 4 5"}\n{"text": "7 8 9"}\n')
    (folder / "wiki.txt").write_text(" ".join(map(str, range(40))))
    for preset in CHOICE_PRESETS:
        write_rows(folder / f"{preset.name}.jsonl", [ROWS[preset.name](n) for n in range(3)])
    write_rows(folder / "choice.jsonl", [ROWS["choice"](n) for n in range(3)])
    write_rows(folder / "nq.jsonl", [{"question": f"who is {n}", "answer": [f"{n}"]} for n in range(3)])
    write_squad(folder / "squad.json")
    write_core_bundle(folder / "core")
    return folder


TASK_WORDS = {
    "lambada": "--data data.jsonl",
    "wikitext103": "--data wiki.txt --overlapping-eval 8",
    "wikitext2": "--data wiki.txt --convention lm-eval --detokenizer none",
    "ptb": "--data wiki.txt --overlapping-eval 8",
    "megatron11b": "--data wiki.txt --context-window 4",
    "perplexity": "--data data.jsonl",
    "main": "--task LAMBADA --valid-data data.jsonl",
    "core": "--data core",
    "nq": "--data nq.jsonl --max-tokens 3 --num-fewshot 1",
    "squad": "--data squad.json --max-tokens 3",
    "choice": "--data choice.jsonl",
    **{preset.name: f"--data {preset.name}.jsonl" for preset in CHOICE_PRESETS},
}
NUMBER_TASKS = ("lambada", "wikitext103", "ptb", "perplexity", "main")


@pytest.mark.parametrize("task", TASK_WORDS)
def test_the_result_of_a_task_satisfies_the_schema(task, task_files, run, tmp_path, monkeypatch):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = load_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    line_validator = jsonschema.Draft202012Validator({"$defs": schema["$defs"], "$ref": "#/$defs/example"})
    monkeypatch.chdir(task_files)
    output = tmp_path / "result.json"
    load = run if task in NUMBER_TASKS else task_files / "text-run"
    words = [task, *TASK_WORDS[task].split(), "--load", str(load), "--output", str(output), "--device", "cpu"]
    CliRunner().invoke(cli, words, catch_exceptions=False)
    validator.validate(json.loads(output.read_bytes()))
    lines = output.with_suffix(".samples.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        line_validator.validate(json.loads(line))
    assert len(read_result(output).examples) == len(lines)


def test_every_task_has_a_result_that_is_compared_with_the_schema():
    tasks = {
        name
        for name, command in cli.commands.items()
        if {"load", "data", "limit"} <= {option.name for option in command.params}
    }
    # tests/evaluation/test_encoder_tasks.py reads the results of classify, which needs a classifier
    assert {*TASK_WORDS, "classify"} == {*tasks, "main"}


def mutate(value, rng):
    """Replace, remove or add one value somewhere in a document."""
    document = copy.deepcopy(value)
    place = document
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        break
    action = rng.randrange(3)
    if action == 0:
        place[key] = rng.choice([None, True, -1, 0, 2.5, "x", "", [], {}, [1, 2], "f" * 64, 2, ["a", 1]])
    elif action == 1:
        del place[key]
    elif isinstance(place, dict):
        place["more"] = 1
    else:
        place.append(rng.choice([1, "x", None]))
    return document


def test_our_validation_agrees_with_the_library_on_wrong_documents(sample_result):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = load_schema()
    rng = random.Random(0)
    wrong = 0
    example = json.loads(sample_result.path.with_suffix(".samples.jsonl").read_text().splitlines()[0])
    example["choices"] = [["a", -1.0], ["b", -2.0]]
    for value, part in ((dict(sample_result.record), schema), (example, schema["$defs"]["example"])):
        validator = jsonschema.Draft202012Validator({**part, "$defs": schema["$defs"]})
        assert validator.is_valid(value)
        for _ in range(150):
            document = mutate(value, rng)
            valid = validator.is_valid(document)
            wrong += not valid
            assert (not any(find_violations(document, part, schema))) == valid, document
    assert wrong > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record.update(format=1),
            r"r\.json: format number: found 1, wanted 2; hint: evaluate",
        ),
        (lambda record: record.pop("model"), r"r\.json: model: missing"),
        (lambda record: record.pop("format"), r"r\.json: is not a result of mega-eval"),
        (lambda record: record["metrics"]["loss"].update(value=None), r"metrics\.loss\.value: not number"),
        (lambda record: record["samples"].update(file="../x"), r"samples\.file: does not match"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_key(sample_result, change, message):
    record = json.loads(sample_result.path.read_bytes())
    change(record)
    sample_result.path.write_text(json.dumps(record))
    with pytest.raises(FormatError, match=message):
        read_result(sample_result.path)


def test_a_file_that_is_no_json_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("{oops")
    for name, message in (("a.json", "not JSON"), ("none.json", "no such file"), ("", "is a folder")):
        with pytest.raises(FormatError, match=message):
            read_result(tmp_path / name)


def test_the_file_of_examples_is_refused_with_the_name_of_its_result(sample_result):
    samples = sample_result.path.with_suffix(".samples.jsonl")
    with pytest.raises(
        FormatError, match=r"has the examples of a result: wanted the result; hint: name r\.json"
    ):
        read_result(samples)


def test_examples_of_another_result_are_refused(sample_result):
    samples = sample_result.path.with_suffix(".samples.jsonl")
    samples.write_bytes(samples.read_bytes() + b"\n")
    with pytest.raises(
        CorruptFileError, match=r"is not the file that was written with r\.json: found sha256"
    ):
        read_result(sample_result.path).examples  # noqa: B018
    samples.unlink()
    with pytest.raises(FormatError, match=r"samples\.jsonl: no such file: wanted the examples of r\.json"):
        read_result(sample_result.path).examples  # noqa: B018
