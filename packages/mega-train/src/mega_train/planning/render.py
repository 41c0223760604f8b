"""A plan as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table

from mega_train.commands.plan import words
from mega_train.planning.estimate import Estimate
from mega_train.planning.flops import hardware_flops, model_flops, parameters
from mega_train.planning.hardware import GIB
from mega_train.planning.workload import Job

_SPENT = (
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


def write(done: Sequence[Estimate], out: TextIO, *, searched: bool, as_json: bool) -> None:
    """One estimate, or those of a search, as a person or a program reads them."""
    if as_json:
        told: object = as_dict(done[0])
        if searched:
            told = [as_dict(each) | {"flags": words(each.job)} for each in done]
        out.write(json.dumps(told, indent=1) + "\n")
        return
    console = Console(file=out, width=110)
    if searched:
        show_found(done, console)
    else:
        show(done[0], console)


def show(done: Estimate, console: Console) -> None:
    """Everything of one estimate."""
    job, hardware, seconds = done.job, done.hardware, done.seconds
    say(console, headline(job) + f" on {job.layout.world} x {hardware.name}")
    say(console, f"{mesh(job)} | {batch(job)}")
    console.print(_memory(done))
    full = done.fullest.total
    verdict = "fits in" if done.fits else "DOES NOT FIT in"
    say(console, f"the fullest rank's {full / GIB:.1f} GiB {verdict} {hardware.memory / GIB:.0f} GiB")
    sent = asdict(done.traffic)
    parts = [f"{axis} {n / GIB:.2f}" for axis, n in sent.items() if n]
    say(console, f"a rank sends, GiB a step: {', '.join(parts) or 'nothing'}")
    say(console, f"model FLOPs {model_flops(job):.3e} a step, with recomputation {hardware_flops(job):.3e}")
    spent = [(name, getattr(seconds, key) / seconds.step) for key, name in _SPENT]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in spent if share >= 0.0005)
    say(console, f"step {seconds.step:.3f} s: {shares}")
    tokens = job.global_samples * job.length / seconds.step
    flops = model_flops(job) / seconds.step / job.layout.world / 1e12
    rates = f"{flops:.0f} TFLOP/s a GPU | MFU {done.mfu:.1%}, HFU {done.hfu:.1%}"
    say(console, f"{tokens:,.0f} tokens/s | {rates}")


def show_found(found: Sequence[Estimate], console: Console) -> None:
    """The layouts of a search, and the flags of the first."""
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        side: Literal["left", "right"] = "left" if name in ("schedule", "recompute") else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for done in found:
        job, layout, seconds = done.job, done.job.layout, done.seconds
        degrees = (layout.tp, layout.cp, layout.pp, layout.vp, layout.dp, job.micro)
        table.add_row(
            *map(str, degrees),
            job.schedule if layout.pp > 1 else "",
            kept(job),
            f"{done.fullest.total / GIB:.1f}",
            f"{seconds.bubble / seconds.step:.1%}",
            f"{seconds.step:.3f}",
            f"{done.mfu:.1%}",
            f"{done.hfu:.1%}",
        )
    first = found[0]
    say(console, headline(first.job) + f" on {first.job.layout.world} x {first.hardware.name}")
    say(console, batch(first.job))
    console.print(table)
    say(console, f"the first: {words(first.job)}")


def as_dict(done: Estimate) -> dict[str, Any]:
    """Everything of one estimate; bytes, seconds and FLOPs."""
    job, layout = done.job, done.job.layout
    return {
        "model": job.spec.to_dict(),
        "parameters": parameters(job.spec),
        "hardware": asdict(done.hardware),
        "layout": {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vp", "dp", "world")},
        "layers": list(job.cut.depth),
        "pipeline_schedule": job.schedule,
        "seq_length": job.length,
        "micro_batch_size": job.micro,
        "global_batch_size": job.global_samples,
        "precision": job.precision.name,
        "sequence_parallel": job.sequence,
        "recompute": asdict(job.recompute),
        "zero_stage": job.zero,
        "memory_bytes": [asdict(place) | {"total": place.total} for place in done.memory],
        "fits": done.fits,
        "sent_bytes": asdict(done.traffic),
        "model_flops": model_flops(job),
        "hardware_flops": hardware_flops(job),
        "seconds": asdict(done.seconds) | {"step": done.seconds.step},
        "mfu": done.mfu,
        "hfu": done.hfu,
    }


def headline(job: Job) -> str:
    return f"{job.spec.family}, {parameters(job.spec):,} parameters, {job.precision.name}"


def mesh(job: Job) -> str:
    layout = job.layout
    more = {"cp": layout.cp, "vp": layout.vp}
    extra = "".join(f" x {axis} {degree}" for axis, degree in more.items() if degree > 1)
    order = f", {job.schedule}" if layout.pp > 1 else ""
    how = f"zero {job.zero}, recompute {kept(job)}"
    return f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}{extra}{order}, {how}"


def kept(job: Job) -> str:
    """What is computed again, in a word or two."""
    recompute = job.recompute
    if recompute.granularity != "full":
        return " ".join(
            (recompute.granularity or "none", *(recompute.modules if recompute.is_custom else ()))
        )
    return f"{recompute.method} {recompute.layers}"


def batch(job: Job) -> str:
    return f"{job.global_samples} samples x {job.length} tokens a step"


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _memory(done: Estimate) -> Table:
    """A line for each run of places that hold the same."""
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB of a rank at pp")
    for name in ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    places = done.memory
    shown = {0, len(places) - 1, places.index(max(places, key=lambda held: held.total))}
    shown |= {1} if len(places) > 2 else set()
    for place in sorted(shown):
        kinds = asdict(places[place]) | {"total": places[place].total}
        table.add_row(str(place), *(f"{n / GIB:.2f}" for n in kinds.values()))
    return table
