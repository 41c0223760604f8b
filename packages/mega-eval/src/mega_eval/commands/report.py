"""`mega-eval report`: write the HTML page of results."""

from __future__ import annotations

from pathlib import Path

import click

from mega_schema.app.click_options import LocalPath
from mega_schema.app.output_option import OUTPUT_FILE


@click.command()
@click.argument("results", nargs=-1, required=True, type=LocalPath(), metavar="RESULT.json...")
@click.option(
    "--output", type=OUTPUT_FILE, default="report.html", show_default=True, help="Page to write, NAME.html."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing page.")
def report(results: tuple[Path, ...], output: Path, overwrite: bool) -> None:
    """Write one HTML page of results: metrics with intervals, provenance and every example.

    The page needs no network and no other file.
    """
    from mega_eval.outputs import check_output_file
    from mega_eval.report_page.page import write_page
    from mega_eval.result import samples_path
    from mega_eval.result_reader import read_result
    from mega_schema.outputs import is_page

    inputs = [*results, *map(samples_path, results)]
    check_output_file("--output", output, inputs, is_page, suffix=".html", overwrite=overwrite)
    read = [read_result(path) for path in results]
    write_page(read, output)
    examples = sum(len(result.examples) for result in read)
    noun = "result" if len(read) == 1 else "results"
    click.echo(f"written to {output}: {len(read)} {noun}, {examples:,} examples")
