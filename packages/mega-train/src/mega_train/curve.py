"""The loss curve of one or more runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_schema.disk import replacing
from mega_schema.errors import ConfigError, FormatError
from mega_train.metrics import read_events


def draw(runs: Sequence[Path], output: Path) -> None:
    """Training and validation loss over the iterations of all runs, in one set of axes, as a PNG.

    Raises:
        FormatError: a folder holds no record of a run, or one without a loss.
        ConfigError: matplotlib is not installed, or the picture has no folder to lie in.
    """
    if not output.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=output.parent, hint=f"mkdir -p {output.parent}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("curve", "needs matplotlib", hint='pip install "mega-train[plot]"') from None
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        events = read_events(run)
        if not any(e["event"] == "train" for e in events):
            raise FormatError(run, "holds no loss yet", wanted="a run that reached its first --log-interval")
        colour = None  # the next of the cycle for the run's first line, and then that one
        for kind, style, name in (("train", "-", "training"), ("validation", "o", "validation")):
            points = [
                (e["iteration"], e["loss"]) for e in events if e["event"] == kind and e["loss"] is not None
            ]
            if points:
                label = f"{run.name}: {name}"
                line, *_ = axes.plot(
                    *zip(*points, strict=True), style, markersize=4, color=colour, label=label
                )
                colour = line.get_color()
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(output) as partial:
        FigureCanvasAgg(figure).print_png(partial)
