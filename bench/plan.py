"""How well `mega-train plan` predicts the speed of published runs.

    python -m bench.plan [--json FILE] [--fit]

Two constants of the planner are fitted: the share of its peak that a matrix product reaches on an A100 and
on an H100, on every third run of NVIDIA's three tables, marked "fit". The rest of those tables is held out,
but comes from the same team and program. The second table holds the runs of others, and FP8; nothing was
fitted to it. The error is that of the predicted speed. --fit fits again and prints the constants.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.published_other_runs import OTHERS
from bench.published_runs import PUBLISHED, Row
from mega_train.planning.estimate import Estimate, estimate
from mega_train.planning.hardware import GIB, HARDWARE, Hardware
from mega_train.planning.search import variants


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A published value, and the planner's prediction for the same job."""

    row: Row
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Return the published seconds of a step, computed from the utilisation if that was published."""
        if self.row.seconds is not None:
            return self.row.seconds
        assert self.row.utilisation is not None
        predicted = self.estimate.mfu if self.row.counted == "mfu" else self.estimate.hfu
        return self.estimate.seconds.step * predicted / self.row.utilisation

    @property
    def error(self) -> float:
        """Return the relative error of the predicted speed; positive: faster than published."""
        return self.seconds / self.estimate.seconds.step - 1

    def as_json(self) -> dict[str, object]:
        job, layout = self.estimate.workload, self.estimate.workload.layout
        return {
            "table": self.row.table,
            "run": self.row.name,
            "software": self.row.software,
            "hardware": self.row.hardware.name,
            "layout": {name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "dp")},
            "micro_batch": job.micro_batch_size,
            "precision": job.precision.name,
            "recompute": job.recompute.granularity,
            "published_seconds": round(self.seconds, 4),
            "predicted_seconds": round(self.estimate.seconds.step, 4),
            "error": round(self.error, 4),
            "memory_gib": round(self.estimate.peak_rank.total / GIB, 1),
            "fitted": self.row.fitted,
            "note": self.row.note,
        }


def predict(row: Row, hardware: Hardware) -> Prediction:
    """Predict a run; unpublished micro-batch and chunks are the fastest that fit."""
    if row.is_published_whole:
        return Prediction(row, estimate(row.job, hardware))
    return Prediction(row, min(variants(row.job, hardware), key=lambda e: e.seconds.step))


def predictions(rows: Sequence[Row] = PUBLISHED) -> list[Prediction]:
    return [predict(row, row.hardware) for row in rows]


def fit_peak_share(name: str) -> float:
    """Fit the fraction of peak with the least squared errors over the fitted rows."""
    rows = [row for row in PUBLISHED if row.fitted and row.machine == name]

    def squares(gemm: float) -> float:
        hardware = dataclasses.replace(HARDWARE[name], gemm=gemm)
        return sum(predict(row, hardware).error ** 2 for row in rows)

    return min((share / 100 for share in range(50, 100)), key=squares)


def median(errors: list[float]) -> float:
    return statistics.median(abs(error) for error in errors)


def table(rows: list[Prediction]) -> str:
    """Format the runs as a Markdown table."""
    lines = [
        "| table | run | software | tp·pp·vp·cp·dp | micro | published s | predicted s | error % | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in rows:
        layout = p.estimate.workload.layout
        degrees = f"{layout.tp}·{layout.pp}·{layout.vp}·{layout.cp}·{layout.dp}"
        numbers = f"{p.seconds:.2f} | {p.estimate.seconds.step:.2f} | {100 * p.error:+.1f}"
        run, mark = f"{p.row.table} | {p.row.name} | {p.row.software}", "fit" if p.row.fitted else p.row.note
        lines.append(f"| {run} | {degrees} | {p.estimate.workload.micro_batch_size} | {numbers} | {mark} |")
    return "\n".join(lines)


def summary(nvidia: list[Prediction], others: list[Prediction]) -> str:
    held_out = [p.error for p in nvidia if not p.row.fitted]
    rest = [p.error for p in others]
    parts = {
        "NVIDIA's tables": [p.error for p in nvidia],
        "of these, held out of the fit": held_out,
        "runs of others, and FP8": rest,
    }
    return "\n".join(
        f"{name}: {len(errors)} runs, median error {100 * median(errors):.1f} %,"
        f" largest {100 * max(map(abs, errors)):.1f} %"
        for name, errors in parts.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.fit:
        for name in ("a100", "h100"):
            print(f"{name}: gemm {fit_peak_share(name):.2f}, in use {HARDWARE[name].gemm:.2f}")
    nvidia, others = predictions(), predictions(OTHERS)
    print(table(nvidia), table(others), summary(nvidia, others), sep="\n\n")
    if options.json:
        report = {"nvidia": [p.as_json() for p in nvidia], "others": [p.as_json() for p in others]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
