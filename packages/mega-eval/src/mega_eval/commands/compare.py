"""`mega-eval compare`: test whether models differ on the same examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from mega_eval.number_format import format_number
from mega_schema.app.click_options import LocalPath, NumberRange
from mega_schema.app.output_option import OUTPUT_FILE

if TYPE_CHECKING:
    from mega_eval.comparison import MetricComparison, Pairs

FORMAT = 1
KEYS = ("format", "results", "comparisons", "notes", "resamples", "seed", "fdr")


@click.command()
@click.argument("results", nargs=-1, required=True, type=LocalPath(), metavar="RESULT.json...")
@click.option(
    "--pairs",
    type=click.Choice(["first", "all"]),
    default="first",
    show_default=True,
    help="Compare each result with the first of its task, or every two.",
)
@click.option(
    "--resamples",
    type=click.IntRange(min=100),
    default=10_000,
    show_default=True,
    help="Draws of the bootstrap.",
)
@click.option("--seed", type=int, default=1234, show_default=True, help="Seed of the bootstrap.")
@click.option(
    "--fdr",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="False discovery rate: a difference whose q is below it is called better or worse.",
)
@click.option("--output", type=OUTPUT_FILE, help="Also write the comparisons as JSON, to NAME.json.")
@click.option("--plot", type=OUTPUT_FILE, help="Also draw the differences, to NAME.png; needs matplotlib.")
@click.option("--overwrite", is_flag=True, help="Replace existing files of --output and --plot.")
def compare(
    results: tuple[Path, ...],
    pairs: str,
    resamples: int,
    seed: int,
    fdr: float,
    output: Path | None,
    plot: Path | None,
    overwrite: bool,
) -> None:
    """Compare results of several models on the same examples.

    Examples are paired by their ids. Scores of 0 and 1 are tested by McNemar's exact test, all others by a
    paired bootstrap, which also gives the intervals. q is the p-value adjusted for the number of comparisons
    (Benjamini-Hochberg). Results of several tasks can be given together.
    """
    from dataclasses import asdict

    from mega_eval.charts import check_plot, draw_comparisons
    from mega_eval.comparison import compare_results, list_models
    from mega_eval.outputs import check_output_file, write_json
    from mega_eval.result import samples_path
    from mega_eval.result_reader import read_result
    from mega_schema.outputs import has_keys

    inputs = [*results, *map(samples_path, results)]
    check_output_file("--output", output, inputs, has_keys(KEYS), suffix=".json", overwrite=overwrite)
    if plot is not None:
        check_plot("--plot", plot, inputs, overwrite=overwrite)
    read = [read_result(path) for path in results]
    comparisons, notes = compare_results(read, pairs=cast("Pairs", pairs), resamples=resamples, seed=seed)
    for line in format_comparisons(comparisons, fdr):
        click.echo(line)
    for note in notes:
        click.echo(f"note: {note}")
    if output is not None:
        record = dict(
            zip(
                KEYS,
                (FORMAT, list_models(read), [asdict(c) for c in comparisons], notes, resamples, seed, fdr),
                strict=True,
            )
        )
        write_json(output, record)
        click.echo(f"written to {output}")
    if plot is not None:
        draw_comparisons(comparisons, plot, level=fdr)
        click.echo(f"written to {plot}")


def format_comparisons(comparisons: Sequence[MetricComparison], level: float) -> Iterator[str]:
    """Yield the lines of the tables: one table for each pair of results."""
    tables: dict[tuple[str, ...], list[MetricComparison]] = {}
    for comparison in comparisons:
        key = (comparison.task, comparison.convention, comparison.first, comparison.second)
        tables.setdefault(key, []).append(comparison)
    for (task, convention, first, second), rows in tables.items():
        title = " ".join(filter(None, (task, convention)))
        count = max(row.count for row in rows)
        yield f"{title}: {second} against {first}, {count:,} examples"
        head = ("", "first", "second", "difference", "95 %", "p", "q", "", "")
        cells = [head, *(_format_row(row, level, count) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        for row in cells:
            name = row[0].ljust(widths[0])
            numbers = (cell.rjust(width) for cell, width in zip(row[1:7], widths[1:7], strict=True))
            yield "  ".join((name, *numbers, row[7].ljust(widths[7]), row[8])).rstrip()
        yield ""


def _format_row(row: MetricComparison, level: float, count: int) -> tuple[str, ...]:
    """Return the cells of a metric; `count` is the number of examples that the title names."""
    low, high = row.interval
    remarks = [] if row.count == count else [f"{row.count:,} examples"]
    if row.discordant is not None:
        remarks.append(f"right only in first {row.discordant[0]:,}, in second {row.discordant[1]:,}")
    return (
        row.metric.replace("_", " "),
        *map(format_number, row.values),
        format_number(row.difference, "+"),
        f"{format_number(low, '+')} to {format_number(high, '+')}",
        f"{row.p_value:.2g}",
        f"{row.q_value:.2g}",
        row.verdict(level),
        ", ".join(remarks),
    )
