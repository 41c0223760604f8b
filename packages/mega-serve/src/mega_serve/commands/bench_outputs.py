"""Write the outputs of `mega-serve bench`: the result file and the plot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from mega_schema.atomic_io import atomic_write, disk_errors, write_text
from mega_schema.errors import ConfigError
from mega_schema.outputs import is_image
from mega_serve.client.bench.benchmark import Benchmark
from mega_serve.client.bench.latency_metrics import DETAIL_KEYS
from mega_serve.client.bench.plot import plot_run, require_matplotlib
from mega_serve.commands.output_checks import check_output_file, check_output_folder

_UNSAFE_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


def check_outputs(options: Mapping[str, Any]) -> Path | None:
    """Check the paths of results and plot before the run; return that of the results, if it is given.

    Raises:
        ConfigError: a path is refused, or matplotlib is missing.
    """
    if options["plot"] is not None:
        check_output_file("--plot", options["plot"], is_ours=is_image)
        _check_plot_name(options["plot"])
        require_matplotlib()
    name: Path | None = options["result_filename"]
    saves = options["save_result"] or options["append_result"]
    if not saves:
        for option in ("result_filename", "result_dir", "save_detailed"):
            if options[option]:
                flag = f"--{option.replace('_', '-')}"
                raise ConfigError(flag, "needs --save-result or --append-result", hint="add --save-result")
        return None
    folder: Path = options["result_dir"] or Path()
    if name is None or options["result_dir"] is not None:
        check_output_folder("--result-dir" if options["result_dir"] is not None else "--save-result", folder)
    if name is None:
        return None
    path = folder / name
    inputs = [options["dataset_path"]] if options["dataset_path"] is not None else []
    check_output_file("--result-filename", path, inputs=inputs, is_ours=_is_result)
    return path


def _check_plot_name(path: Path) -> None:
    if path.suffix.lower() != ".png":
        hint = f"--plot {path.with_suffix('.png')}"
        raise ConfigError("--plot", "is not a PNG", found=path, wanted="FILE.png", hint=hint)


def _is_result(path: Path) -> bool:
    """Whether a file begins with the result of a run, ours or vLLM's, or is empty."""
    with path.open("rb") as file:
        head = file.read(4096)
    return not head or b'"endpoint_type"' in head


def write_outputs(path: Path | None, benchmark: Benchmark, options: Mapping[str, Any], date: str) -> None:
    """Write the result file and the plot, as far as the options ask for them.

    Args:
        path: of the result file; None names it after the run.
        date: of the run, as YYYYMMDD-HHMMSS.
    """
    summary = {"date": date, **benchmark.summary}
    if not options["save_detailed"]:
        summary = {name: value for name, value in summary.items() if name not in DETAIL_KEYS}
    if options["save_result"] or options["append_result"]:
        file = path or (options["result_dir"] or Path()) / _default_name(summary, date)
        _write_result(file, summary, append=options["append_result"])
        click.echo(f"wrote {file}", err=True)
    if options["plot"] is not None:
        plot_run(benchmark.results, _plot_title(benchmark.summary), options["plot"])
        click.echo(f"wrote {options['plot']}", err=True)


def _default_name(summary: Mapping[str, Any], date: str) -> str:
    rate = f"{summary['request_rate']}qps"
    if "ramp_up_strategy" in summary:
        start, end = summary["ramp_up_start_rps"], summary["ramp_up_end_rps"]
        rate = f"ramp-up-{summary['ramp_up_strategy']}-{start}qps-{end}qps"
    limit = summary["max_concurrency"]
    words = [summary["label"] or summary["backend"], rate]
    words[1] += f"-concurrency{limit}" if limit is not None else ""
    words += [str(summary["model_id"]).rsplit("/", 1)[-1], date]
    return f"{_UNSAFE_IN_NAMES.sub('_', '-'.join(words))}.json"


def _write_result(path: Path, summary: Mapping[str, Any], *, append: bool) -> None:
    text = json.dumps(summary)
    with disk_errors(path):
        if append and path.exists():
            # the whole file is written anew: a line that is cut off would make all of it unreadable
            text = f"{path.read_text('utf-8').rstrip()}\n{text}".lstrip()
        with atomic_write(path) as partial:
            write_text(partial, text + "\n")


def _plot_title(summary: Mapping[str, Any]) -> str:
    rate = "all at once" if summary["request_rate"] == "inf" else f"{summary['request_rate']:g} requests/s"
    if "ramp_up_strategy" in summary:
        start, end = summary["ramp_up_start_rps"], summary["ramp_up_end_rps"]
        rate = f"{start:g} to {end:g} requests/s"
    limit = summary["max_concurrency"]
    parts = [f"{summary['completed']} requests", rate]
    parts += [f"at most {limit} at a time"] if limit is not None else []
    parts += [f"{summary['output_throughput']:.1f} output tokens/s", f"{summary['failed']} failed"]
    return f"{summary['label'] or summary['model_id']} ({summary['dataset_name']})\n{', '.join(parts)}"
