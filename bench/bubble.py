"""Measure the pipeline bubble, and compare it with theory.

    python -m bench.bubble [--ranks 4] [--micros 8] [--unit 0.1] [--png FILE] [--json FILE]

The ranks are processes that run the tables of every schedule with the executor of `mega-train`; messages go
over gloo. Their work is synthetic: a forward pass, the backward pass to the input and the one to the weights
each sleep one unit (a chunk's pass that much less), so a few cores are enough for any number of ranks and
what is measured is the order of passes, the messages and the executor, not arithmetic.

Of each schedule it prints the share of all ranks' time without a pass in it, over the best of several steps,
beside the one that `simulate` finds for the same tables with passes of the same length and messages that take
no time; and beside it the formula of the paper. The PNG shows the passes of every rank over time.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

from mega_model.distributed.mesh import Mesh, World
from mega_model.weight_gradients import WeightGradients
from mega_schema.parallel_layout import Layout
from mega_train.pipeline.executor import execute
from mega_train.pipeline.schedules import SCHEDULES, BackwardInput, BackwardWeight, Forward, PipelineShape
from tests.pipeline_simulator import PassCosts, ScheduledPass, Timeline, simulate

STEPS = 6  # of each schedule, the first not counted
COLOURS = {"forward": "#4c78a8", "input": "#f58518", "weight": "#54a24b"}


@dataclass(frozen=True)
class Case:
    """One schedule on one pipeline, with the bubble of its paper, in units of one chunk's pass."""

    name: str
    schedule: str
    pipe: PipelineShape

    @property
    def bubble(self) -> float:
        """Return the units in which a rank waits in a step with passes of one unit."""
        p, v = self.pipe.ranks, self.pipe.chunks
        # arXiv:2401.10241 table 2 (F + B - W); arXiv:2104.04473 §2.2.1 and §2.2.2
        return (p - 1) * 1 if self.schedule == "zero-bubble" and v == 1 else (p - 1) * 3 / v

    @property
    def work(self) -> float:
        """Return the units in which a rank computes."""
        return 3.0 * self.pipe.micros


class Sleeper:
    """Stages that sleep and record the times (an `executor.PipelineWork`)."""

    boundary = (1, 1)

    def __init__(self, pipe: PipelineShape, rank: int, unit: float, weights: WeightGradients) -> None:
        self.pipe, self.rank, self.seconds, self.weights = pipe, rank, unit / pipe.chunks, weights
        self.weight = nn.Parameter(torch.ones(1, 1))
        gradient = torch.zeros(1, 1)
        weights.register_main_grad(self.weight, lambda: gradient)
        self.spans: list[tuple[str, int, int, float, float]] = []

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        x = torch.ones(1, 1) if received is None else received
        output: Tensor = _Pass.apply(x, self.weight, self, chunk, micro)
        return output.sum() if self.pipe.is_last_stage(chunk, self.rank) else output

    def sleep(self, kind: str, chunk: int, micro: int) -> None:
        begin = time.perf_counter()
        time.sleep(self.seconds)
        self.spans.append((kind, chunk, micro, begin, time.perf_counter()))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, work: Sleeper, chunk: int, micro: int) -> Tensor:
        ctx.inputs = weight, work, chunk, micro
        work.sleep("forward", chunk, micro)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, work, chunk, micro = ctx.inputs
        work.sleep("input", chunk, micro)

        def product_input() -> Tensor:
            work.sleep("weight", chunk, micro)  # when the product is made: now, or when the table says
            return torch.ones(1, 1)

        work.weights.accumulate(weight, product_input, torch.ones(1, 1))
        return grad, None, None, None, None


def cases(ranks: int, micros: int) -> list[Case]:
    plain, chunks = PipelineShape(ranks, 1, micros), PipelineShape(ranks, 2, micros)
    return [
        Case("GPipe", "gpipe", plain),
        Case("1F1B", "1f1b", plain),
        Case("interleaved 1F1B, 2 chunks", "1f1b", chunks),
        Case("zero-bubble (ZB-H1)", "zero-bubble", plain),
        Case("zero-bubble, 2 chunks", "zero-bubble", chunks),
    ]


def _rank(rank: int, ranks: int, micros: int, unit: float, folder: Path) -> None:
    torch.set_num_threads(1)
    # the lines of a ring: those of a plain pipeline are among them
    mesh = Mesh.join(
        Layout(pp=ranks, vp=2), World(ranks, rank, rank), init_method=f"file://{folder / 'meet'}"
    )
    times = {}
    for case in cases(ranks, micros):
        table = SCHEDULES[case.schedule](case.pipe, rank)
        steps = []
        for _ in range(STEPS):
            weights = WeightGradients()
            work = Sleeper(case.pipe, rank, unit, weights)
            mesh.barrier()
            execute(table, work, mesh.channels, weights, dtype=torch.float32, device=mesh.device)
            steps.append(work.spans)
        times[case.name] = steps
    (folder / f"{rank}.json").write_text(json.dumps(times), "utf-8")
    mesh.destroy()


KINDS = {"forward": Forward, "input": BackwardInput, "weight": BackwardWeight}


def timeline(ranks: list[list[list[Any]]]) -> Timeline:
    """Return the actions of every rank, with times from the start of the first pass."""
    start = min(span[3] for spans in ranks for span in spans)
    return Timeline(
        [
            [
                ScheduledPass(KINDS[kind](chunk, micro), a - start, b - start)
                for kind, chunk, micro, a, b in spans
            ]
            for spans in ranks
        ]
    )


def measure(ranks: int, micros: int, unit: float) -> dict[str, Timeline]:
    """Measure the shortest step of each schedule."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(
            _rank, (ranks, micros, unit, folder), nprocs=ranks, start_method="spawn"
        )
        by_rank = [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(ranks)]
    return {
        case.name: min(
            (timeline([case_times[case.name][step] for case_times in by_rank]) for step in range(1, STEPS)),
            key=lambda line: line.makespan,
        )
        for case in cases(ranks, micros)
    }


def theory(case: Case) -> Timeline:
    tables = [SCHEDULES[case.schedule](case.pipe, rank) for rank in range(case.pipe.ranks)]
    chunk_share = 1 / case.pipe.chunks
    return simulate(tables, case.pipe, PassCosts(forward=chunk_share, input=chunk_share, weight=chunk_share))


def idle(line: Timeline, work: float) -> float:
    """Return the idle fraction of all ranks, if a step has `work` units of passes for each rank."""
    return 1 - work / line.makespan


def draw(measured: dict[str, Timeline], results: list[dict[str, Any]], unit: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(len(measured), 1, figsize=(13, 2.1 * len(measured)), sharex=True)
    longest = max(line.makespan for line in measured.values()) / unit
    for axis, (name, line), row in zip(axes, measured.items(), results, strict=True):
        for rank, spans in enumerate(line.passes):
            for span in spans:
                action = span.action
                kind = next(k for k, c in KINDS.items() if isinstance(action, c))
                wide = (span.end - span.begin) / unit
                axis.barh(
                    rank, wide, left=span.begin / unit, height=0.9, color=COLOURS[kind],
                    alpha=1 - 0.45 * action.chunk, edgecolor="white", linewidth=0.4,
                )  # fmt: skip
                axis.text(
                    span.begin / unit + wide / 2, rank, str(action.micro), ha="center", va="center",
                    fontsize=5.5, color="white" if not action.chunk else "black",
                )  # fmt: skip
        axis.set(yticks=range(len(line.passes)), ylabel="rank", xlim=(0, longest))
        axis.invert_yaxis()
        content = f"{name}: measured {row['measured']:.1%} idle, simulated {row['simulated']:.1%}"
        content += f", paper {row['paper']:.1%}" if row["paper"] is not None else ""
        axis.set_title(content, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "units: one pass of a rank's layers; numbers are micro-batches, pale is the second chunk"
    )
    patches = [
        Patch(color=COLOURS["forward"], label="forward"),
        Patch(color=COLOURS["input"], label="backward: input"),
        Patch(color=COLOURS["weight"], label="backward: weights"),
    ]
    figure.legend(handles=patches, loc="upper right", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a pass")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    measured = measure(asked.ranks, asked.micros, asked.unit)
    results = []
    print(f"{'schedule':28} {'step':>7} {'measured':>9} {'simulated':>10} {'paper':>7}  alive")
    for case in cases(asked.ranks, asked.micros):
        line, ideal = measured[case.name], theory(case)
        known = case.pipe.chunks == 1 or case.schedule == "1f1b"
        row = {
            "schedule": case.name,
            "step_units": line.makespan / asked.unit,
            "measured": idle(line, case.work * asked.unit),
            "simulated": ideal.bubble,
            "paper": case.bubble / (case.bubble + case.work) if known else None,
            "alive": [
                ideal.micro_batches_in_flight(rank) / case.pipe.chunks for rank in range(case.pipe.ranks)
            ],
        }
        results.append(row)
        paper = f"{row['paper']:7.1%}" if row["paper"] is not None else "      -"
        print(
            f"{case.name:28} {row['step_units']:7.2f} {row['measured']:9.1%} {row['simulated']:10.1%} {paper}"
            f"  {max(row['alive']):g}"
        )
    if asked.png:
        draw(measured, results, asked.unit, asked.png)
    if asked.json:
        report = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        report |= {"ranks": asked.ranks, "micros": asked.micros, "unit_seconds": asked.unit}
        asked.json.write_text(json.dumps(report | {"schedules": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
