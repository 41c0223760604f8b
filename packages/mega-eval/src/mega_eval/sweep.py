"""Evaluate the checkpoints of a run one after another, and measure how much the last ones scatter.

The scatter of a metric over the last checkpoints of one run is noise that a single checkpoint hides: a
difference between two runs that is smaller says little (arXiv:2508.13144).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mega_eval.models.decoder_model import hash_weights, read_consumed_tokens
from mega_eval.outputs import write_json
from mega_eval.result import fingerprint_files
from mega_eval.result_reader import EvaluationResult, read_result
from mega_schema.checkpoint.checkpoint_dir import EVENTS, iteration_folder, iterations
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.tracker import latest_iteration
from mega_schema.errors import ConfigError, FormatError

FORMAT = 1
RECORD = "sweep.json"


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """A metric at one checkpoint; None where it is not defined."""

    value: float
    stderr: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One checkpoint that was evaluated.

    Attributes:
        tokens: tokens the run had consumed; None where the checkpoint does not say.
        result: name of the result's file in the folder of the sweep.
    """

    iteration: int
    tokens: int | None
    checkpoint_sha256: str
    result: str
    metrics: dict[str, MetricPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpread:
    """Mean and sample standard deviation of a metric over the last checkpoints."""

    mean: float
    stdev: float | None
    checkpoints: int


class Sweep:
    """The results of one task on the checkpoints of one run, in a folder.

    Args:
        run: the run's folder.
        folder: of the results and of the record, `sweep.json`.
        words: the task and its options.
        last: number of checkpoints at the end whose spread is measured.
        overwrite: evaluate checkpoints again that have a result.

    Raises:
        ConfigError: the folder has results of other options or of another run.
    """

    def __init__(
        self, run: Path, folder: Path, words: Sequence[str], *, last: int, overwrite: bool = False
    ) -> None:
        self.run = run
        self.folder = folder
        self.words = list(words)
        self.points: list[SweepPoint] = []
        self._last = last
        self._overwrite = overwrite
        if not overwrite:
            self._check_record()

    def create_folder(self) -> None:
        """Create the folder with a record, by which a repeated command recognises it."""
        self.folder.mkdir(exist_ok=True)
        self.write_record()

    def remove_empty_folder(self) -> None:
        """Remove the folder of a sweep that failed at its first checkpoint."""
        if not self.points and [path.name for path in self.folder.iterdir()] == [RECORD]:
            (self.folder / RECORD).unlink()
            self.folder.rmdir()

    def result_path(self, iteration: int) -> Path:
        """Return the file of a checkpoint's result."""
        return self.folder / f"{iteration_folder(self.run, iteration).name}.json"

    def list_pending(self) -> list[int]:
        """Return the iterations of the checkpoints that have no point yet, ascending."""
        evaluated = {point.iteration for point in self.points}
        return [iteration for iteration in iterations(self.run) if iteration not in evaluated]

    def add(self, iteration: int, evaluate: Callable[[Path, Path], None]) -> bool:
        """Evaluate a checkpoint, unless its result is there already, and write the record.

        Args:
            evaluate: evaluates a checkpoint's folder and writes a result file.

        Returns:
            whether it was evaluated now.
        """
        checkpoint = Checkpoint(iteration_folder(self.run, iteration))
        sha256 = hash_weights(checkpoint)
        path = self.result_path(iteration)
        result = None if self._overwrite else _find_result(path, sha256)
        is_new = result is None
        if result is None:
            evaluate(checkpoint.folder, path)
            result = read_result(path)
        self.points.append(
            SweepPoint(
                iteration=iteration,
                tokens=read_consumed_tokens(checkpoint),
                checkpoint_sha256=sha256,
                result=path.name,
                metrics={
                    name: MetricPoint(metric.value, metric.stderr, metric.interval)
                    for name, metric in result.metrics.items()
                },
            )
        )
        self.points.sort(key=lambda point: point.iteration)
        self.write_record()
        return is_new

    def measure_spread(self) -> dict[str, MetricSpread]:
        """Return mean and standard deviation of each metric over the last checkpoints."""
        last = self.points[-self._last :]
        names = dict.fromkeys(name for point in last for name in point.metrics)
        spreads = {}
        for name in names:
            values = [point.metrics[name].value for point in last if name in point.metrics]
            deviation = stdev(values) if len(values) > 1 else None
            spreads[name] = MetricSpread(mean=fmean(values), stdev=deviation, checkpoints=len(values))
        return spreads

    def write_record(self) -> None:
        """Write `sweep.json`."""
        record = {
            "format": FORMAT,
            "run": str(self.run.resolve()),
            "words": self.words,
            "points": [asdict(point) for point in self.points],
            "spread": {name: asdict(spread) for name, spread in self.measure_spread().items()},
        }
        write_json(self.folder / RECORD, record)

    def _check_record(self) -> None:
        record = read_record(self.folder)
        if record is None:
            return
        for key, wanted in (("run", str(self.run.resolve())), ("words", self.words)):
            if record.get(key) != wanted:
                values = [" ".join(v) if isinstance(v, list) else v for v in (record.get(key), wanted)]
                raise ConfigError(
                    "--output",
                    f"contains a sweep with {'other options' if key == 'words' else 'another run'}",
                    found=values[0],
                    wanted=values[1],
                    hint="name another folder, or add --overwrite",
                )


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record in the folder of a sweep; None if there is none."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and {"run", "words", "points"} <= record.keys() else None


def _find_result(path: Path, sha256: str) -> EvaluationResult | None:
    """Return the result of an earlier sweep, if it is of these weights and its data is unchanged."""
    try:
        result = read_result(path)
        result.examples  # noqa: B018  the file of the examples may be missing
        paths = [Path(entry["path"]) for entry in result.record["data"]]
        is_current = fingerprint_files(paths) == result.record["data"]
    except (FormatError, OSError):
        return None
    return result if is_current and result.record["model"]["sha256"] == sha256 else None


def follow_run(
    sweep: Sweep,
    evaluate: Callable[[int], None],
    *,
    follow: bool,
    until: int | None,
    sleep: Callable[[float], None],
    seconds: float,
) -> str:
    """Evaluate all checkpoints, and those that a running training adds.

    Args:
        evaluate: evaluates the checkpoint of an iteration; a checkpoint that the run removed is skipped.
        follow: wait for more until the run ends.
        until: end after a checkpoint of this iteration or a later one.
        sleep, seconds: called between two looks at the run, with the time to wait.

    Returns:
        why it ended.

    Raises:
        FormatError: the run has no checkpoint and is not followed.
    """
    skipped: set[int] = set()
    if not follow:
        latest_iteration(sweep.run)
    while True:
        # read the log first: a checkpoint saved between the two looks is still evaluated
        end = find_end(sweep.run)
        for iteration in sweep.list_pending():
            if iteration in skipped or (until is not None and iteration > until):
                continue
            try:
                evaluate(iteration)
            except (FormatError, OSError):
                if iteration_folder(sweep.run, iteration).exists():
                    raise
                skipped.add(iteration)
        newest = max([-1, *skipped, *(point.iteration for point in sweep.points)])
        if not follow:
            return "all checkpoints are evaluated"
        if until is not None and newest >= until:
            return f"iteration {until} is evaluated"
        if end is not None:
            return end
        try:
            sleep(seconds)
        except KeyboardInterrupt:  # nothing is lost: Ctrl-C is a way to end
            return "interrupted while waiting for the next checkpoint"


def find_end(run: Path) -> str | None:
    """Return why a run has ended, from its event log; None while it goes on or does not say."""
    end = None
    total = None
    for event in _read_events(run / EVENTS):
        name = event.get("event")
        if name == "train_start":
            total, end = event.get("iterations"), None
        elif name == "checkpoint" and not event.get("error") and event.get("iteration") == total:
            end = f"the run has finished its {total:,} iterations"
        elif name == "train_exit":
            end = f"the run exited at iteration {event.get('iteration'):,} ({event.get('reason')})"
    return end


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run; a line that is being written is passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
