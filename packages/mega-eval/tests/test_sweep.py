import json
import shutil
from statistics import mean, stdev

import pytest
from click.testing import CliRunner

from mega_eval.charts import format_count
from mega_eval.cli import cli
from mega_eval.sweep import Sweep, find_end, follow_run
from mega_schema.checkpoint.checkpoint_dir import EVENTS
from mega_schema.errors import ConfigError, FormatError, MegaError
from tests.result_files import make_examples, write_made_up

LINES = '{"text": "1 2 3 4 5"}\n{"text": "7 8 9"}\n{"text": "3 1 9 2"}\n'


@pytest.fixture
def training(checkpoint_writer, tmp_path):
    """A run with checkpoints at iterations 10 and 20, and a file for LAMBADA."""
    run = tmp_path / "run"
    for iteration in (10, 20):
        checkpoint_writer(run, iteration=iteration)
    (tmp_path / "data.jsonl").write_text(LINES)
    return run


@pytest.fixture
def call(training, tmp_path, monkeypatch):
    """A function that sweeps LAMBADA over the run, and returns the output and the record."""
    monkeypatch.chdir(tmp_path)

    def sweep(*options, task=("lambada", "--data", "data.jsonl", "--device=cpu")):
        words = ["sweep", *options, "run", *task]
        outcome = CliRunner().invoke(cli, words, catch_exceptions=False)
        return outcome.output, json.loads((tmp_path / "sweep-lambada-run/sweep.json").read_bytes())

    return sweep


def test_tokens_of_the_training_are_in_points_and_results(call, training, checkpoint_writer, tmp_path):
    checkpoint_writer(training, iteration=30, trainer={"consumed_tokens": 7680})
    points = call("--no-plot")[1]["points"]
    folder = tmp_path / "sweep-lambada-run"
    models = [json.loads((folder / point["result"]).read_bytes())["model"] for point in points]
    assert [point["tokens"] for point in points] == [None, None, 7680]
    assert [model["tokens"] for model in models] == [None, None, 7680]


def log_events(run, *events):
    with (run / EVENTS).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_every_checkpoint_is_evaluated_once(call, training, checkpoint_writer, tmp_path):
    output, record = call("--no-plot", "--last", "2")
    assert [point["iteration"] for point in record["points"]] == [10, 20]
    folder = tmp_path / "sweep-lambada-run"
    values = [
        json.loads((folder / point["result"]).read_bytes())["metrics"]["accuracy"]["value"]
        for point in record["points"]
    ]
    assert [point["metrics"]["accuracy"]["value"] for point in record["points"]] == values
    assert "all checkpoints are evaluated; written to sweep-lambada-run/sweep.json" in output
    before = (folder / "iter_0000010.json").stat().st_mtime_ns
    checkpoint_writer(training, iteration=30)
    output, record = call("--no-plot")
    assert [point["iteration"] for point in record["points"]] == [10, 20, 30]
    assert output.count("is there already") == 2
    assert (folder / "iter_0000010.json").stat().st_mtime_ns == before
    call("--no-plot", "--overwrite")
    assert (folder / "iter_0000010.json").stat().st_mtime_ns != before


def test_a_result_of_other_weights_or_other_data_is_not_taken(call, training, checkpoint_writer, tmp_path):
    call("--no-plot")
    shutil.rmtree(training / "iter_0000020")
    checkpoint_writer(training, iteration=20, vocab=45)
    assert call("--no-plot")[0].count("is there already") == 1
    assert call("--no-plot")[0].count("is there already") == 2
    (tmp_path / "data.jsonl").write_text(LINES * 2)
    assert "is there already" not in call("--no-plot")[0]
    (tmp_path / "sweep-lambada-run/iter_0000010.samples.jsonl").unlink()
    assert call("--no-plot")[0].count("is there already") == 1


def test_a_chart_is_written(call, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    call()
    assert (tmp_path / "sweep-lambada-run/sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_of_other_options_is_refused(call, training, tmp_path):
    call("--no-plot")
    with pytest.raises(
        ConfigError, match=r"--output: contains a sweep with other options: found lambada .*cpu, "
    ):
        call("--no-plot", task=("lambada", "--data", "data.jsonl", "--device=cpu", "--strict-lambada"))
    shutil.copytree(training, tmp_path / "elsewhere/run")
    with pytest.raises(
        ConfigError, match=r"--output: contains a sweep with another run: found .*/run, wanted"
    ):
        Sweep(tmp_path / "elsewhere/run", tmp_path / "sweep-lambada-run", ["lambada"], last=5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "compare"), r"TASK: not a task: found compare, wanted lambada \| "),
        (
            ("run", "lambada", "--load", "x"),
            r"--load: the sweep chooses the checkpoint; hint: leave --load out",
        ),
        (("run", "lamabda"), r"TASK: not a task: found lamabda, .*; hint: did you mean lambada\?"),
        (("rum", "lambada", "--no-plot"), r"rum: no such folder: wanted the folder of a run; hint: ls \."),
        (("run", "lambada", "--no-plot", "--output", "no/where"), r"--output: no such folder: found no"),
    ],
)
def test_mistakes_are_refused(training, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MegaError, match=message):
        CliRunner().invoke(cli, ["sweep", *words], catch_exceptions=False)


def test_a_task_that_fails_at_its_first_checkpoint_leaves_nothing_behind(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for words in (["--data", "missing.jsonl"], ["--data", "data.jsonl", "--nothing"], []):
        outcome = CliRunner().invoke(cli, ["sweep", "--no-plot", "run", "lambada", *words])
        assert isinstance(outcome.exception, SystemExit | MegaError)
        assert sorted(tmp_path.iterdir()) == before


def test_a_run_without_a_checkpoint_is_refused_unless_it_is_followed(tmp_path):
    (tmp_path / "run").mkdir()
    sweep = Sweep(tmp_path / "run", tmp_path, ["lambada"], last=5)
    with pytest.raises(FormatError, match="contains no finished checkpoint"):
        follow_run(sweep, lambda iteration: None, follow=False, until=None, sleep=None, seconds=1)


class Follower:
    """Follows a run in which each wait adds what `after_waits` says."""

    def __init__(self, run, folder, after_waits):
        self.sweep = Sweep(run, folder, ["lambada"], last=2)
        self.waits = []
        self.evaluated = []
        self._after_waits = list(after_waits)

    def evaluate(self, iteration):
        def write(checkpoint, path):
            write_made_up(path, make_examples([True] * iteration + [False] * 10))

        self.evaluated.append(iteration)
        self.sweep.add(iteration, write)

    def sleep(self, seconds):
        self.waits.append(seconds)
        self._after_waits.pop(0)()

    def follow(self, until=None):
        return follow_run(self.sweep, self.evaluate, follow=True, until=until, sleep=self.sleep, seconds=7.0)


def test_a_running_training_is_followed_to_its_last_iteration(training, checkpoint_writer, tmp_path):
    log_events(training, {"event": "train_start", "iteration": 0, "iterations": 40})

    def save(iteration):
        checkpoint_writer(training, iteration=iteration)
        log_events(training, {"event": "checkpoint", "iteration": iteration, "error": None})

    follower = Follower(training, tmp_path, [lambda: save(30), lambda: None, lambda: save(40)])
    assert follower.follow() == "the run has finished its 40 iterations"
    assert (follower.evaluated, follower.waits) == ([10, 20, 30, 40], [7.0] * 3)
    spread = follower.sweep.measure_spread()["accuracy"]
    values = [30 / 40, 40 / 50]
    assert (spread.mean, spread.stdev, spread.checkpoints) == (mean(values), stdev(values), 2)


def test_following_ends_after_a_given_iteration(training, checkpoint_writer, tmp_path):
    def save():
        for iteration in (25, 30, 35):
            checkpoint_writer(training, iteration=iteration)

    follower = Follower(training, tmp_path, [save])
    assert follower.follow(until=30) == "iteration 30 is evaluated"
    assert follower.evaluated == [10, 20, 25, 30]


def test_ctrl_c_while_waiting_is_a_way_to_end(training, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    follower = Follower(training, tmp_path, [interrupt])
    assert follower.follow() == "interrupted while waiting for the next checkpoint"
    assert follower.evaluated == [10, 20]


def test_a_checkpoint_that_the_run_removed_is_skipped(training, tmp_path):
    follower = Follower(training, tmp_path, [])
    evaluate = follower.evaluate

    def remove_then_evaluate(iteration):
        if iteration == 10:
            shutil.rmtree(training / "iter_0000010")
        evaluate(iteration)

    follower.evaluate = remove_then_evaluate
    assert follower.follow(until=20) == "iteration 20 is evaluated"
    assert [point.iteration for point in follower.sweep.points] == [20]


def test_the_event_log_says_whether_a_run_has_ended(training):
    assert find_end(training) is None
    start = {"event": "train_start", "iteration": 0, "iterations": 1000}
    log_events(training, start)
    assert find_end(training) is None
    log_events(training, {"event": "train_exit", "iteration": 20, "reason": "SIGTERM"})
    assert find_end(training) == "the run exited at iteration 20 (SIGTERM)"
    log_events(training, start, {"event": "checkpoint", "iteration": 1000, "error": "No space left"})
    with (training / EVENTS).open("a") as file:
        file.write('{"event": "train_ex')
    assert find_end(training) is None
    log_events(training, {}, {"event": "checkpoint", "iteration": 1000, "error": None})
    assert find_end(training) == "the run has finished its 1,000 iterations"


def test_counts_of_tokens_are_short():
    assert [format_count(value) for value in (0, 9000, 12_500, 12_500_000, 3e9)] == [
        "0",
        "9000",
        "12.5k",
        "12.5M",
        "3B",
    ]
