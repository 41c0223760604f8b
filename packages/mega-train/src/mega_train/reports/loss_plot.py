"""Plot the loss of one or more runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output, is_image
from mega_train.reports.charts import COLORS, Curve, chart_style, draw_curves, require_matplotlib
from mega_train.reports.run_history import RunHistory, XAxis
from mega_train.reports.run_names import is_test, name_runs


def loss_curves(runs: Sequence[RunHistory], names: Sequence[str], over: XAxis) -> list[Curve]:
    """Return the training loss, the loss of every validation group and the test loss of each run."""
    curves = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        color = COLORS[number % len(COLORS)]
        curves.append(Curve(f"{name}: training", color, *run.series("loss", over)))
        for group in run.groups:
            label = f"{name}: {group}"
            curves.append(Curve(label, color, *run.scores(group, over), dots=True, hollow=is_test(group)))
    return [curve for curve in curves if curve.xs]


def term_curves(runs: Sequence[RunHistory], names: Sequence[str], term: str, over: XAxis) -> list[Curve]:
    """Return a term of the training loss, and of the loss of every validation group, of each run."""
    curves = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        color = COLORS[number % len(COLORS)]
        curves.append(Curve(f"{name}: training", color, *run.term_series(term, over)))
        for group in run.groups:
            points = run.term_scores(term, group, over)
            curves.append(Curve(f"{name}: {group}", color, *points, dots=True, hollow=is_test(group)))
    return [curve for curve in curves if curve.xs]


def draw_loss(runs: Sequence[Path], output: Path) -> None:
    """Plot training, validation and test loss of all runs over iterations, as a PNG.

    Raises:
        FormatError: a folder holds no event log, or one without a log line.
        ConfigError: matplotlib is not installed, or the folder of the image does not exist.
    """
    if not output.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=output.parent, hint=f"mkdir -p {output.parent}")
    check_output("--output", output, "file", is_ours=is_image)
    require_matplotlib("curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = loss_curves([RunHistory.load(run) for run in runs], name_runs(runs), "iteration")
    with chart_style("loss"), atomic_write(output) as partial:
        figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
        axes = figure.subplots()
        lines = draw_curves(axes, curves)
        axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="Loss")
        legend = axes.legend(lines, map(str, range(len(lines))))
        for label, curve in zip(legend.get_texts(), curves, strict=True):
            label.set_text(curve.name)  # a label that begins with _ would be left out of the legend
        FigureCanvasAgg(figure).print_png(partial)
