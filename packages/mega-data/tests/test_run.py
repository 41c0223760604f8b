"""A pipeline runs the commands of its stages in order, and each again only if something has changed."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.stage_graph import stage_runs
from mega_data.stage_graph.pipeline_file import read_pipeline
from mega_data.stage_graph.pipeline_page import render_pipeline
from mega_schema.app.cli_runner import run_command
from mega_schema.errors import ConfigError

PIPELINE = """
output = "corpus"

[[stage]]
name = "ids"
command = "preprocess"
input = "{unique}"
tokenizer-type = "NullTokenizer"
vocab-size = 100
append-eod = true

[[stage]]
name = "text"
command = "clean"
input = "raw/*.jsonl"
step = ["whitespace", "length:minimum=4"]

[[stage]]
name = "unique"
command = "dedup"
input = "{text}"
preset = "exact"

[[stage]]
name = "mixed"
command = "mix"
data-path = [1, "{ids}"]
split = "1"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    for name in ("a", "b"):
        texts = [f"{number % 9} 7  7" if number % 5 else "7" for number in range(20)]
        Path(f"raw/{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("p.toml").write_text(PIPELINE)
    return tmp_path


@pytest.fixture
def calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the stages in this process; return the commands in their order."""
    lines = list[str]()

    def call(arguments: list[str], counts: Path, echo: Callable[[str], object]) -> tuple[int, str]:
        lines.append(arguments[0])
        result = CliRunner().invoke(commands, ["--result-file", str(counts), *arguments])
        code = 2 if isinstance(result.exception, ConfigError) else result.exit_code
        return code, result.stdout

    monkeypatch.setattr(stage_runs, "_run_command", call)
    return lines


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["run", "p.toml", *words])
    assert end.value.code == code


def report() -> dict[str, dict]:
    return {stage["name"]: stage for stage in json.loads(Path("corpus/report.json").read_text())["stages"]}


def test_a_dump_becomes_a_blend_and_a_second_run_does_nothing(folder, capfd):
    run()
    assert "corpus/report.html: 4 stages\n" in capfd.readouterr().out
    assert Path("corpus/mixed/train_document.bin").exists()
    stages = report()
    assert list(stages) == ["text", "unique", "ids", "mixed"]
    assert [stages[name]["documents_in"] for name in ("text", "unique", "mixed")] == [40, 32, 9]
    assert [stage["documents_out"] for stage in stages.values()] == [32, 9, 9, 9]
    assert stages["text"]["dropped"] == {"length: shorter than 4 characters": 8}
    assert stages["unique"]["dropped"] == {"like an earlier one": 23}
    assert {stage["state"] for stage in stages.values()} == {"finished"}
    page = Path("corpus/report.html").read_text()
    assert '<a href="text/report.html">' in page
    times = {path: path.stat().st_mtime_ns for path in Path("corpus").rglob("*_document.*")}
    run()
    assert {stage["state"] for stage in report().values()} == {"unchanged"}
    assert times == {path: path.stat().st_mtime_ns for path in Path("corpus").rglob("*_document.*")}


def test_a_changed_option_repeats_its_stage_and_the_stages_that_read_it(calls):
    run()
    assert calls == ["clean", "dedup", "preprocess", "mix"]
    calls.clear()
    Path("p.toml").write_text(PIPELINE.replace("append-eod = true", "append-eod = false"))
    run()
    assert calls == ["preprocess", "mix"]
    calls.clear()
    Path("p.toml").write_text(PIPELINE.replace("append-eod = true", "append-eod = false\nworkers = 2"))
    run()
    assert calls == []


def test_a_changed_input_repeats_the_stages_that_depend_on_it(calls):
    run()
    calls.clear()
    Path("raw/c.jsonl").write_text(json.dumps({"text": "11 12 13"}) + "\n")
    run()
    assert calls == ["clean", "dedup", "preprocess", "mix"]
    assert report()["text"]["documents_in"] == 41
    assert Path("corpus/text/c.jsonl").exists()


def test_an_output_that_was_removed_is_written_again(calls):
    run()
    calls.clear()
    shutil.rmtree("corpus/ids")
    run()
    assert calls == ["preprocess", "mix"]


def test_a_file_that_a_step_names_is_an_input(calls):
    Path("list.txt").write_text("bad.example\n")
    Path("p.toml").write_text(PIPELINE.replace('"whitespace"', '"url-list:domains=list.txt"'))
    run()
    calls.clear()
    Path("list.txt").write_text("worse.example\n")
    run()
    assert calls[0] == "clean"


def test_a_failed_stage_ends_the_run_and_the_next_one_continues_there(calls):
    run()
    text = PIPELINE.replace("vocab-size = 100", "vocab-size = 5")
    Path("p.toml").write_text(text)
    calls.clear()
    run(code=1)
    assert calls == ["preprocess"]
    states = {name: stage["state"] for name, stage in report().items()}
    assert states["ids"] == "failed, exit code 1"
    assert (states["text"], states["mixed"]) == ("unchanged", "not reached")
    calls.clear()
    Path("p.toml").write_text(PIPELINE)
    run()
    assert calls == ["preprocess", "mix"]


def test_the_error_of_a_failed_stage_is_one_line(folder, capfd):
    Path("raw/a.jsonl").write_text("wrong\n")
    run(code=2)
    lines = capfd.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: raw/a.jsonl:1: not JSON: found ")


def test_dry_run_prints_the_commands_and_writes_nothing(folder, calls, capfd):
    run("--dry-run")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == (
        "mega-data clean --input 'raw/*.jsonl' --step whitespace length:minimum=4 --output corpus/text"
    )
    assert lines[2].endswith("--append-eod --output-prefix corpus/ids/ids")
    assert shlex.split(lines[3])[2:5] == ["--data-path", "1", "corpus/ids/ids_text_document"]
    assert not Path("corpus").exists()
    run()
    Path("p.toml").write_text(PIPELINE.replace('"exact"', '"megatron"'))
    capfd.readouterr()
    run("--dry-run")
    lines = capfd.readouterr().out.splitlines()
    assert [line.endswith("  # unchanged") for line in lines] == [True, False, False, False]


def test_weights_before_inputs_are_no_inputs(folder, capfd):
    words = 'input = [1, "{text}", 2.5, "raw/a.jsonl"]'
    Path("p.toml").write_text(PIPELINE.replace('data-path = [1, "{ids}"]', words))
    run("--dry-run")
    assert "mega-data mix --input 1 corpus/text 2.5 raw/a.jsonl --split 1" in capfd.readouterr().out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "replacement", "message"),
    [
        ('output = "corpus"', "", "p.toml: output: missing"),
        ('output = "corpus"', "outptu = 1", "p.toml: outptu: unknown key; hint: did you mean output?"),
        ('name = "ids"', "", "p.toml: stage 1: has no name"),
        ('name = "ids"', 'name = "../ids"', "p.toml: stage ../ids: name: not a name"),
        ('name = "ids"', 'name = "text"', "p.toml: stage text: two stages of one name"),
        ('"dedup"', '"dedupe"', "p.toml: stage unique: command: unknown command: found dedupe"),
        ('"dedup"', '"dedupe"', "hint: did you mean dedup?"),
        ('preset = "exact"', 'presets = "exact"', "unknown option of dedup; hint: did you mean preset?"),
        ('preset = "exact"', 'output = "x"', "of dedup; hint: leave it out: the run chooses it"),
        ('preset = "exact"', 'stage = "keys"', "unknown option of dedup; hint: leave it out"),
        ('preset = "exact"', "preset = [1]", "preset: wrong value: found [1], wanted a text or a number"),
        ("append-eod = true", "append-eod = 1", "append-eod: wrong value: found 1, wanted true or false"),
        ('preset = "exact"', 'preset = "exakt"', "stage unique: preset: unknown value: found exakt, wanted "),
        ('preset = "exact"', "jaccard = nan", "stage unique: jaccard: out of range: found nan, wanted "),
        ('preset = "exact"', "workers = 0", "stage unique: workers: out of range: found 0, wanted "),
        ('preset = "exact"', 'executor = "slurm-array"', "executor: unknown executor: found slurm-array, "),
        ('preset = "exact"', 'executor = "slurm"', "unique: array-size: missing: wanted elements"),
        ('preset = "exact"', 'executor = "slurm"\narray-size = 0', "array-size: wrong value: found 0"),
        (
            'preset = "exact"',
            "array-size = 2",
            "size: has no effect without Slurm: found 2; hint: executor =",
        ),
        ('tokenizer-type = "NullTokenizer"', "", "stage ids: tokenizer-type: missing option of preprocess"),
        ('"{unique}"', '"{unqiue}"', "stage ids: reads an unknown stage: found {unqiue}; hint: did you mean"),
        ('"{text}"', '"{ids}"', "stages read each other: found ids -> unique -> ids"),
        ('"raw/*.jsonl"', '"row/*.jsonl"', "stage text: input: no such input: found row/*.jsonl"),
        ('"{ids}"', '"ids"', "stage mixed: data-path: no such input: found ids"),
        ("[[stage]]", "[[stage", "p.toml: not TOML"),
        (
            '"corpus"',
            '"s3://b/corpus"',
            "p.toml: output: is a URL: found s3://b/corpus, wanted a path of this",
        ),
    ],
)
def test_a_wrong_pipeline_is_refused_and_nothing_is_written(text, replacement, message, capfd):
    Path("p.toml").write_text(PIPELINE.replace(text, replacement, 1))
    run(code=2)
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not Path("corpus").exists()
    assert not Path("s3:").exists()


def test_a_folder_of_other_files_is_no_output(folder, capfd):
    Path("corpus/text").mkdir(parents=True)
    Path("corpus/text/mine.txt").write_text("mine")
    run(code=2)
    assert "p.toml: output: contains files that this command did not write" in capfd.readouterr().err
    assert Path("corpus/text/mine.txt").exists()


def test_the_counts_of_each_command_are_in_the_report(calls):
    messages = [{"role": role, "content": "word"} for role in ("user", "assistant")]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}) + "\nwrong\n")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    Path("chat.jinja").write_text(f"{template}{{% if add_generation_prompt %}}assistant: {{% endif %}}")
    Path("page.html").write_text(f"<title>t</title><p>{'word ' * 50}</p>")
    Path("p.toml").write_text(
        'output = "corpus"\n'
        '[[stage]]\nname = "pages"\ncommand = "extract"\ninput = "page.html"\n'
        '[[stage]]\nname = "tok"\ncommand = "train-tokenizer"\ninput = "{pages}"\nvocab-size = 260\n'
        '[[stage]]\nname = "ids"\ncommand = "preprocess"\ninput = "{pages}"\n'
        'tokenizer-type = "HuggingFaceTokenizer"\ntokenizer-model = "{tok}"\n'
        '[[stage]]\nname = "chats"\ncommand = "preprocess-chat"\ninput = "chats.jsonl"\non-error = "skip"\n'
        'tokenizer-model = "{tok}"\nchat-template = "chat.jinja"\n'
        '[[stage]]\nname = "turns"\ncommand = "stats"\ndata-path = "{chats}"\n'
        '[[stage]]\nname = "all"\ncommand = "merge"\ndatasets = "{ids}"\n'
        '[[stage]]\nname = "counts"\ncommand = "stats"\ndata-path = "{all}"\n'
    )
    pytest.importorskip("resiliparse")
    run()
    counts = {name: (stage["documents_in"], stage["documents_out"]) for name, stage in report().items()}
    expected = {"pages": (1, 1), "tok": (None, None), "ids": (None, 1), "all": (None, 1), "counts": (1, None)}
    assert counts == {**expected, "chats": (2, 1), "turns": (1, None)}
    assert report()["chats"]["dropped"] == {"not a conversation": 1}


def test_stages_are_in_the_order_of_their_inputs_then_of_the_file(folder):
    pipeline = read_pipeline(Path("p.toml"), commands.commands)
    assert [stage.name for stage in pipeline.stages] == ["text", "unique", "ids", "mixed"]


def test_the_page_escapes_what_a_command_printed():
    stage = {"name": "n", "state": "<b>", "report": "", "command": "mega-data <b>", "printed": "<script>"}
    counts = {"documents_in": 4, "documents_out": 3, "bytes_in": 1, "bytes_out": 1, "seconds": 1.0}
    page = render_pipeline("t", [{**stage, **counts, "dropped": {"<i>": 1}}])
    assert "<script>" not in page
    assert "<i>" not in page
