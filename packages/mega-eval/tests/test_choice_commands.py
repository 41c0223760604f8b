"""The commands of choices, generated answers and CORE, on a checkpoint with a tokenizer of bytes."""

import gzip
import hashlib
import json
import subprocess
import sys

import pytest

from mega_eval.cli import cli
from mega_eval.presets.choice_presets import CHOICE_PRESETS
from mega_schema.app import cli_runner
from mega_schema.spec import gpt
from tests.evaluation.choice_rows import ROWS, write_core_bundle, write_rows, write_squad
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
    assert name == f"{preset.name}-{formulation}-{result['model']['sha256'][:8]}-float32.json"
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


@pytest.mark.parametrize("task", ["piqa", "choice", "nq", "squad", "core"])
def test_the_file_is_an_argument_or_an_option(call, data, tmp_path, task):
    if task == "squad":
        file = write_squad(tmp_path / "squad.json")
    elif task == "core":
        file = write_core_bundle(tmp_path / "core")
    elif task == "nq":
        file = write_rows(tmp_path / "nq.jsonl", [{"question": "who is it", "answer": ["one"]}])
    else:
        file = data(task)
    words = ["--max-tokens", 2] if task in ("nq", "squad") else []
    argument = call(task, file, *words)
    option = call(task, "--data", file, *words)
    assert argument[:1] + argument[2:4] == option[:1] + option[2:4] == (0, "", option[3])
    assert argument[4]["metrics"] == option[4]["metrics"]
    check_error(call(task), "--data: missing", "hint: add --data FILE")
    check_error(call(task, file, "--data", tmp_path), "--data: more than one file")


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
        call("piqa", "--data", file, "--num-fewshot", 9999),
        "piqa.jsonl has 3 examples, 2 without the question itself: found 9999, wanted at most 2",
    )
    check_error(call("piqa", "--data", file, "--name", "a/b"), "--name: cannot be part of a file name")
    check_error(call("choice", "--data", file, "--prompt", "{goal}"), "piqa.jsonl:1: no key 'choices'")
    (tmp_path / "empty.jsonl").write_text("\n")
    check_error(call("piqa", "--data", tmp_path / "empty.jsonl"), "empty.jsonl: no records in the file")
    options = ("--num-fewshot", 1, "--fewshot-data", tmp_path / "empty.jsonl")
    check_error(call("piqa", "--data", file, *options), "empty.jsonl: no records in the file")


def test_nq_generates_answers_after_its_examples(call, tmp_path):
    rows = [{"question": f"who is {n}", "answer": [f"{n}"]} for n in range(4)]
    file = write_rows(tmp_path / "nq.jsonl", rows)
    code, out, err, name, result = call("nq", "--data", file, "--max-tokens", 4, "--num-fewshot", 2)
    assert (code, err) == (0, "")
    assert name.startswith("nq-generation-2shot-shared1234-")
    assert list(result["metrics"]) == ["exact_match", "f1", "exact_match_harness"]
    assert result["counts"]["questions"] == 4
    assert (result["options"]["max_tokens"], result["options"]["stop"]) == (4, ["\n", ".", ","])
    assert result["options"]["canonical_data"] is False
    assert "not the published file of nq" in out
    outcome = call("nq", "--data", file, "--max-tokens", 512)
    check_error(outcome, "--max-tokens: the model's context has no room for a prompt", "wanted less than 512")


@pytest.mark.parametrize("prompt", ["{question", "", "Q: {}"])
def test_a_prompt_without_a_key_is_refused(call, data, prompt):
    check_error(
        call("choice", "--data", data("choice"), "--prompt", prompt),
        f"--prompt: names no key of a record: found {prompt!r}, wanted {{KEY}} where its text belongs",
    )


def test_squad_reads_passages_and_takes_a_prompt(call, tmp_path):
    file = write_squad(tmp_path / "squad.json")
    prompt = "{context}\\nFrage: {question}\\nAntwort:"
    options = (
        "--max-tokens",
        4,
        "--num-fewshot",
        1,
        "--fewshot-data",
        file,
        "--limit",
        2,
        "--prompt",
        prompt,
    )
    _, _, _, name, result = call("squad", "--data", file, *options, "--name", "squad_de")
    assert name.startswith("squad_de-generation-1shot-shared1234-")
    assert result["options"]["prompt"] == "{context}\nFrage: {question}\nAntwort:"
    assert result["counts"]["questions_without_answer"] == 0
    assert (result["counts"]["questions"], result["publishable"]) == (2, False)
    check_error(call("squad", "--data", file, "--prompt", "{passage}"), "no key 'passage'")


def test_core_reports_the_mean_and_each_task(call, tmp_path):
    folder = write_core_bundle(tmp_path / "bundle")
    code, out, err, name, result = call("core", "--data", folder)
    assert (code, err) == (0, "")
    assert name.startswith("core-nanochat-")
    labels = ("multiple_choice", "schema", "language_modeling")
    assert list(result["metrics"]) == [
        "core",
        *(f"centered_{x}" for x in labels),
        *(f"accuracy_{x}" for x in labels),
    ]
    assert result["metrics"]["core"]["stderr"] > 0
    assert result["counts"] == {"tasks": 3, "questions": 18, "questions_cut": 0}
    assert len(result["data"]) == 5
    limited = call("core", "--data", folder, "--limit", 3)[4]
    assert (limited["counts"]["questions"], limited["publishable"]) == (9, False)
    check_error(call("core", "--data", tmp_path / "none"), "none: no such folder", "core.yaml")


def list_tasks(capsys, *words):
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, ["tasks", *words])
    assert not exit_info.value.code
    return capsys.readouterr().out


def test_tasks_lists_every_command_that_evaluates_a_file(capsys):
    rows = json.loads(list_tasks(capsys, "--json"))
    evaluating = {
        name
        for name, command in cli.commands.items()
        if {"load", "data", "limit"} <= {option.name for option in command.params}
    }
    assert {row["name"] for row in rows} == evaluating
    text = list_tasks(capsys)
    for row in rows:
        assert f"\n{row['name']}\n" in f"\n{text}"
        assert all(row[key] for key in ("metrics", "wants", "conventions"))


def test_tasks_lists_the_hashes_of_the_published_files(capsys, shared):
    rows = {row["name"]: row["files"] for row in json.loads(list_tasks(capsys, "--json"))}
    files = {
        "lambada": "lambada/lambada_test.jsonl",
        "wikitext103": "wikitext-103/wiki.test.tokens",
        "boolq": "boolq/boolq.validation.jsonl.gz",
        "cosmosqa": "cosmosqa/valid.csv.gz",
        "nq": "nq-open/nq_open.validation.jsonl.gz",
    }
    for task, name in files.items():
        content = (shared / "data/eval" / name).read_bytes()
        content = gzip.decompress(content) if name.endswith(".gz") else content
        assert [file["sha256"] for file in rows[task]] == [hashlib.sha256(content).hexdigest()]
    assert rows["piqa"] == []
    assert "any: no hash of a published file is known" in list_tasks(capsys)


def test_help_of_a_preset_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from mega_eval.cli import cli; cli(['mmlu', '--help'], standalone_mode=False);"
        "cli(['tasks'], standalone_mode=False);"
        "print([name for name in ('torch', 'numpy', 'yaml', 'tokenizers') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.rstrip().endswith("[]")
