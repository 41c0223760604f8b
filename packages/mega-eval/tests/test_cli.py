import hashlib
import json
import subprocess
import sys

import pytest

import mega_eval
from mega_eval.cli import cli
from mega_schema.app import cli_runner
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter
from mega_schema.tokenizer.tokenizer import TokenizerIdentity, open_tokenizer_folder
from tests.serving.damaged_checkpoint import copy_damaged

TEXTS = [" ".join(str(n * 7 % 40) for n in range(s, 2 * s + 4)) for s in range(1, 20)]
LINES = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS)


@pytest.fixture
def held_out_file(tmp_path):
    path = tmp_path / "held-out.jsonl"
    path.write_text(LINES)
    return path


@pytest.fixture
def call(tmp_path, capsys):
    """A function that runs the command and returns its exit code, stdout, stderr and result."""

    def run(*words):
        output = tmp_path / "result.json"
        output.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(cli, [*map(str, words), "--output", str(output), "--device", "cpu"])
        out, err = capsys.readouterr()
        result = json.loads(output.read_bytes()) if output.exists() else None
        return exit_info.value.code or 0, out, err, result

    return run


def check_error(outcome, *parts):
    code, out, err, result = outcome
    assert (code, out, result) == (2, "", None)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def values(result):
    return {name: metric["value"] for name, metric in result["metrics"].items()}


def write_dataset(prefix, identity, texts):
    with IndexedWriter(prefix, "uint16", DatasetInfo(identity)) as writer:
        for text in texts:
            writer.add([*map(int, text.split()), identity.eod])
            writer.end_document()


def test_a_lambada_result_says_what_is_needed_to_reproduce_it(call, run, held_out_file):
    code, out, err, result = call("lambada", "--load", run, "--data", held_out_file, "--strict-lambada")
    assert (code, err) == (0, "")
    assert "accuracy" in out
    assert out.rstrip().endswith("result.json")
    assert (result["format"], result["task"], result["convention"]) == (2, "lambada", "strict")
    assert result["publishable"]
    model = result["model"]
    assert (model["source"], model["iteration"]) == (str((run / "iter_0000010").resolve()), 10)
    assert (model["dtype"], model["device"]) == ("float32", "cpu")
    digest = hashlib.sha256(LINES.encode()).hexdigest()
    assert result["data"] == [{"path": str(held_out_file.resolve()), "bytes": len(LINES), "sha256": digest}]
    assert result["options"] == {
        "convention": "strict",
        "json_key": "text",
        "canonical_data": False,
        "limit": None,
        "micro_batch_size": None,
        "batch_invariant": False,
    }
    assert result["command"][0] == "mega-eval"
    assert result["versions"]["mega-eval"] == mega_eval.__version__
    assert result["counts"]["passages"] == 19
    # a passage has 4 + s words and the context is 16: those of s = 14 and more lose their beginning
    assert result["counts"]["passages_cut"] == 6
    assert result["tokens_read"] == sum(min(16, 3 + s) for s in range(1, 20))


def test_lambada_does_not_depend_on_the_batch_size(call, run, held_out_file):
    single, batched = (
        call("lambada", "--load", run, "--data", held_out_file, "--micro-batch-size", size)[3]
        for size in (1, 7)
    )
    assert single["counts"] == batched["counts"]
    assert values(single) == pytest.approx(values(batched), rel=1e-5)


def test_wikitext_takes_its_detokenizer_from_the_path(call, run, tmp_path):
    path = tmp_path / "wiki.test.tokens"
    path.write_text(" ".join(str(n * n % 39) for n in range(300)))
    code, _, _, result = call("wikitext103", "--load", run, "--data", path, "--overlapping-eval", 4)
    assert code == 0
    assert result["options"]["detokenizer"] == "wikitext"
    assert result["counts"]["seq_length"] == 16
    assert result["counts"]["tokens_scored"] == 299
    assert values(result)["token_ratio"] == 1
    assert values(result)["perplexity"] == values(result)["adjusted_perplexity"]


def test_perplexity_of_lines_and_of_the_dataset_made_from_them_agree(call, run, held_out_file, tmp_path):
    identity = open_tokenizer_folder(run / "iter_0000010/tokenizer").identity
    write_dataset(tmp_path / "held", identity, TEXTS)
    write_dataset(tmp_path / "train", identity, TEXTS * 2)
    baseline = ("--baseline-data", tmp_path / "train")
    lines = call("perplexity", "--load", run, "--data", held_out_file, *baseline)[3]
    dataset = call("perplexity", "--load", run, "--data", tmp_path / "held", *baseline)[3]
    assert values(lines) == values(dataset)
    assert lines["counts"] == dataset["counts"]
    assert values(lines)["kneser_ney_perplexity"] < values(lines)["unigram_perplexity"]
    assert [name["path"].rpartition("/")[2] for name in dataset["data"]] == [
        "held.bin",
        "held.idx",
        "train.bin",
        "train.idx",
    ]


@pytest.mark.parametrize("task", ["lambada", "wikitext103", "perplexity"])
def test_a_missing_data_file_is_one_line(call, run, tmp_path, task):
    check_error(call(task, "--load", run, "--data", tmp_path / "wiki.none"), "wiki.none: no such file")


def test_a_line_that_is_not_json_is_one_line_that_names_it(call, run, held_out_file):
    held_out_file.write_text(LINES + "oops\n")
    for task in ("lambada", "perplexity"):
        check_error(
            call(task, "--load", run, "--data", held_out_file),
            "held-out.jsonl:20: not JSON: found unexpected character",
            " at column 1",
        )


def test_a_line_without_the_key_is_one_line_that_names_it(call, run, held_out_file):
    options = ("--load", run, "--data", held_out_file)
    check_error(
        call("perplexity", *options, "--json-key", "body"), "held-out.jsonl:1: no key 'body'", "found text"
    )


def test_an_empty_data_file_is_one_line(call, run, tmp_path):
    (tmp_path / "wiki").write_text("")
    for task in ("lambada", "wikitext103", "perplexity"):
        check_error(call(task, "--load", run, "--data", tmp_path / "wiki"), "wiki: no ")


def test_a_missing_checkpoint_is_one_line(call, tmp_path, held_out_file):
    check_error(
        call("lambada", "--load", tmp_path / "nowhere", "--data", held_out_file), "nowhere: no such folder"
    )


def test_a_file_of_weights_as_a_checkpoint_is_one_line_with_the_command_that_converts_it(
    call, run, tmp_path, held_out_file
):
    for name, hint in (
        ("stories260K.bin", "a model of llama2.c needs mega-ckpt convert --from llama2c --to mega --load "),
        ("weights.pt", "ls "),
        ("hf/pytorch_model.bin", "mega-ckpt convert --from hf --to mega --load "),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "config.json").write_text("{}") if name[:2] == "hf" else None
        path.write_bytes(b"\0" * 100)
        outcome = call("lambada", "--load", path, "--data", held_out_file)
        check_error(outcome, f"{name}: is a file: wanted a checkpoint", f"; hint: {hint}")
    weights = next((run / "iter_0000010").glob("*.safetensors"))
    check_error(call("lambada", "--load", weights, held_out_file), f"; hint: name {weights.parent}\n")


@pytest.mark.parametrize("flags", [(), ("--tp", "2")])
def test_a_bert_of_hugging_face_is_refused_without_a_conversion_that_leads_back(
    call, tmp_path, held_out_file, flags
):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    outcome = call("lambada", "--load", tmp_path, "--data", held_out_file, *flags)
    check_error(
        outcome, "config.json: model_type: is of an encoder, which predicts no next token: found bert"
    )
    assert "mega-ckpt" not in outcome[2]


def test_results_of_two_dtypes_have_two_names(run, held_out_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(
                cli, ["lambada", str(held_out_file), f"--load={run}", "--device=cpu", f"--dtype={dtype}"]
            )
        assert not exit_info.value.code, capsys.readouterr().err
        assert len(list(tmp_path.glob(f"lambada-last-token-*-{dtype}.json"))) == 1


@pytest.mark.parametrize("option", ["--output=/proc/r.json", "--cache=/proc/answers"])
def test_a_place_that_cannot_be_written_to_is_the_fault_of_its_option(run, held_out_file, capsys, option):
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(
            cli, ["lambada", f"--load={run}", f"--data={held_out_file}", option, "--limit=1"]
        )
    assert exit_info.value.code == 2
    name = option.partition("=")[0]
    message = f"error: {name}: no file can be created in the folder: found /proc (No such file or directory)"
    assert capsys.readouterr().err == f"{message}; hint: name another folder\n"


def test_a_half_written_checkpoint_is_one_line(call, checkpoint_writer, tmp_path, held_out_file):
    folder = checkpoint_writer(tmp_path / "cut")
    weights = folder / "model-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    check_error(call("lambada", "--load", tmp_path / "cut", "--data", held_out_file), "size in bytes")
    (tmp_path / "half/.iter_0000010.partial").mkdir(parents=True)
    check_error(
        call("lambada", "--load", tmp_path / "half", "--data", held_out_file), "half-written .iter_0000010"
    )


def test_a_checkpoint_without_a_tokenizer_is_one_line(call, checkpoint_writer, tmp_path, held_out_file):
    checkpoint_writer(tmp_path / "bare", tokenizer=False)
    check_error(
        call("lambada", "--load", tmp_path / "bare", "--data", held_out_file),
        "has no tokenizer",
        "hint: cp -r",
    )


def test_a_tokenizer_larger_than_the_model_is_one_line(call, checkpoint_writer, tmp_path, held_out_file):
    checkpoint_writer(tmp_path / "small", vocab=30)
    outcome = call("lambada", "--load", tmp_path / "small", "--data", held_out_file)
    check_error(outcome, "the tokenizer has more tokens than the model: found 41, wanted at most 30")


def test_a_dataset_of_another_tokenizer_is_one_line(call, run, tmp_path, held_out_file):
    identity = TokenizerIdentity("HuggingFaceTokenizer", 41, 40, None, None, "f" * 64)
    write_dataset(tmp_path / "other", identity, ["1 2 3"])
    check_error(
        call("perplexity", "--load", run, "--data", tmp_path / "other"), "other: tokenizer of the dataset"
    )
    outcome = call(
        "perplexity", "--load", run, "--data", held_out_file, "--baseline-data", tmp_path / "other"
    )
    check_error(outcome, "other: tokenizer of the dataset")


def test_a_missing_baseline_is_one_line(call, run, tmp_path, held_out_file):
    outcome = call("perplexity", "--load", run, "--data", held_out_file, "--baseline-data", tmp_path / "none")
    check_error(outcome, "none: no such indexed dataset")


def test_a_dataset_that_lost_its_tokens_is_one_line(call, run, tmp_path):
    identity = open_tokenizer_folder(run / "iter_0000010/tokenizer").identity
    write_dataset(tmp_path / "held", identity, TEXTS)
    (tmp_path / "held.bin").unlink()
    check_error(call("perplexity", "--load", run, "--data", tmp_path / "held"), "held.bin: No such file")


def test_a_terminal_shows_progress_and_then_a_clean_line(run, held_out_file, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    argv = [f"--load={run}", f"--data={held_out_file}", f"--output={tmp_path / 'r.json'}"]
    with pytest.raises(SystemExit):
        cli_runner.run_command(cli, ["lambada", *argv, "--micro-batch-size=10"])
    shown = capsys.readouterr().err
    assert "scoring" in shown
    assert "19 of 19 windows" in shown
    assert shown.endswith("\r\x1b[1A\x1b[2K")


@pytest.mark.parametrize(
    ("task", "detokenizer"), [("wikitext103", "wikitext"), ("wikitext2", "wikitext"), ("ptb", "ptb")]
)
def test_the_command_chooses_the_detokenizer(call, run, tmp_path, task, detokenizer):
    path = tmp_path / "corpus.txt"
    path.write_text(" ".join(str(n * n % 39) for n in range(40)))
    for more in ((path, "--overlapping-eval", 8), ("--data", path, "--convention", "lm-eval")):
        code, _, err, result = call(task, "--load", run, *more)
        assert (code, err) == (0, "")
        assert result["task"] == task
        assert result["options"]["detokenizer"] == detokenizer
    assert result["convention"] == "lm-eval"
    assert result["counts"]["pages"] == 1


def test_files_that_are_missing_repeated_or_too_many_are_one_line(call, run, held_out_file, tmp_path):
    check_error(call("lambada", "--load", run), "--data: missing", "hint: add --data FILE")
    outcome = call("perplexity", "--load", run, held_out_file, "--data", held_out_file)
    check_error(outcome, "--data: names a file twice: found ")
    outcome = call("lambada", "--load", run, held_out_file, tmp_path / "b")
    check_error(outcome, "--data: more than one file")


def test_two_conventions_of_lambada_are_one_line(call, run, held_out_file):
    options = ("lambada", "--load", run, held_out_file, "--convention", "openai")
    check_error(
        call(*options, "--strict-lambada"), "--strict-lambada: contradicts --convention: found openai"
    )


def test_perplexity_reads_several_files(call, run, held_out_file, tmp_path):
    (tmp_path / "more.txt").write_text(TEXTS[0] + "\n" + TEXTS[1])
    code, _, _, result = call("perplexity", "--load", run, held_out_file, tmp_path / "more.txt")
    assert code == 0
    assert result["counts"]["documents"] == 20
    assert [name["path"].rpartition("/")[2] for name in result["data"]] == ["held-out.jsonl", "more.txt"]


def test_windows_the_model_cannot_read_are_one_line(call, run, tmp_path):
    (tmp_path / "wiki").write_text("1 2 3")
    options = ("wikitext103", "--load", run, "--data", tmp_path / "wiki")
    check_error(call(*options, "--seq-length", 17), "--seq-length: ", "found 17 tokens, wanted at most 16")
    check_error(call(*options), "--overlapping-eval: ", "found 32 tokens", "hint: --overlapping-eval 16")


def test_a_device_the_machine_lacks_is_one_line(run, held_out_file, capsys, tmp_path):
    argv = [f"--load={run}", f"--data={held_out_file}", f"--output={tmp_path / 'r.json'}", "--device=abacus"]
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, ["lambada", *argv])
    assert exit_info.value.code == 2
    message = "error: --device: not a device of this machine: found abacus, wanted "
    assert capsys.readouterr().err.startswith(message)


def test_an_output_that_cannot_be_written_is_refused_before_the_evaluation(
    run, held_out_file, capsys, tmp_path
):
    for output, message in ((tmp_path / "no/where.json", "no such folder"), (tmp_path, "is a folder")):
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(
                cli, ["lambada", f"--load={run}", f"--data={held_out_file}", f"--output={output}"]
            )
        assert exit_info.value.code == 2
        assert f"--output: {message}" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from mega_eval.cli import cli; cli(['lambada', '--help'], standalone_mode=False);"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.rstrip().endswith("[]")
    assert "TASK-CONVENTION-HASH-DTYPE.json]" in "".join(process.stdout.split())


def test_the_module_is_the_command():
    argv = [sys.executable, "-m", "mega_eval", "--version"]
    process = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert process.stdout == f"mega-eval, version {mega_eval.__version__}\n"


def test_batch_invariant_results_do_not_depend_on_the_batch_size(call, run, held_out_file):
    words = ("lambada", "--load", run, "--data", held_out_file, "--batch-invariant", "--no-cache")
    single, batched = (call(*words, "--micro-batch-size", size)[3] for size in (1, 7))
    assert single["options"]["batch_invariant"]
    assert values(single) == values(batched)


def test_weights_that_are_not_those_that_were_written_have_no_result(call, run, held_out_file, tmp_path):
    weights = copy_damaged(run, tmp_path / "damaged")
    outcome = call("lambada", "--load", weights.parent, "--data", held_out_file)
    check_error(outcome, f"{weights}: model ", "values are not those that were written: crc32: found ")


@pytest.mark.parametrize(
    ("task", "more", "windows"),
    [
        ("wikitext103", ("--overlapping-eval", 8), 13),
        ("wikitext103", ("--convention", "lm-eval"), 1),
        ("megatron11b", ("--context-window", 8), 13),
        ("lambada", ("--convention", "last-token"), 1),
    ],
)
def test_a_limit_that_leaves_no_window_out_is_publishable(call, run, tmp_path, task, more, windows):
    if task == "megatron11b":
        pytest.importorskip("sacremoses", reason="sacremoses is not installed")
    path = tmp_path / "corpus.txt"
    path.write_text(" ".join(str(n * n % 39) for n in range(100)))
    for limit in {1, windows}:
        result = call(task, path, "--load", run, *more, "--limit", limit)[3]
        assert result["publishable"] == (limit == windows)


@pytest.mark.parametrize(("limit", "is_whole"), [(len(TEXTS) - 1, False), (len(TEXTS), True)])
def test_a_limit_that_leaves_no_document_out_is_publishable(call, run, held_out_file, limit, is_whole):
    code, out, _, result = call("perplexity", "--load", run, "--data", held_out_file, "--limit", limit)
    assert (code, result["publishable"]) == (0, is_whole)
    assert ("not publishable" in out) == (not is_whole)
