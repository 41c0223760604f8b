"""The command: training, resuming, plotting, kills, and one-line errors."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import replace_manifest, rewrite_checksums
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.cli import main
from mega_train.fault_tolerance.error_reporting import REPORT_DELAY
from mega_train.telemetry.event_log import read_events
from mega_train.telemetry.events import LogLine, ValidationEnd

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

MODEL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"]
TINY = [*MODEL, "--make-vocab-size-divisible-by", "8", "--seq-length", "16", "--global-batch-size", "8"]
TRAINING = ["--train-iters", "60", "--lr", "0.02", "--eval-iters", "0", "--log-interval", "10"]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended, and what it said."""

    code: object
    stdout: str
    stderr: str


def _run(*argv: str, code: int = 0) -> CommandResult:
    """The command as its entry point runs it, in this process: starting another costs seconds."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(argv)
    result = CommandResult(left.value.code, out.getvalue(), err.getvalue())
    assert result.code == code, result.stderr
    return result


def _gpt(corpus: Path, *argv: str, code: int = 0) -> CommandResult:
    return _run("gpt", "--data-path", str(corpus), *TINY, *TRAINING, *argv, code=code)


def _refusal(result: CommandResult) -> str:
    """The one line on stderr of a command that left with exit code 2."""
    assert result.code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("error: ").rstrip("\n")


@pytest.fixture(scope="module")
def trained_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    """A run of 60 steps that saved at 20, 40 and 60, and what it said."""
    run = tmp_path_factory.mktemp("trained") / "run"
    validation = ["--eval-iters", "1", "--eval-interval", "30", "--split", "80,20,0"]
    return run, _gpt(corpus, "--save", str(run), "--save-interval", "20", *validation)


def test_a_run_learns_and_says_so_in_plain_lines(trained_run: tuple[Path, CommandResult]) -> None:
    run, result = trained_run
    lines = result.stdout.splitlines()
    assert re.match(
        r"gpt, [\d,]+ parameters \| tp 1 x pp 1 x dp 1 \| 8 samples x 16 tokens a step \| ", lines[0]
    )
    assert sum(line.startswith("iteration ") for line in lines) == 6
    assert sum(line.startswith("validation at iteration ") for line in lines) == 2
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    losses = [e["loss"] for e in read_events(run) if e["event"] == "train_log"]
    assert losses[-1] < losses[0] / 1.8, "means of ten steps: from about 3 to under 1.6 nats"


def test_a_run_goes_on_when_the_reader_of_its_lines_goes_away(corpus: Path, tmp_path: Path) -> None:
    saving = ["--log-interval", "1", "--save", str(tmp_path)]
    argv = ["gpt", "--data-path", str(corpus), *TINY, *TRAINING, *saving]
    with subprocess.Popen(
        [sys.executable, "-m", "mega_train", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline().startswith("gpt, ")
        run.stdout.close()
        output = run.stderr.read()
    why = "BrokenPipeError: [Errno 32] Broken pipe"
    assert output == f"ConsoleReporter failed and is disabled ({why}); training continues\n"
    assert run.returncode == 0
    assert Checkpoint.open(tmp_path).iteration == 60
    assert [e["iteration"] for e in read_events(tmp_path) if e["event"] == "train_log"] == list(range(1, 61))


def test_a_run_is_watched_by_what_its_flags_ask_for(corpus: Path, tmp_path: Path) -> None:
    shown = ["--tensorboard-dir", str(tmp_path / "board"), "--log-timers-to-tensorboard", "--log-params-norm"]
    times = ["--timing-log-level", "1", "--prometheus-port", "0", "--train-iters", "10"]
    result = _gpt(corpus, "--save", str(tmp_path / "run"), *shown, *times)
    assert result.stderr == ""
    assert re.search(r"^metrics at http://127\.0\.0\.1:\d+/metrics$", result.stdout, re.MULTILINE)
    assert re.search(r"^  optimizer\.+ [\d.]+ [\d.]+$", result.stdout, re.MULTILINE)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    names = set(read.Tags()["scalars"])
    assert {"lm loss", "lm loss vs samples", "params-norm", "iteration-time", "optimizer-time"} <= names
    (line,) = [e for e in read_events(tmp_path / "run") if e["event"] == "train_log"]
    assert read.Scalars("iteration-time")[0].value == pytest.approx(line["iteration_seconds"])
    assert [point.step for point in read.Scalars("lm loss")] == list(range(1, 11))
    # linear to 0 at step 10: after step 1 Megatron logs the rate of step 2
    rates = [point.value for point in read.Scalars("learning-rate")]
    assert rates == pytest.approx([0.02 * (1 - result / 10) for result in range(1, 11)], abs=1e-8)


def test_a_megatron_script_trains_as_it_is(corpus: Path, tmp_path: Path) -> None:
    """The body of examples/pretrain_gpt.sh, smaller, behind `-m mega_train gpt`."""
    script = f"""
        --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
        --micro-batch-size 2 --global-batch-size 4 --lr 0.00015 --train-iters 3 --lr-decay-iters 2
        --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0
        --data-impl mmap --split 949,50,1 --data-path {corpus} --distributed-backend gloo --use-flash-attn
        --attention-softmax-in-fp32 --layernorm-epsilon 1e-5 --no-position-embedding
        --use-rotary-position-embeddings --squared-relu --log-interval 1 --save-interval 10000
        --eval-interval 1000 --eval-iters 0 --save {tmp_path} --local-rank 0
    """
    result = _run("gpt", *script.split())
    assert result.stdout.count("\niteration ") == 3
    assert result.stderr.count("\n") == 2
    assert "0.1 in Megatron: --megatron-defaults takes its defaults" in result.stderr
    assert result.stderr.startswith("left out: --data-impl (the format of a dataset is detected); ")
    spec = Checkpoint.open(tmp_path).spec
    assert (spec.positions, spec.activation) == ("rope", "squared_relu")


def test_what_cannot_watch_a_run_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = ["--save", str(tmp_path / "run"), "--tensorboard-dir", str(tmp_path / "board")]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        refusal = _refusal(_gpt(corpus, *save, "--prometheus-port", port, code=2))
    assert refusal.startswith(
        f"--prometheus-port: cannot be listened on (Address already in use): found 127.0.0.1:{port}"
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refusal = _refusal(_gpt(corpus, *save, code=2))
    assert (
        refusal
        == '--tensorboard-dir: needs tensorboard; hint: pip install -e "packages/mega-train[tensorboard]"'
    )
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_a_run_is_complete(trained_run: tuple[Path, CommandResult]) -> None:
    events = read_events(trained_run[0])
    assert [e["event"] for e in events].count("train_start") == 1
    start = events[0]
    assert (start["iteration"], start["iterations"], start["consumed_samples"]) == (0, 60, 0)
    assert start["parameters"] == Checkpoint.open(trained_run[0]).spec.vocab * 16 + 16 * 16 + 2 * 3280 + 32
    assert start["layout"] == {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "dp": 1}
    assert (start["global_batch_size"], start["seq_length"], start["device"]) == (8, 16, "cpu")
    assert start["config"]["optimizer"]["lr"] == 0.02
    train = [e for e in events if e["event"] == "train_log"]
    assert [e["iteration"] for e in train] == [10, 20, 30, 40, 50, 60]
    assert [e["consumed_samples"] for e in train] == [80 * i for i in range(1, 7)]
    assert [e["consumed_tokens"] for e in train] == [80 * 16 * i for i in range(1, 7)]
    for event in train:
        assert set(event) == {"event", *(field.name for field in fields(LogLine))}
        assert event["tokens_per_second"] > 0
        assert event["tflops"] > 0
        assert event["mfu"] is None, "the peak of a CPU is not known"
        assert event["memory"]["peak"] > 1 << 20
        phases = event["timers"]
        assert 0 < phases["forward-compute"] < phases["forward-backward"] <= event["iteration_seconds"]
        assert event["timers_of_ranks"] == {}
    validations = [e for e in events if e["event"] == "validation"]
    assert [e["iteration"] for e in validations] == [30, 60]
    assert all(set(e) == {"event", *(field.name for field in fields(ValidationEnd))} for e in validations)
    assert [e["iteration"] for e in events if e["event"] == "checkpoint"] == [20, 40, 60]


def test_a_checkpoint_carries_its_tokenizer_and_its_configuration(
    trained_run: tuple[Path, CommandResult], corpus: Path
) -> None:
    checkpoint = Checkpoint.open(trained_run[0])
    assert checkpoint.iteration == 60
    assert checkpoint.trainer["consumed_samples"] == 480
    assert (checkpoint.folder / "tokenizer").is_dir()
    resumed = _run(
        "gpt",
        "--config",
        str(checkpoint.folder / "run.toml"),
        "--train-iters",
        "60",
        "--load",
        str(trained_run[0]),
    )
    assert "nothing is left to train" in resumed.stdout


def test_a_run_resumed_from_its_middle_ends_bitwise_where_it_ended(
    trained_run: tuple[Path, CommandResult], corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "again"
    middle = str(trained_run[0] / "iter_0000040")
    result = _gpt(corpus, "--load", middle, "--save", str(run), "--split", "80,20,0")
    assert "from iteration 40" in result.stdout
    ours, theirs = Checkpoint.open(run), Checkpoint.open(trained_run[0])
    assert sorted(ours.files) == sorted(theirs.files)
    for file in ours.files:
        assert (ours.folder / file).read_bytes() == (theirs.folder / file).read_bytes(), file


def test_a_finetuned_run_begins_at_the_first_iteration_with_low_loss(
    trained_run: tuple[Path, CommandResult], corpus: Path, tmp_path: Path
) -> None:
    argv = ["--load", str(trained_run[0]), "--finetune", "--save", str(tmp_path), "--train-iters", "3"]
    _gpt(corpus, *argv, "--log-interval", "1", "--lr", "1e-4")
    start, first, *_ = read_events(tmp_path)
    assert (start["iteration"], first["iteration"]) == (0, 1)
    assert first["loss"] < 1.6


def test_the_first_run_of_a_script_that_always_resumes_begins_anew_and_warns(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = ["--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"), "--exit-interval", "2"]
    _gpt(corpus, *script)
    assert caplog.messages == [
        f"{tmp_path / 'run'} contains no checkpoint yet: the run starts from new weights"
    ]
    second = _gpt(corpus, *script)
    assert len(caplog.messages) == 1
    assert "from iteration 2" in second.stdout
    assert Checkpoint.open(tmp_path / "run").iteration == 4


def test_a_curve_of_the_run_is_drawn(trained_run: tuple[Path, CommandResult], tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    assert _run("curve", str(trained_run[0]), "--output", str(picture)).stdout == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert _refusal(_run("curve", str(tmp_path), code=2)).startswith(
        f"{tmp_path}: contains no event log of a run"
    )
    nowhere = tmp_path / "none"
    assert _refusal(_run("curve", str(trained_run[0]), "--output", str(nowhere / "loss.png"), code=2)) == (
        f"--output: no such folder: found {nowhere}; hint: mkdir -p {nowhere}"
    )


def test_a_run_that_diverges_stops_with_one_line_and_the_checkpoint_before_is_whole(
    corpus: Path, tmp_path: Path
) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "1", "--lr", "1e38", "--clip-grad", "0"]
    result = _gpt(corpus, *argv, code=2)
    refusal = _refusal(result)
    assert re.match(
        r"iteration \d+: loss or gradient is not finite: found loss \S+, gradient norm (nan|inf), first in",
        refusal,
    )
    before = int(re.findall(r"\d+", refusal)[0]) - 1
    assert Checkpoint.open(tmp_path).iteration == before > 0


def test_a_mistake_in_the_files_is_one_line(
    corpus: Path, trained_run: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", f"{cut}{suffix}")
    os.truncate(f"{cut}.idx", 60)
    assert _refusal(_gpt(cut, code=2)).startswith(f"{cut}.idx: size in bytes: found 60, wanted ")
    assert _refusal(_gpt(tmp_path / "none", code=2)).startswith(f"{tmp_path / 'none'}.")
    missing = _refusal(_gpt(corpus, "--load", str(tmp_path / "nowhere"), code=2))
    assert missing == (
        f"{tmp_path / 'nowhere'}: no such folder: wanted a checkpoint or the folder of a run; "
        f"hint: ls {tmp_path}"
    )
    assert _refusal(_run("gpt", *TINY, *TRAINING, code=2)) == (
        "--data-path: missing: wanted prefix of an indexed dataset; hint: --data-path P"
    )

    wide = tmp_path / "wide"
    with IndexedWriter(wide, "uint16") as out:
        for _ in range(50):
            out.add(range(100, 120))
            out.end_document()
    refusal = _refusal(_gpt(wide, "--vocab-size", "33", code=2))
    assert refusal.startswith(f"{wide}: contains a token outside the model's vocabulary: found 11")
    with IndexedWriter(tmp_path / "thin", "uint16") as out:
        for length in (100, 1):
            out.add([1] * length)
            out.end_document()
    argv = ["--vocab-size", "33", "--eval-iters", "1", "--split", "50,50,0"]
    thin = _refusal(_gpt(tmp_path / "thin", *argv, code=2))
    assert thin.startswith(
        "--data-path: the validation split contains too few tokens for one sample: found 1 tokens"
    )


def test_more_processes_than_gpus_are_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert _refusal(_gpt(corpus, code=2)) == (
        "--device: more processes on this machine than GPUs: found process 2 and 1 GPUs, "
        "wanted a GPU for each process; hint: torchrun --nproc-per-node 1, or --device cpu"
    )


def test_weights_without_an_optimizer_are_for_finetuning(
    corpus: Path, trained_run: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(Checkpoint.open(trained_run[0]).folder, bare)
    manifest = json.loads((bare / "manifest.json").read_text())
    for space in ("optim.exp_avg", "optim.exp_avg_sq"):
        del manifest["tensors"][space]
    replace_manifest(bare, json.dumps(manifest))
    assert _refusal(_gpt(corpus, "--load", str(bare), code=2)) == (
        f"{bare}: contains no optimizer state to resume with: found model, "
        "wanted optim.exp_avg, optim.exp_avg_sq; hint: --finetune starts a new run from its weights"
    )
    _gpt(corpus, "--load", str(bare), "--finetune", "--train-iters", "1")
    assert _refusal(_gpt(corpus, "--load", str(trained_run[0]), "--optimizer", "muon", code=2)).endswith(
        "contains the state of --optimizer adam: found optim.exp_avg, optim.exp_avg_sq, wanted "
        "optim.exp_avg, "
        "optim.exp_avg_sq, optim.momentum; hint: --optimizer adam, or --finetune starts a new run "
        "from its weights"
    )
    trainer = {"consumed_samples": 480}
    (bare / "trainer.json").write_text(json.dumps(trainer))
    shutil.copy(Checkpoint.open(trained_run[0]).folder / "manifest.json", bare)
    rewrite_checksums(bare, FORMAT)
    assert "trainer.json: optimizer_steps: not a count: found None" in _refusal(
        _gpt(corpus, "--load", str(bare), code=2)
    )
    trainer |= {"optimizer_steps": 60, "skipped_samples": -8}
    (bare / "trainer.json").write_text(json.dumps(trainer))
    rewrite_checksums(bare, FORMAT)
    assert "trainer.json: skipped_samples: not a count: found -8" in _refusal(
        _gpt(corpus, "--load", str(bare), code=2)
    )


def test_a_corpus_of_another_tokenizer_is_refused(
    trained_run: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    identity = open_tokenizer("NullTokenizer", vocab_size=20).identity
    with IndexedWriter(tmp_path / "other", "uint16", info=DatasetInfo(tokenizer=identity)) as out:
        out.add([1, 2, 3] * 200)
        out.end_document()
    refusal = _refusal(_gpt(tmp_path / "other", "--load", str(trained_run[0]), code=2))
    assert refusal.startswith("--data-path: tokenizer of the dataset is not the model's: found NullTokenizer")


def test_every_rank_refuses_a_layout_and_one_says_so(corpus: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    cut = ["--tensor-model-parallel-size", "2", "--num-attention-heads", "1", "--save", str(tmp_path / "run")]
    argv = [*torchrun, "-m", "mega_train", "gpt", "--data-path", str(corpus), *TINY, *TRAINING, *cut]
    result = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 1, "torchrun's own code"
    assert re.findall("^error: .*", result.stderr, re.MULTILINE) == [
        "error: layers.0.qkv.weight: 1 heads cannot be split evenly over tp: found tp=2, "
        "wanted a divisor of 1; hint: --tensor-model-parallel-size 1"
    ]
    assert not (tmp_path / "run").exists()


def test_a_rank_beside_the_first_speaks_when_nothing_ended_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    missing = ["gpt", "--data-path", str(corpus.with_name("none")), *TINY, *TRAINING]
    assert _refusal(_run(*missing, code=2)).startswith(str(corpus.with_name("none")))
    assert waited == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert _refusal(_run(*missing, code=2)).startswith(str(corpus.with_name("none")))
    assert waited == [REPORT_DELAY]
