"""`mega-data extract`: text out of wiki dumps, web archives and HTML."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import (
    ANY_PATH,
    EXECUTOR,
    ON_ERROR,
    WORKERS,
    Spreading,
    inputs_option,
    run_stages,
    work_folder,
)


@click.command(cls=Spreading)
@inputs_option(
    "Dumps (.xml), archives (.warc, .wet) and .html, plain or .gz .zst .xz .bz2 .lz4; files and folders."
)
@click.option(
    "--output", type=ANY_PATH, required=True, help="Folder of a file per input, or one .jsonl file."
)
@click.option(
    "--from",
    "form",
    type=click.Choice(["auto", "wiki-dump", "warc", "wet", "html"]),
    default="auto",
    help="Form of the files; auto goes by their first bytes.",
)
@click.option(
    "--on-error",
    type=ON_ERROR,
    default="fail",
    help="Damaged input: end there, or leave out what is lost, count it and go on.",
)
@click.option(
    "--keep-dropped", is_flag=True, help="Write what is left out, with the reason, to OUTPUT.dropped."
)
@click.option(
    "--part-mb", type=click.IntRange(min=1), default=32, help="Megabytes of a dump that are a task."
)
@click.option("--whole-page", is_flag=True, help="Keep menus and footers of HTML.")
@click.option("--work", type=ANY_PATH, help="Folder of intermediate files.  [default: OUTPUT.work]")
@click.option("--workers", type=WORKERS, default=1, help="Processes.")
@click.option("--executor", type=EXECUTOR, default="local", help="Who runs the tasks.")
@click.option("--only", help="STAGE or STAGE:TASK to do, or plan.")
def extract(
    inputs: tuple[Path, ...],
    output: Path,
    form: str,
    on_error: str,
    keep_dropped: bool,
    part_mb: int,
    whole_page: bool,
    work: Path | None,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Write the pages of wiki dumps, web archives and HTML as JSON lines: id, url, title, text.

    A file is a task; a large dump, plain or .bz2, is several. The bytes are the same whatever the workers and
    tasks; a run that was killed goes on where its finished tasks end. What is no document is left out and
    counted by reason.
    """
    import shutil
    from collections import Counter

    from mega_data.extract.forms import cut, sources
    from mega_data.extract.run import Extraction

    parts = cut(sources(inputs), form, part_mb * 1_000_000)
    usual = output.with_name(f"{output.name}.work")
    with work_folder(work, usual, output, alone=only is None) as folder:
        job = Extraction(parts, output, folder, form, whole_page, on_error == "skip", keep_dropped)
        job.begin()
        found = run_stages(job.stages(), folder, executor=executor, workers=workers, only=only)
    if found is None:
        return
    if not work:
        shutil.rmtree(folder)
    counts, reasons = Counter[str](), Counter[str]()
    for result in found[0]:
        counts.update({name: result[name] for name in ("documents", "bytes", "lost")})
        reasons.update(result["reasons"])
    size = f"{counts['bytes'] / 1e6:.2f} MB"
    click.echo(f"{output}: {counts['documents']:,} documents, {size} from {len(job.inputs):,} files")
    for reason, count in sorted(reasons.items()):
        click.echo(f"  left out {count:,}: {reason}")
    if counts["lost"]:
        click.echo(f"  lost to damage: {counts['lost']:,} bytes of the files")
