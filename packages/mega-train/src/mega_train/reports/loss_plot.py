"""Plot the loss of one or more runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import atomic_write
from mega_schema.errors import ConfigError, FormatError
from mega_schema.outputs import check_output, is_image
from mega_train.reports.run_names import is_test, name_runs
from mega_train.telemetry.event_log import read_events

_TRAINING = "training"
_EVAL_MARKERS = ("o", "*")  # of a validation, of the test
_MAX_MARKED_POINTS = 60  # points of a line up to which each is marked


def draw_loss(runs: Sequence[Path], output: Path) -> None:
    """Plot training, validation and test loss of all runs over iterations, as a PNG.

    Raises:
        FormatError: a folder holds no event log, or one without a loss.
        ConfigError: matplotlib is not installed, or the folder of the image does not exist.
    """
    if not output.parent.is_dir():
        raise ConfigError("--output", "no such folder", found=output.parent, hint=f"mkdir -p {output.parent}")
    check_output("--output", output, "file", is_ours=is_image)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("curve", "needs matplotlib", hint=install_hint("mega-train", "plot")) from None
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for run, name in zip(runs, name_runs(runs), strict=True):
        color = None  # the first line of a run takes the next color, its other lines the same
        for group, points in _loss_series(run).items():
            line_style = ".-" if len(points) <= _MAX_MARKED_POINTS else "-"
            style = line_style if group == _TRAINING else _EVAL_MARKERS[is_test(group)]
            size = 9 if is_test(group) else 4
            label = f"{name}: {group}"
            line, *_ = axes.plot(*zip(*points, strict=True), style, markersize=size, color=color, label=label)
            color = line.get_color()
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(output) as partial:
        FigureCanvasAgg(figure).print_png(partial)


def _loss_series(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Read iterations and losses of training, of every validation group, and of the test.

    Raises:
        FormatError: the folder holds no record of a run, or one without a loss.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    events = read_events(run)
    if not any(event["event"] == "train_log" for event in events):
        raise FormatError(run, "holds no loss yet", wanted="a run that reached its first --log-interval")
    for event in events:
        if event["event"] in ("train_log", "validation") and event["loss"] is not None:
            group = _TRAINING if event["event"] == "train_log" else event.get("split", "validation")
            series.setdefault(group, []).append((event["iteration"], event["loss"]))
    return {group: series[group] for group in sorted(series, key=lambda group: group != _TRAINING)}
