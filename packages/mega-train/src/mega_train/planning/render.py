"""Render estimates as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table

from mega_train.planning.estimate import Estimate
from mega_train.planning.flops import hardware_flops, model_flops, parameters
from mega_train.planning.hardware import GIB
from mega_train.planning.workload import Workload
from mega_train.planning.workload_flags import to_flags

_TIME_LABELS = (
    ("gemm", "matrix products"),
    ("attention", "attention"),
    ("stream", "elementwise"),
    ("tp", "tensor parallel"),
    ("cp", "context parallel"),
    ("pp", "between stages"),
    ("bubble", "bubble"),
    ("dp", "data parallel"),
    ("optimizer", "optimizer"),
)
_COLUMNS = (
    "tp",
    "cp",
    "pp",
    "vp",
    "dp",
    "micro",
    "schedule",
    "recompute",
    "GiB",
    "bubble",
    "seconds",
    "MFU",
    "HFU",
)


def write_estimates(estimates: Sequence[Estimate], out: TextIO, *, searched: bool, as_json: bool) -> None:
    """Write one estimate, or those of a search, as tables or as JSON."""
    if as_json:
        content: object = to_dict(estimates[0])
        if searched:
            content = [to_dict(estimate) | {"flags": to_flags(estimate.workload)} for estimate in estimates]
        out.write(json.dumps(content, indent=1) + "\n")
        return
    console = Console(file=out, width=110)
    if searched:
        show_search(estimates, console)
    else:
        show_estimate(estimates[0], console)


def show_estimate(estimate: Estimate, console: Console) -> None:
    """Print one estimate."""
    workload = estimate.workload
    hardware = estimate.hardware
    seconds = estimate.seconds
    print_line(console, format_model(workload) + f" on {workload.layout.world} x {hardware.name}")
    print_line(console, f"{format_layout(workload)} | {format_batch(workload)}")
    console.print(_memory_table(estimate))
    used = estimate.peak_rank.total
    verdict = "fits in" if estimate.fits else "DOES NOT FIT in"
    print_line(console, f"the fullest rank's {used / GIB:.1f} GiB {verdict} {hardware.memory / GIB:.0f} GiB")
    sent_bytes = asdict(estimate.comm_volume)
    parts = [f"{axis} {n / GIB:.2f}" for axis, n in sent_bytes.items() if n]
    print_line(console, f"a rank sends, GiB a step: {', '.join(parts) or 'nothing'}")
    print_line(
        console,
        f"model FLOPs {model_flops(workload):.3e} a step, with recomputation {hardware_flops(workload):.3e}",
    )
    time_shares = [(name, getattr(seconds, key) / seconds.step) for key, name in _TIME_LABELS]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in time_shares if share >= 0.0005)
    print_line(console, f"step {seconds.step:.3f} s: {shares}")
    tokens = workload.global_batch_size * workload.seq_length / seconds.step
    flops = model_flops(workload) / seconds.step / workload.layout.world / 1e12
    rates = f"{flops:.0f} TFLOP/s a GPU | MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
    print_line(console, f"{tokens:,.0f} tokens/s | {rates}")


def show_search(estimates: Sequence[Estimate], console: Console) -> None:
    """Print the layouts of a search, and the flags of the first."""
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        side: Literal["left", "right"] = "left" if name in ("schedule", "recompute") else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for estimate in estimates:
        workload = estimate.workload
        layout = estimate.workload.layout
        seconds = estimate.seconds
        degrees = (layout.tp, layout.cp, layout.pp, layout.vp, layout.dp, workload.micro_batch_size)
        table.add_row(
            *map(str, degrees),
            workload.schedule if layout.pp > 1 else "",
            recompute_label(workload),
            f"{estimate.peak_rank.total / GIB:.1f}",
            f"{seconds.bubble / seconds.step:.1%}",
            f"{seconds.step:.3f}",
            f"{estimate.mfu:.1%}",
            f"{estimate.hfu:.1%}",
        )
    first = estimates[0]
    print_line(
        console, format_model(first.workload) + f" on {first.workload.layout.world} x {first.hardware.name}"
    )
    print_line(console, format_batch(first.workload))
    console.print(table)
    print_line(console, f"the first: {to_flags(first.workload)}")


def to_dict(estimate: Estimate) -> dict[str, Any]:
    """Return one estimate as JSON values; bytes, seconds and FLOPs."""
    workload = estimate.workload
    layout = estimate.workload.layout
    return {
        "model": workload.spec.to_dict(),
        "parameters": parameters(workload.spec),
        "hardware": asdict(estimate.hardware),
        "layout": {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vp", "dp", "world")},
        "layers": list(workload.model.layers_per_rank),
        "pipeline_schedule": workload.schedule,
        "seq_length": workload.seq_length,
        "micro_batch_size": workload.micro_batch_size,
        "global_batch_size": workload.global_batch_size,
        "precision": workload.precision.name,
        "sequence_parallel": workload.sequence,
        "recompute": asdict(workload.recompute),
        "zero_stage": workload.zero,
        "memory_bytes": [asdict(rank) | {"total": rank.total} for rank in estimate.memory],
        "fits": estimate.fits,
        "sent_bytes": asdict(estimate.comm_volume),
        "model_flops": model_flops(workload),
        "hardware_flops": hardware_flops(workload),
        "seconds": asdict(estimate.seconds) | {"step": estimate.seconds.step},
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
    }


def format_model(workload: Workload) -> str:
    return f"{workload.spec.family}, {parameters(workload.spec):,} parameters, {workload.precision.name}"


def format_layout(workload: Workload) -> str:
    layout = workload.layout
    sizes = {"cp": layout.cp, "vp": layout.vp}
    extra = "".join(f" x {axis} {degree}" for axis, degree in sizes.items() if degree > 1)
    order = f", {workload.schedule}" if layout.pp > 1 else ""
    options = f"zero {workload.zero}, recompute {recompute_label(workload)}"
    return f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}{extra}{order}, {options}"


def recompute_label(workload: Workload) -> str:
    """Name the recomputation in a word or two."""
    recompute = workload.recompute
    if recompute.granularity != "full":
        return " ".join(
            (recompute.granularity or "none", *(recompute.modules if recompute.is_custom else ()))
        )
    return f"{recompute.method} {recompute.layers}"


def format_batch(workload: Workload) -> str:
    return f"{workload.global_batch_size} samples x {workload.seq_length} tokens a step"


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _memory_table(estimate: Estimate) -> Table:
    """Build a table with a line for the first, the last and the fullest pipeline rank."""
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB of a rank at pp")
    for name in ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    ranks = estimate.memory
    shown = {0, len(ranks) - 1, ranks.index(max(ranks, key=lambda memory: memory.total))}
    shown |= {1} if len(ranks) > 2 else set()
    for rank in sorted(shown):
        kinds = asdict(ranks[rank]) | {"total": ranks[rank].total}
        table.add_row(str(rank), *(f"{n / GIB:.2f}" for n in kinds.values()))
    return table
