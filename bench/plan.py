"""How well `mega-train plan` predicts published runs: its utilisation beside theirs, and the error.

    python -m bench.plan [--json FILE] [--fit]

Of the planner's constants two are fitted, the share of its peak that a matrix product of each kind of GPU can
reach, on the rows marked "fit"; all others are held out. --fit does that again and prints what it finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

from bench.published import PUBLISHED, Row
from mega_train.planning.estimate import Estimate, estimate
from mega_train.planning.hardware import HARDWARE, Hardware
from mega_train.planning.search import alike


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A published number, and what the planner says of the same job."""

    row: Row
    estimate: Estimate

    @property
    def utilisation(self) -> float:
        return self.estimate.mfu if self.row.counted == "mfu" else self.estimate.hfu

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was published."""
        return self.utilisation / self.row.utilisation - 1

    def as_json(self) -> dict[str, object]:
        job, layout = self.estimate.job, self.estimate.job.layout
        return {
            "table": self.row.table,
            "model": self.row.name,
            "hardware": self.row.hardware,
            "layout": {name: getattr(layout, name) for name in ("tp", "pp", "vp", "dp")},
            "micro_batch": job.micro,
            "recompute": job.recompute.granularity,
            "counted": self.row.counted,
            "published": round(self.row.utilisation, 4),
            "predicted": round(self.utilisation, 4),
            "error": round(self.error, 4),
            "fitted": self.row.fitted,
            "step_seconds": round(self.estimate.seconds.step, 3),
        }


def predict(row: Row, hardware: Hardware) -> Prediction:
    """Where micro-batch and chunks were not published, of the fastest that fit."""
    if row.told:
        return Prediction(row, estimate(row.job, hardware))
    return Prediction(row, min(alike(row.job, hardware), key=lambda e: e.seconds.step))


def predictions() -> list[Prediction]:
    return [predict(row, HARDWARE[row.hardware]) for row in PUBLISHED]


def fitted(name: str) -> float:
    """The share of peak at which the squares of the fitted rows' errors are least."""
    rows = [row for row in PUBLISHED if row.fitted and row.hardware == name]

    def squares(gemm: float) -> float:
        hardware = dataclasses.replace(HARDWARE[name], gemm=gemm)
        return sum(predict(row, hardware).error ** 2 for row in rows)

    return min((share / 100 for share in range(50, 100)), key=squares)


def median(errors: list[float]) -> float:
    return statistics.median(abs(error) for error in errors)


def table(done: list[Prediction]) -> str:
    """Markdown: a line for each published number, and the errors in short."""
    lines = [
        "| table | model | tp·pp·vp·dp | micro | | published % | predicted % | error % | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in done:
        layout = p.estimate.job.layout
        cut = f"{layout.tp}·{layout.pp}·{layout.vp}·{layout.dp}"
        numbers = f"{100 * p.row.utilisation:.1f} | {100 * p.utilisation:.1f} | {100 * p.error:+.1f}"
        kind, fit = p.row.counted.upper(), "fit" if p.row.fitted else ""
        micro = p.estimate.job.micro
        lines.append(f"| {p.row.table} | {p.row.name} | {cut} | {micro} | {kind} | {numbers} | {fit} |")
    held = [p.error for p in done if not p.row.fitted]
    lines += [
        "",
        f"Median error {100 * median([p.error for p in done]):.1f} %; of the {len(held)} rows held out",
    ]
    lines[-1] += f" {100 * median(held):.1f} %, the largest {100 * max(map(abs, held)):.1f} %."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.fit:
        for name in ("a100", "h100"):
            print(f"{name}: gemm {fitted(name):.2f}, in use {HARDWARE[name].gemm:.2f}")
    done = predictions()
    print(table(done))
    if options.json:
        options.json.write_text(json.dumps([p.as_json() for p in done], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
