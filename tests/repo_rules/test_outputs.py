"""One rule for overwriting files, checked for every output option of every program.

A command with a new output must be listed here: the lists are compared with the options of the commands.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest

from mega_schema.app.click_options import LocalPath
from mega_schema.app.output_option import OutputPath
from tests.evaluation import choice_rows
from tests.repo_rules import faulty_inputs
from tests.repo_rules.markdown import subcommands_of
from tests.repo_rules.repository import PROGRAMS

LINE = '{"text": "one two three four"}\n'
# TEXT is a file of documents, OUT the output under test, BIN what a dataset's prefix is
TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 100"
TRAINING = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.01 --data-path corpus_text_document "
    "--hidden-dropout 0 --attention-dropout 0"
)
TASK = TRAINING.replace("--train-iters 1 ", "--epochs 1 --vocab-size 100 ").replace(
    "--data-path corpus_text_document", "--task CLASSIFY --train-data in/labelled.jsonl"
)


@dataclass(frozen=True, slots=True)
class Output:
    """An option that names an output, and a command line that reads `input` and writes OUT.

    Attributes:
        kind: file, folder or prefix.
        inputs: what the command reads; where OUT is one of them, or a folder above one, it is refused.
        suffixes: of a prefix, the endings of the files that are written.
        shared: other programs' files may be in the folder: the command writes under names of its own.
    """

    option: str
    kind: str
    line: str
    inputs: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    shared: bool = False


DOCUMENT = tuple(f"_text_document{suffix}" for suffix in (".bin", ".idx", ".json"))
DATASET = (".bin", ".idx", ".json")
CHATS = "--input in/a.jsonl --tokenizer-model tokenizer"
OUTPUTS = {
    "mega-data clean --output": Output(
        "--output", "folder", "--input in/a.jsonl --step whitespace", ("in/a.jsonl",)
    ),
    "mega-data clean --work-dir": Output(
        "--work-dir", "folder", "--input in/a.jsonl --step whitespace --output new", ("in/a.jsonl",)
    ),
    "mega-data dedup --output": Output("--output", "folder", "--input in/a.jsonl", ("in/a.jsonl",)),
    "mega-data dedup --work-dir": Output(
        "--work-dir", "folder", "--input in/a.jsonl --output new", ("in/a.jsonl",)
    ),
    "mega-data extract --output": Output("--output", "folder", "--input in/p.html", ("in/p.html",)),
    "mega-data extract --work-dir": Output(
        "--work-dir", "folder", "--input in/p.html --output new", ("in/p.html",)
    ),
    "mega-data extract --output FILE": Output(
        "--output", "file", "--input in/p.jsonl --from html", ("in/p.jsonl",)
    ),
    "mega-data preprocess --output-prefix": Output(
        "--output-prefix", "prefix", f"--input in/a.jsonl {TOKENIZER}", (), DOCUMENT
    ),
    "mega-data preprocess --work-dir": Output(
        "--work-dir",
        "folder",
        f"--input in/a.jsonl {TOKENIZER} --output-prefix s3://bucket/corpus",
        ("in/a.jsonl",),
    ),
    "mega-data preprocess-chat --output-prefix": Output(
        "--output-prefix", "prefix", CHATS, (), tuple(f"_chat_document{suffix}" for suffix in DATASET)
    ),
    "mega-data preprocess-chat --work-dir": Output(
        "--work-dir", "folder", f"{CHATS} --output-prefix new", ("in/a.jsonl",)
    ),
    "mega-data merge --output-prefix": Output(
        "--output-prefix", "prefix", "--datasets corpus_text_document", ("corpus_text_document",), DATASET
    ),
    "mega-data stats --output": Output("--output", "folder", "--input in/a.jsonl", ("in/a.jsonl",)),
    "mega-data stats --work-dir": Output(
        "--work-dir", "folder", "--input in/a.jsonl --output new", ("in/a.jsonl",)
    ),
    "mega-data mix --output": Output(
        "--output", "folder", "--data-path corpus_text_document", ("corpus_text_document.bin",)
    ),
    "mega-data mix --work-dir": Output(
        "--work-dir",
        "folder",
        "--data-path corpus_text_document --output new",
        ("corpus_text_document.bin",),
    ),
    "mega-data convert --output-prefix": Output(
        "--output-prefix", "prefix", "corpus_text_document --to cached", ("corpus_text_document",), DATASET
    ),
    "mega-data convert --output FILE": Output(
        "--output-prefix", "file", "corpus_text_document --to jsonl", ("corpus_text_document.bin",)
    ),
    "mega-data inspect --plot": Output(
        "--plot", "file", "corpus_text_document", ("corpus_text_document.bin", "corpus_text_document.json")
    ),
    "mega-data sample --output": Output("--output", "file", "--megabytes 0.01"),
    "mega-data sample --held-out": Output("--held-out", "file", "--megabytes 0.01 --output new.jsonl"),
    "mega-data train-tokenizer --output": Output(
        "--output", "folder", "--input in/a.jsonl --vocab-size 300", ("in/a.jsonl",)
    ),
    "mega-data train-ngram --output": Output(
        "--output", "file", "--input in/a.jsonl --discount-fallback", ("in/a.jsonl",)
    ),
    "mega-data train-tokenizer --work-dir": Output(
        "--work-dir", "folder", "--input in/a.jsonl --vocab-size 300 --output new", ("in/a.jsonl",)
    ),
    "mega-ckpt convert --save": Output(
        "--save", "folder", "--from mega --to hf --load runs/small --force", ("runs/small",)
    ),
    "mega-ckpt reshard --save": Output("--save", "folder", "--load runs/small", ("runs/small",), shared=True),
    "mega-ckpt average --save": Output("--save", "folder", "runs/small", ("runs/small",), shared=True),
    "mega-ckpt export-tokenizer --save": Output(
        "--save", "folder", "runs/small --force", ("runs/small/iter_0000010/manifest.json",)
    ),
    "mega-eval lambada --output": Output(
        "--output", "file", "--load runs/small --data text.jsonl", ("text.jsonl",)
    ),
    **{
        f"mega-eval {corpus} --output": Output(
            "--output", "file", "--load runs/small --data words.txt --detokenizer none", ("words.txt",)
        )
        for corpus in ("wikitext103", "wikitext2", "ptb")
    },
    "mega-eval megatron11b --output": Output(
        "--output", "file", "--load runs/small --data words.txt --context-window 12", ("words.txt",)
    ),
    "mega-eval perplexity --output": Output(
        "--output",
        "file",
        "--load runs/small --data text.jsonl --baseline-data corpus_text_document",
        ("text.jsonl", "corpus_text_document.bin"),
    ),
    "mega-eval report --output": Output(
        "--output", "file", "in/result.json", ("in/result.json", "in/result.samples.jsonl")
    ),
    **{
        f"mega-eval compare {option}": Output(
            option, "file", "in/result.json in/result.json", ("in/result.json", "in/result.samples.jsonl")
        )
        for option in ("--output", "--plot")
    },
    "mega-eval contamination --output": Output(
        "--output",
        "file",
        "--train corpus_text_document --data text.jsonl --result in/result.json",
        ("text.jsonl", "corpus_text_document.bin", "in/result.json", "in/result.samples.jsonl"),
    ),
    "mega-eval sweep --output": Output(
        "--output", "folder", "runs/small lambada --data text.jsonl", ("runs/small",)
    ),
    "mega-serve bench --result-filename": Output(
        "--result-filename",
        "file",
        "--save-result --dataset-name custom --dataset-path in/prompts.jsonl",
        ("in/prompts.jsonl",),
    ),
    "mega-serve bench --result-dir": Output("--result-dir", "folder", "--save-result", shared=True),
    "mega-serve bench --plot": Output("--plot", "file", ""),
    "mega-serve generate --output-file": Output(
        "--output-file", "file", "--load runs/small --input-file in/batch.jsonl", ("in/batch.jsonl",)
    ),
    "mega-serve generate --sample-output-file": Output(
        "--sample-output-file",
        "file",
        "--load runs/small --sample-input-file in/prompts.jsonl",
        ("in/prompts.jsonl",),
    ),
    "mega-serve generate --genfile": Output("--genfile", "file", "--load runs/small --num-samples 1"),
    "mega-train curve --output": Output("--output", "file", "runs/small"),
    "mega-train report --output": Output("--output", "file", "runs/small"),
} | {
    f"mega-train {command} {option}": Output(option, "folder", line, shared=True)
    for command, line in {
        **dict.fromkeys(("gpt", "llama", "bert", "t5", "prefix"), TRAINING),
        "finetune": TASK,
    }.items()
    for option in (
        "--save",
        "--data-cache-path",
        "--object-storage-cache-path",
        "--tensorboard-dir",
        "--wandb-save-dir",
        "--codecarbon-dir",
    )
}
OUTPUTS |= {
    f"mega-eval {task} --output": Output(
        "--output", "file", f"--load runs/small --data in/{task}.jsonl", (f"in/{task}.jsonl",)
    )
    for task in choice_rows.ROWS
}
OUTPUTS |= {
    f"mega-eval {task} --output": Output("--output", "file", f"--load runs/small --data {data}", inputs)
    for task, data, inputs in (
        ("nq", "in/nq.jsonl", ("in/nq.jsonl",)),
        ("squad", "in/squad.json", ("in/squad.json",)),
        ("core", "in/core", ("in/core/core.yaml", "in/core/eval_data/schema.jsonl")),
    )
}
OUTPUTS |= {
    name.replace("--output", "--cache"): Output("--cache", "folder", output.line, shared=True)
    for name, output in OUTPUTS.items()
    if name.startswith("mega-eval") and "--load" in output.line
}
OUTPUTS["mega-eval classify --output"] = Output(
    "--output", "file", "--load runs/small --data in/labelled.jsonl", ("in/labelled.jsonl",)
)
# options that name a path and are read; `plan` and `validate` of mega-train write nothing
READ = re.compile(
    r"--(input|against|load|data|fewshot-data|dataset|sample-input|api-key|ssl|chat-template|config|language-model|tokenizer|vocab|merge|pretrained|baseline|compare-with|per-split|train-weighted|valid-weighted|test-weighted|kill-switch|datasets|train(?!-)|result(?!-))\b.*"
)
# outputs that may be in an object store; a web server takes no files
UPLOADED = {
    "mega-data clean --output",
    "mega-data dedup --output",
    "mega-data extract --output",
    "mega-data mix --output",
    "mega-data preprocess --output-prefix",
    "mega-data preprocess-chat --output-prefix",
    "mega-data stats --output",
}
WRITES_NOTHING = {"mega-train plan", "mega-train validate"}


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option that names a path, with the command it is of."""
    for command, param in parameters():
        if isinstance(param, click.Option) and isinstance(param.type, click.Path):
            yield command, param


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    """Every option and argument, with the command it is of."""
    for program in PROGRAMS:
        module = vars(importlib.import_module(f"{program.replace('-', '_')}.cli"))
        groups = [value for value in module.values() if isinstance(value, click.Group)]
        alone = [(program, value) for value in module.values() if isinstance(value, click.Command)]
        inner = [
            (f"{program} {name}", subcommand)
            for group in groups
            for name, subcommand in subcommands_of(group).items()
        ]
        for command, subcommand in inner or alone:
            for param in subcommand.params:
                yield command, param


def test_every_option_that_names_a_path_is_read_or_listed_as_an_output() -> None:
    listed = {name.removesuffix(" FILE") for name in OUTPUTS}
    assert {command.split()[0] for command, _ in options()} == set(PROGRAMS)
    for command, option in options():
        is_output = isinstance(option.type, OutputPath) or not READ.fullmatch(option.opts[0])
        if is_output and command not in WRITES_NOTHING:
            assert any(f"{command} {name}" in listed for name in option.opts), f"{command} {option.opts}"


def test_every_other_option_and_argument_that_names_a_path_refuses_a_url() -> None:
    paths = [(command, param) for command, param in parameters() if isinstance(param.type, click.Path)]
    assert len(paths) > 100
    wrong = [f"{command} {param.opts[0]}" for command, param in paths if not _is_local(param.type)]
    assert wrong == []


def _is_local(kind: click.ParamType) -> bool:
    return isinstance(kind, LocalPath | OutputPath)


def test_every_listed_output_is_an_option() -> None:
    existing = {f"{command} {name}" for command, option in options() for name in option.opts}
    assert {name.removesuffix(" FILE") for name in OUTPUTS} <= existing


@pytest.fixture(scope="module")
def faulty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    faulty_inputs.make(folder)
    (folder / "in").mkdir()
    (folder / "in/a.jsonl").write_text(LINE * 40)
    page = "<html><body><p>One paragraph that is long enough to be text.</p></body></html>"
    for name in ("p.html", "p.jsonl"):
        (folder / "in" / name).write_text(page)
    rows = ('{"text": "one two", "label": "a"}\n', '{"text": "one", "label": "b"}\n')
    (folder / "in/labelled.jsonl").write_text("".join(rows))
    (folder / "in/prompts.jsonl").write_text('{"prompt": "one two"}\n')
    body = {"model": "small", "prompt": "one two", "max_tokens": 1}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (folder / "in/batch.jsonl").write_text(json.dumps(request) + "\n")
    for task, row in choice_rows.ROWS.items():
        choice_rows.write_rows(folder / "in" / f"{task}.jsonl", [row(n) for n in range(3)])
    choice_rows.write_rows(folder / "in/nq.jsonl", [{"question": "who is it", "answer": ["one"]}])
    choice_rows.write_squad(folder / "in/squad.json")
    choice_rows.write_core_bundle(folder / "in/core")
    (folder / "words.txt").write_text("one two three\n" * 20)
    for name in ("result.json", "result.samples.jsonl"):
        (folder / "in" / name).write_text("{}\n")
    return folder


@pytest.fixture
def folder(faulty_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(faulty_folder, tmp_path / "w", symlinks=True)
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


def refusal(name: str, path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command refuses an output; nothing in the folder has changed."""
    output, (program, command) = OUTPUTS[name], name.split()[:2]
    words = [program, command, *shlex.split(output.line), output.option, path]
    monkeypatch.setattr("sys.argv", words)
    before = contents(Path())
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"{program.replace('-', '_')}.cli").main()
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (2, ""), (out, err)
    assert err.count("\n") == 1, err
    assert contents(Path()) == before, err
    return err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_url_and_an_empty_word_are_no_output(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scheme = "http" if name.removesuffix(" FILE") in UPLOADED else "s3"
    refused = refusal(name, f"{scheme}://bucket/corpus.jsonl", monkeypatch, capfd)
    assert refused.startswith(
        f"error: {OUTPUTS[name].option}: is a URL: found {scheme}://bucket/corpus.jsonl"
    )


@pytest.mark.parametrize("name", [name for name, output in OUTPUTS.items() if output.inputs])
def test_an_output_is_no_input_whatever_it_is_called(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = OUTPUTS[name]
    for flag in output.inputs:
        path = Path(flag)
        if output.kind == "folder" and path.is_file():
            path = path.parent
        Path("link").unlink(missing_ok=True)
        spellings = [str(path), f"./in/../{path}"]
        if output.kind != "prefix":
            Path("link").symlink_to(path)
            spellings.append("link")
        for spelling in spellings:
            assert refusal(name, spelling, monkeypatch, capfd).startswith("error: ")


# commands that read every .jsonl file below a folder; the others read no file of theirs again
READ_AGAIN = tuple(
    f"{name} {option}" for name in ("clean", "dedup", "stats") for option in ("--output", "--work-dir")
)


@pytest.mark.parametrize("name", [f"mega-data {name}" for name in READ_AGAIN])
def test_a_folder_that_the_next_run_would_read_is_no_output(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.jsonl").write_text(LINE)
    Path("in/sub").mkdir()
    Path("in/linked").symlink_to(elsewhere)
    Path("link").symlink_to("in")
    for page in Path("in").glob("p.*"):
        page.unlink()
    paths = ["in/mine", "in/sub", "in/sub/mine/deeper", "link/mine", "in/sub/../mine", "../elsewhere/mine"]
    for word in ("in", "in/**/*.jsonl", "in/*"):
        line = OUTPUTS[name].line.replace("in/a.jsonl", f"'{word}'")
        with monkeypatch.context() as patch:
            patch.setitem(OUTPUTS, name, replace(OUTPUTS[name], line=line))
            for path in paths:
                refused = refusal(name, path, patch, capfd)
                assert f"is in a folder that --input reads: found {path}, wanted" in refused, (word, refused)


@pytest.mark.parametrize("name", [name for name, output in OUTPUTS.items() if not output.shared])
def test_files_of_other_programs_are_not_overwritten(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = OUTPUTS[name]
    if output.kind == "folder":
        Path("mine/sub").mkdir(parents=True)
        Path("mine/thesis.txt").write_text("precious")
        refused = refusal(name, "mine", monkeypatch, capfd)
        assert "mine" in refused
    elif output.kind == "file":
        Path("mine.jsonl").write_text('{"precious": 1}\n')
        assert "is a file that this command did not write" in refusal(name, "mine.jsonl", monkeypatch, capfd)
    for suffix in output.suffixes:
        if suffix.endswith(".idx"):
            continue
        Path(f"mine{suffix}").write_text('{"precious": 1}\n')
        assert "did not write" in refusal(name, "mine", monkeypatch, capfd)
        Path(f"mine{suffix}").unlink()


@pytest.mark.parametrize("name", [name for name, output in OUTPUTS.items() if output.kind != "folder"])
def test_a_folder_is_no_file_and_no_prefix(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name.endswith("FILE"):
        return
    Path("data").mkdir()
    assert "is a folder" in refusal(name, "data/", monkeypatch, capfd)
    assert "is empty" in refusal(name, "", monkeypatch, capfd)
