"""`mega-data merge`: merge several datasets into one."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import ANY_PATH, WORKERS, RepeatableOptionCommand, warn_replaced
from mega_data.commands.result_file import record_counts
from mega_schema.app.click_options import LocalPath
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_PREFIX
from mega_schema.app.progress import progress_bar

FOLDER = LocalPath(exists=True, file_okay=False)


@click.command(cls=RepeatableOptionCommand)
@click.option("--datasets", type=ANY_PATH, multiple=True, help="Prefixes of the datasets, in order.")
@click.option(
    "--input", "folder", type=FOLDER, help="Instead of --datasets: folder of datasets, sorted by name."
)
@click.option(
    "--output-prefix",
    type=OUTPUT_PREFIX,
    required=True,
    help="Output prefix; .bin, .idx and .json are appended.",
)
@click.option(
    "--dataset-impl",
    type=click.Choice(["mmap", "cached", "lazy"]),
    help="Index format.  [default: of the first]",
)
@click.option("--multimodal", is_flag=True, help="The indexes have a mode per sequence.")
@click.option("--assume-same-tokenizer", is_flag=True, help="Accept datasets without PREFIX.json.")
@click.option("--workers", type=WORKERS, default=4, help="Copy threads.")
@click.option("--merge", "way", type=click.Choice(["distributed", "serial"]), help="Accepted and ignored.")
@click.option("--torch-backend", type=click.Choice(["gloo", "mpi"]), help="Accepted and ignored.")
def merge(
    datasets: tuple[Path, ...],
    folder: Path | None,
    output_prefix: Path,
    dataset_impl: str | None,
    multimodal: bool,
    assume_same_tokenizer: bool,
    workers: int,
    way: str | None,
    torch_backend: str | None,
) -> None:
    """Merge datasets of one tokenizer, one after the other."""
    import resource

    from mega_data.convert import canonical_format
    from mega_data.merge import find_prefixes
    from mega_data.merge import merge_datasets as join
    from mega_schema.dataset.indexed_dataset import open_dataset
    from mega_schema.errors import ConfigError
    from mega_schema.outputs import check_dataset_output, dataset_files

    if bool(datasets) == bool(folder):
        found = "both" if datasets else "neither"
        raise ConfigError("--datasets, --input", "exactly one is required", found=found)
    # each dataset stays open while it is merged; the default limit of open files is a few hundred
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    prefixes = find_prefixes(folder) if folder else list(datasets)
    opened_datasets = [open_dataset(prefix, multimodal=multimodal) for prefix in prefixes]
    inputs = [path for prefix in prefixes for path in dataset_files(prefix)]
    if check_dataset_output("--output-prefix", output_prefix, inputs=inputs):
        warn_replaced(output_prefix)
    with progress_bar(
        "merging", sum(data.tokens * data.dtype.itemsize for data in opened_datasets)
    ) as progress:
        result = join(
            opened_datasets,
            output_prefix,
            index_format=canonical_format(dataset_impl) if dataset_impl else None,
            assume_same_tokenizer=assume_same_tokenizer,
            workers=workers,
            progress=progress,
        )
    rate = result.size / 1e6 / max(result.seconds, 1e-9)
    click.echo(
        f"{output_prefix}: {format_count(len(opened_datasets), 'dataset')}, "
        f"{format_count(result.documents, 'document')}, "
        f"{format_count(result.sequences, 'sequence')}, {format_count(result.tokens, 'token')}, "
        f"{rate:.0f} MB/s"
    )
    record_counts(documents_out=result.documents)
    if result.differing:
        click.echo(
            f"note: made with different options: {', '.join(result.differing)} (see each PREFIX.json)",
            err=True,
        )
