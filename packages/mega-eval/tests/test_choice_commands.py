"""The commands of the multiple-choice tasks, on a checkpoint with a tokenizer of bytes."""

import gzip
import json

import pytest

from mega_eval.cli import cli
from mega_eval.presets.choice_presets import CHOICE_PRESETS
from mega_schema.app import cli_runner
from mega_schema.spec import gpt
from tests.evaluation.choice_rows import ROWS, write_rows
from tests.serving.random_checkpoint import open_byte_tokenizer, save_random_checkpoint


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """A run whose model reads 512 bytes."""
    folder = tmp_path_factory.mktemp("choices")
    open_byte_tokenizer(folder).save(folder / "tokenizer")
    spec = gpt(layers=1, hidden=16, heads=2, vocab=258, max_seq_len=512)
    save_random_checkpoint(folder / "run", spec, folder / "tokenizer")
    return folder / "run"


@pytest.fixture
def call(tmp_path, text_run, capsys, monkeypatch):
    """A function that runs a command in an empty folder; returns exit code, stdout, stderr, name, result."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(command, *words):
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(
                cli, [command, "--load", str(text_run), "--device", "cpu", *map(str, words)]
            )
        out, err = capsys.readouterr()
        outputs = {path.name: json.loads(path.read_bytes()) for path in folder.glob("*.json")}
        for path in folder.iterdir():
            path.unlink()
        [(name, result)] = outputs.items() or [(None, None)]
        return exit_info.value.code or 0, out, err, name, result

    return run


@pytest.fixture
def data(tmp_path):
    """A function that writes the rows of a task and returns the file."""
    return lambda task, count=8: write_rows(tmp_path / f"{task}.jsonl", [ROWS[task](n) for n in range(count)])


@pytest.mark.parametrize("preset", CHOICE_PRESETS, ids=lambda preset: preset.name)
def test_every_preset_has_a_command_with_all_metrics(call, data, preset):
    formulation = next(iter(preset.readers))
    code, out, err, name, result = call(preset.name, "--data", data(preset.name))
    assert (code, err) == (0, "")
    assert name == f"{preset.name}-{formulation}-{result['model']['sha256'][:8]}.json"
    assert list(result["metrics"])[:6] == [
        "accuracy",
        "accuracy_norm",
        "accuracy_bytes",
        "bits_per_byte",
        "calibration_error",
        "brier",
    ]
    assert result["counts"]["questions"] == 8
    for metric in ("accuracy", "accuracy_norm", "bits_per_byte", "brier"):
        assert result["metrics"][metric]["detectable"] > 0
    options = result["options"]
    assert (options["formulation"], options["prompts_of"]) == (formulation, preset.sources[formulation])
    assert "bits per byte" in out


def test_the_convention_names_formulation_and_examples(call, data):
    file = data("arc")
    options = ("--formulation", "letters", "--num-fewshot", 2, "--fewshot-seed", 7, "--name", "arc_easy")
    _, _, _, name, result = call("arc", "--data", file, *options)
    assert (result["task"], result["convention"]) == ("arc_easy", "letters-2shot-shared7")
    assert name.startswith("arc_easy-letters-2shot-shared7-")
    assert result["counts"]["fewshot_examples"] == 2
    first = call("arc", "--data", file, "--num-fewshot", 2, "--fewshot-sampler", "first")[4]
    assert first["convention"] == "continuation-2shot"


def test_the_files_of_questions_and_examples_are_in_the_result(call, data, tmp_path):
    examples = write_rows(tmp_path / "train.jsonl", [ROWS["piqa"](n) for n in range(20, 26)])
    result = call("piqa", "--data", data("piqa"), "--num-fewshot", 3, "--fewshot-data", examples)[4]
    assert [file["path"].rpartition("/")[2] for file in result["data"]] == ["piqa.jsonl", "train.jsonl"]


def test_limit_is_marked_and_takes_the_first_questions(call, data):
    code, out, _, _, result = call("qqp", "--data", data("qqp"), "--limit", 3)
    assert (code, result["counts"]["questions"], result["publishable"]) == (0, 3, False)
    assert "not publishable" in out


def test_a_choice_task_does_not_depend_on_the_batch_size(call, data):
    file = data("hellaswag")
    single, batched = (
        call("hellaswag", "--data", file, "--num-fewshot", 1, "--micro-batch-size", size)[4]
        for size in (1, 13)
    )
    assert single["metrics"]["accuracy"] == batched["metrics"]["accuracy"]
    for metric in ("bits_per_byte", "brier"):
        pair = [result["metrics"][metric]["value"] for result in (single, batched)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-5)


def test_a_question_longer_than_the_context_is_cut_and_counted(call, tmp_path):
    rows = [{**ROWS["boolq"](n), "passage": "word " * 200 * n} for n in range(3)]
    result = call("boolq", "--data", write_rows(tmp_path / "long.jsonl", rows))[4]
    assert result["counts"]["questions_cut"] == 2


def test_a_file_of_your_own_is_evaluated(call, data):
    code, _, _, name, result = call("choice", "--data", data("choice"), "--prompt", "Q: {question}\\nA:")
    assert (code, result["task"]) == (0, "choice")
    assert result["options"]["prompt"] == "Q: {question}\nA:"
    assert result["metrics"]["accuracy"]["count"] == 8
    assert name.startswith("choice-continuation-")


def test_the_published_file_is_recognised_also_uncompressed(call, shared, tmp_path):
    file = shared / "data/eval/boolq/boolq.validation.jsonl.gz"
    plain = tmp_path / "renamed.jsonl"
    plain.write_bytes(gzip.decompress(file.read_bytes()))
    for path in (file, plain):
        _, out, _, _, result = call("boolq", "--data", path, "--limit", 2)
        assert result["options"]["canonical_data"] is True
        assert "published file" not in out
    plain.write_bytes(plain.read_bytes() + b"\n")
    _, out, _, _, result = call("boolq", "--data", plain, "--limit", 2)
    assert result["options"]["canonical_data"] is False
    assert "not the published file of boolq" in out


def test_no_hash_is_claimed_where_none_is_known(call, data):
    assert call("piqa", "--data", data("piqa"))[4]["options"]["canonical_data"] is None


def check_error(outcome, *parts):
    code, out, err, name, _ = outcome
    assert (code, out, name) == (2, "", None)
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_mistakes_are_one_line_and_leave_no_file(call, data, tmp_path):
    file = data("piqa", 3)
    check_error(call("piqa", "--data", tmp_path / "none.jsonl"), "none.jsonl: no such file")
    check_error(call("piqa", "--data", tmp_path), "is a folder")
    check_error(call("boolq", "--data", file), "piqa.jsonl:1: no key 'passage'")
    check_error(
        call("piqa", "--data", file, "--num-fewshot", 3), "--num-fewshot: too few examples", "at most 2"
    )
    check_error(call("piqa", "--data", file, "--name", "a/b"), "--name: cannot be part of a file name")
    check_error(call("choice", "--data", file, "--prompt", "{goal}"), "piqa.jsonl:1: no key 'choices'")
    (tmp_path / "empty.jsonl").write_text("\n")
    check_error(call("piqa", "--data", tmp_path / "empty.jsonl"), "empty.jsonl: no records in the file")
    options = ("--num-fewshot", 1, "--fewshot-data", tmp_path / "empty.jsonl")
    check_error(call("piqa", "--data", file, *options), "empty.jsonl: no records in the file")
