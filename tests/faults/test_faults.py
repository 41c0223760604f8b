"""After any fault of a rank, no rank hangs, one line reports it, and the last checkpoint is intact."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mega_ckpt.checkpoint.verify import verify
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_train.fault_tolerance.watchdog import EXIT_RANK_LOST, EXIT_TERMINATED
from mega_train.telemetry.event_log import read_events
from tests.faults.ranks import EVERY, STEPS, Fault, RunningRanks, bad_token_at, poison_at, signal_at, start
from tests.selection import one_of_each_kind, requested_values

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "told": signal.SIGTERM}
LIMIT = 8.0  # seconds that a hang may last; a crowded machine can be silent for some
LAYOUTS = (
    (2, ()),
    (2, ("parallel.tensor_model_parallel_size=2",)),
    (2, ("parallel.pipeline_model_parallel_size=2",)),
    (4, ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")),
    (4, ("parallel.pipeline_model_parallel_size=2",)),
)


@dataclass(frozen=True)
class Case:
    """A rank, a step, and what happens there."""

    kind: str
    ranks: int
    sets: tuple[str, ...]
    victim: int
    iteration: int
    after: float

    @property
    def watch_settings(self) -> tuple[str, ...]:
        """The layout, and where a hang is awaited, a limit to it."""
        limit = (f"parallel.distributed_timeout_minutes={LIMIT / 60}",) if self.kind == "stop" else ()
        return (*self.save_settings, *limit)

    @property
    def save_settings(self) -> tuple[str, ...]:
        """The layout, and how it saves: where no save is at issue, without a process for each."""
        return self.sets if self.kind in ("kill", "told") else (*self.sets, "checkpoint.async_save=false")

    @property
    def fault(self) -> Fault:
        if self.kind == "nan":
            return poison_at(self.iteration)
        return signal_at(self.iteration, _SIGNALS[self.kind], self.after)


def _cases() -> list[Case]:
    rng = random.Random(20)
    kinds = ["kill"] * 17 + ["stop"] * 17 + ["nan"] * 16 + ["told"] * 10
    return [
        Case(kind, ranks, sets, rng.randrange(ranks), rng.randrange(1, STEPS), rng.uniform(0, 0.05))
        for kind in kinds
        for ranks, sets in [rng.choice(LAYOUTS)]
    ]


CASES = _cases()
AT_ONCE = 6  # runs that mostly wait
TIME = LIMIT + 2 * 5 + 30  # the limit, the watchdog's patience twice, and a crowded machine


@pytest.fixture(scope="module")
def make_undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[str, ...]], Path]:
    """Train an undisturbed run on a layout, on first use."""

    @cache
    def run(ranks: int, sets: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        running = start(folder / "run", folder / "save", ranks, (*sets, "checkpoint.async_save=false"))
        assert running.wait(60), running.stderr_text()
        assert set(running.codes.values()) == {0}, running.stderr_text()
        return folder / "save"

    return run


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_undisturbed_run: Callable[[int, tuple[str, ...]], Path],
) -> dict[Case, str]:
    """Run the requested cases, some at a time, and return the failure of each."""
    failures: dict[Case, str] = {}
    asked = requested_values(request, "case")
    waiting = [case for case in CASES if case in asked]
    while waiting:
        batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        runs = []
        for case in batch:
            folder = tmp_path_factory.mktemp("fault")
            runs.append(
                (
                    case,
                    start(
                        folder / "run",
                        folder / "save",
                        case.ranks,
                        case.watch_settings,
                        {case.victim: case.fault},
                    ),
                )
            )
        for case, running in runs:
            failures[case] = _ended_well(case, running)
        for case, running in runs:
            save, sets = running.folder.parent / "save", case.sets
            resumed = start(running.folder.parent / "again", save, case.ranks, case.save_settings)
            failures[case] = failures[case] or _check_resume(
                resumed, save, make_undisturbed_run(case.ranks, sets)
            )
    return failures


def _ended_well(case: Case, running: RunningRanks) -> str:
    try:
        victim = case.victim if case.kind == "stop" else None
        if not running.wait(TIME, without=victim):
            return f"hangs; ended so far: {running.codes}\n{running.stderr_text()}"
        codes = {rank: code for rank, code in running.codes.items() if rank != victim}
    finally:
        running.kill()
    output = running.stderr_text()
    lines = re.findall(r"^error: .*$", output, re.MULTILINE)
    if case.kind == "nan":
        good = set(codes.values()) == {2} and all("not finite" in line for line in lines) and lines
    elif case.kind == "told":
        good = (
            codes.keys() == set(range(case.ranks))
            and set(codes.values()) in ({EXIT_TERMINATED}, {0})
            and not lines
        )
    elif set(codes.values()) == {0}:
        good = not lines  # the run was over before the signal came
    else:
        survivors = {code for rank, code in codes.items() if rank != case.victim}
        named = re.compile(rf"rank {case.victim} \(\S+\) does not answer")
        good = survivors == {EXIT_RANK_LOST} and len(lines) == 1 and bool(named.search(lines[0]))
    return "" if good else f"ended with {codes}\n{output}"


def _check_resume(running: RunningRanks, save: Path, whole: Path) -> str:
    """Check that no finished checkpoint is damaged, and that the resumed run equals an undisturbed one."""
    if not running.wait(TIME) or set(running.codes.values()) != {0}:
        running.kill()
        return f"does not go on: {running.codes}\n{running.stderr_text()}"
    for folder in sorted(save.glob("iter_*")):
        verify(Checkpoint(folder))
    ours, theirs = Checkpoint.open(save), Checkpoint.open(whole)
    if ours.iteration != STEPS:
        return f"ends at iteration {ours.iteration}"
    for name, tensor in theirs.tensors[MODEL].items():
        for piece in tensor.pieces:
            (counterpart,) = [p for p in ours.tensors[MODEL][name].pieces if p.start == piece.start]
            if not np.array_equal(theirs.map_piece(tensor, piece), ours.map_piece(tensor, counterpart)):
                return f"{name} is not what an undisturbed run gives"
    return ""


@pytest.mark.parametrize(
    "case",
    one_of_each_kind(lambda case: case.kind, CASES),
    ids=lambda case: f"{case.kind}-rank{case.victim}of{case.ranks}",
)
def test_a_fault_ends_the_run_with_its_cause_and_loses_nothing(outcomes: dict[Case, str], case: Case) -> None:
    assert outcomes[case] == ""


@pytest.mark.parametrize("one_before", [True, False])
def test_ranks_agree_on_what_to_do_about_a_damaged_checkpoint(
    tmp_path: Path, make_undisturbed_run: Callable[[int, tuple[str, ...]], Path], one_before: bool
) -> None:
    layout = LAYOUTS[1]
    # beside the run it is a copy of: a run that resumes refuses other data, and its corpus lies there
    whole = make_undisturbed_run(*layout)
    save = Path(shutil.copytree(whole, whole.with_name(f"damaged-{one_before}")))
    newest = save / f"iter_{STEPS:07d}"
    for folder in save.glob("iter_*"):
        if not one_before and folder != newest:
            shutil.rmtree(folder)
    damaged = newest / "model-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    resumed = start(tmp_path / "again", save, *layout)
    what = f"{damaged}: model .*: values are not those that were written"
    if one_before:
        assert _check_resume(resumed, save, make_undisturbed_run(*layout)) == ""
        starts = [event["iteration"] for event in read_events(save) if event["event"] == "train_start"]
        assert starts[-1] == STEPS - EVERY
    else:
        assert resumed.wait(TIME)
        assert set(resumed.codes.values()) == {2}
        first, *others = resumed.stderr_text().splitlines()
        assert re.match(rf"error: {what}; hint: load another iteration", first)
        assert others in ([], [first]), "under torchrun the first rank's end ends the others"


def test_what_one_rank_alone_finds_is_the_one_cause_that_is_said(tmp_path: Path) -> None:
    running = start(tmp_path / "run", tmp_path / "save", 2, (), {1: bad_token_at(2)})
    assert running.wait(TIME), running.stderr_text()
    assert running.codes == {0: EXIT_RANK_LOST, 1: 2}
    assert running.stderr_text() == "error: corpus: contains a token outside the model's vocabulary\n"
