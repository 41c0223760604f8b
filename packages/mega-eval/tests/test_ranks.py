import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from mega_eval.cli import cli
from mega_eval.models.decoder_model import open_checkpoint
from mega_eval.models.interface import GenerationRequest
from mega_eval.models.session import EvaluationSession
from mega_eval.windows import Window, as_tokens
from mega_schema.app import cli_runner
from tests import evaluation_programs, fork_server

VOCAB = 41
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]


@pytest.fixture(scope="module")
def deep_run(checkpoint_writer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "run"
    checkpoint_writer(folder, layers=3)
    return folder


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(4)
    windows = []
    for _ in range(40):
        prefix = [1, 2, 3, 4] if rng.random() < 0.5 else []
        size = rng.randint(2, 13)
        tokens = prefix + [rng.randrange(VOCAB) for _ in range(size)]
        windows.append((tokens, rng.randint(1, size - 1)))
    prompts = [([rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 20))], []) for _ in range(7)]
    return {"windows": windows, "prompts": [*prompts, ([3, 4, 5], ["1", "2"])]}


@pytest.fixture(scope="module")
def reference_answers(deep_run, requests):
    session = EvaluationSession(open_checkpoint(deep_run, dtype="float32", device="cpu"))
    scores = session.score([Window(as_tokens(tokens), count) for tokens, count in requests["windows"]])
    texts = session.generate(
        [GenerationRequest(tuple(ids), 6, tuple(stop)) for ids, stop in requests["prompts"]]
    )
    return scores, texts


def start_ranks(run, folder, requests, tp, pp, dp, victim=-1, *, batch_invariant=False):
    """Run all ranks; return exit codes and what they wrote to stderr."""
    (folder / "requests.json").write_text(json.dumps(requests))
    settings = {
        "load": str(run),
        "dtype": "float32",
        "device": "cpu",
        "batch_size": None,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "batch_invariant": batch_invariant,
    }
    with contextlib.ExitStack() as stack:
        programs, logs = [], []
        for rank in range(tp * pp * dp):
            logs.append(stack.enter_context(tempfile.TemporaryFile()))
            programs.append(
                fork_server.start(
                    "tests.evaluation_programs:run_rank",
                    [str(rank), json.dumps(settings), str(folder), str(victim)],
                    imports=evaluation_programs.IMPORTS,
                    hash_seed=rank % 2,
                    stderr=logs[-1].fileno(),
                )
            )
            stack.callback(programs[-1].wait)
            stack.callback(programs[-1].kill)
        codes = [program.wait(60) for program in programs]
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read().decode())
        return codes, texts


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
def test_ranks_equal_one_process(deep_run, tmp_path, requests, reference_answers, tp, pp, dp):
    codes, texts = start_ranks(deep_run, tmp_path, requests, tp, pp, dp)
    assert codes == [0] * (tp * pp * dp), texts
    answers = json.loads((tmp_path / "answers.json").read_bytes())
    scores, continuations = reference_answers
    for logprobs, greedy, score in zip(answers["logprobs"], answers["greedy"], scores, strict=True):
        assert np.abs(np.array(logprobs) - score.logprobs).max() < 1e-5
        assert greedy == score.greedy_ids.tolist()
    assert answers["texts"] == continuations
    assert answers["layout"] == {"tp": tp, "pp": pp, "dp": dp}


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [
        pytest.param(1, 2, 1, marks=pytest.mark.long),
        pytest.param(1, 1, 2, marks=pytest.mark.long),
        (1, 2, 2),
    ],
)
def test_batch_invariant_ranks_have_the_bits_of_one_process(deep_run, tmp_path, requests, tp, pp, dp):
    model = open_checkpoint(deep_run, dtype="float32", device="cpu", batch_invariant=True)
    windows = [Window(as_tokens(tokens), count) for tokens, count in requests["windows"]]
    scores = EvaluationSession(model).score(windows)
    codes, texts = start_ranks(deep_run, tmp_path, requests, tp, pp, dp, batch_invariant=True)
    assert codes == [0] * (tp * pp * dp), texts
    answers = json.loads((tmp_path / "answers.json").read_bytes())
    assert answers["logprobs"] == [score.logprobs.tolist() for score in scores]
    assert answers["greedy"] == [score.greedy_ids.tolist() for score in scores]


def test_a_rank_that_dies_ends_the_others_with_one_line(deep_run, tmp_path, requests):
    codes, texts = start_ranks(deep_run, tmp_path, requests, 1, 2, 1, victim=1)
    assert codes == [2, -signal.SIGKILL]
    assert texts[0].startswith("error: --tp, --pp, --dp: a rank has ended: found ")
    assert "repeat the command to resume" in texts[0]
    assert texts[0].count("\n") == 1
    assert not (tmp_path / "answers.json").exists()


@pytest.fixture
def words(deep_run, tmp_path):
    data = tmp_path / "held-out.jsonl"
    texts = [" ".join(str(n * 7 % 40) for n in range(s, 2 * s + 4)) for s in range(1, 10)]
    data.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return ["lambada", f"--load={deep_run}", f"--data={data}", "--device=cpu", "--strict-lambada"]


def call(words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, words)
    return exit_info.value.code or 0, *capsys.readouterr()


def test_the_command_starts_its_own_ranks(words, tmp_path, capsys):
    assert call([*words, f"--output={tmp_path / 'a.json'}"], capsys)[0] == 0
    command = [sys.executable, "-m", "mega_eval", *words, f"--output={tmp_path / 'b.json'}", "--tp=2"]
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")
    alone, together = (json.loads((tmp_path / name).read_bytes()) for name in ("a.json", "b.json"))
    assert together["model"]["layout"] == {"tp": 2, "pp": 1, "dp": 1}
    assert together["metrics"]["accuracy"] == alone["metrics"]["accuracy"]
    for name, metric in alone["metrics"].items():
        assert together["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-5)
    assert together["model"]["sha256"] == alone["model"]["sha256"]
    assert together["model"]["parameters"] == alone["model"]["parameters"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp=3"], "--tp: does not divide the 2 query heads: found 3, wanted 1 | 2; hint: --tp 2"),
        (["--pp=4"], "--pp: a stage would have no layer: found 4 stages for 3 layers; hint: --pp 3"),
        (
            ["--tp=2", "--batch-invariant"],
            "--batch-invariant: sums over tensor-parallel ranks change the bits",
        ),
    ],
)
def test_a_layout_that_the_model_does_not_have_is_one_line(words, tmp_path, capsys, flags, message):
    code, out, err = call([*words, f"--output={tmp_path / 'a.json'}", *flags], capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_another_number_of_processes_than_torchrun_started_is_one_line(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, _, err = call([*words, f"--output={tmp_path / 'a.json'}", "--tp=2"], capsys)
    assert code == 2
    assert "found 2 x 1 x 1 for 3 processes; hint: torchrun --nproc-per-node 2" in err
