"""The loss curve of one or more runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_schema.errors import ConfigError, FormatError
from mega_train.metrics import EVENTS, read_events


def draw(runs: Sequence[Path], output: Path) -> None:
    """Training and validation loss over consumed samples of all runs, in one set of axes.

    Raises:
        FormatError: a folder holds no record of a run.
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("curve", "needs matplotlib", hint='pip install "mega-train[plot]"') from None
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        if not (run / EVENTS).is_file():
            raise FormatError(run, "holds no record of a run", wanted=EVENTS)
        events = read_events(run)
        for kind, style in (("train", "-"), ("validation", "o")):
            points = [(e["iteration"], e["loss"]) for e in events if e["event"] == kind]
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=4, label=f"{run.name} {kind}")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(output)
