"""`mega-data mix`: shuffle datasets or lines by weight into splits, or write the blend only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    RepeatableOptionCommand,
    exit_if_nothing_left,
    is_whole_run,
    placement_options,
    run_job,
    warn_replaced,
    work_folder,
)
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import output_url, uploads_output
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_FOLDER_OR_URL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from mega_data.mix.dataset_mix import DatasetMix
    from mega_data.mix.mix_report import Report
    from mega_data.mix.sources import MixSource
    from mega_data.mix.text_mix import TextMix


@click.command(cls=RepeatableOptionCommand)
@click.option(
    "--data-path",
    "words",
    multiple=True,
    help="Prefixes of datasets, or WEIGHT PREFIX pairs as of mega-train; weights are shares of the tokens.",
)
@click.option(
    "--input",
    "texts",
    multiple=True,
    help="Instead of datasets: files, globs or folders of JSON lines, or WEIGHT FILE pairs by bytes.",
)
@click.option(
    "--output",
    type=OUTPUT_FOLDER_OR_URL,
    required=True,
    help="Folder, or s3:// URL, for train_document, valid_document and test_document, or for "
    "train-00000.jsonl and so on.",
)
@click.option(
    "--split",
    default=None,
    help="Shares of the documents for training, validation and test.  [default: 969,30,1]",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="Training tokens of the mix.  [default: as many as all sources have]",
)
@click.option("--seed", type=click.IntRange(min=0), default=1234, help="Seed of the shuffle and the split.")
@click.option("--weights-only", is_flag=True, help="Write only the blend file and report.json, no dataset.")
@click.option("--assume-same-tokenizer", is_flag=True, help="Accept datasets without PREFIX.json.")
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for intermediate files; with a URL also for the output.  [default: OUTPUT/.work]",
)
@click.option("--memory", type=click.IntRange(min=1), default=256, help="MiB of memory per worker.")
@placement_options()
@uploads_output("words", "texts")
def mix(
    words: tuple[str, ...],
    texts: tuple[str, ...],
    output: Path,
    split: str | None,
    tokens: int | None,
    seed: int,
    weights_only: bool,
    assume_same_tokenizer: bool,
    work: Path | None,
    memory: int,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Mix datasets, or JSON lines, by weight and shuffle their documents into three splits.

    Each document belongs to one split. Training documents are repeated or left out as the weights require.
    The result depends only on the datasets, the weights and the seed; a killed run resumes.
    """
    from mega_schema.errors import ConfigError

    if bool(words) == bool(texts):
        found = "both" if words else "neither"
        raise ConfigError("--data-path, --input", "exactly one is required", found=found)
    if weights_only:
        options = {"--split": split, "--work-dir": None if output_url() else work, "--stage": only}
        for name, value in options.items():
            if value is not None:
                hint = "mega-train --split" if name == "--split" else "leave it out"
                raise ConfigError(name, "has no effect with --weights-only", found=value, hint=hint)
    if texts:
        flags = {"--weights-only": weights_only, "--tokens": tokens}
        flags |= {"--assume-same-tokenizer": assume_same_tokenizer}
        if flag := next((flag for flag, value in flags.items() if value), None):
            raise ConfigError(flag, "is of datasets", found="--input", hint="--data-path PREFIX")
    run = _MixRun(output, work, split or "969,30,1", seed, memory << 20, workers, executor, only)
    if texts:
        run.mix_texts(texts)
    else:
        run.mix_datasets(words, tokens, weights_only=weights_only, same_tokenizer=assume_same_tokenizer)


@dataclass(frozen=True, slots=True)
class _MixRun:
    """The options of a run that datasets and texts share."""

    output: Path
    work: Path | None
    split: str
    seed: int
    memory: int
    workers: int
    executor: str
    only: str | None

    def mix_datasets(
        self, words: Sequence[str], tokens: int | None, *, weights_only: bool, same_tokenizer: bool
    ) -> None:
        from mega_data.merge import check_compatible, merge_info
        from mega_data.mix.dataset_mix import DatasetMix, check_mix_size, dataset_name
        from mega_data.mix.sources import parse_fractions, parse_sources, training_epochs
        from mega_data.output_folder import check_folder, staging_folder
        from mega_schema.outputs import dataset_files

        sources = parse_sources(words)
        inputs = [path for source in sources for path in dataset_files(source.prefix)]
        check_folder(self.output, self.work, inputs)
        datasets = [source.data for source in sources]
        check_compatible(datasets, self.output / dataset_name(0))
        info, _ = merge_info(datasets, same_tokenizer)
        if weights_only:
            _write_blend(sources, training_epochs(sources, 1.0, tokens), self.output)
            return
        fractions = parse_fractions(self.split)
        epochs = training_epochs(sources, fractions[0], tokens)
        check_mix_size(sources, epochs, fractions, self.work or self.output / ".work", self.output)
        staging = staging_folder(self.output)
        with self._work_folder() as folder:
            job = DatasetMix(sources, epochs, fractions, self.seed, staging, folder, info, self.memory)
            if self._run(job):
                _finish(job, self.output, keep_work=self.work is not None)

    def mix_texts(self, texts: Sequence[str]) -> None:
        from mega_data.mix.sources import parse_fractions
        from mega_data.mix.text_mix import TextMix, find_text_sources
        from mega_data.output_folder import check_folder, staging_folder
        from mega_data.readers.file_tree import scanned_folders

        sources = find_text_sources(texts)
        words = [str(source.word) for source in sources]
        files = [file for source in sources for file in source.files]
        check_folder(self.output, self.work, files, scanned_folders(words, files))
        fractions = parse_fractions(self.split)
        with self._work_folder() as folder:
            job = TextMix(sources, fractions, self.seed, staging_folder(self.output), folder, self.memory)
            if self._run(job):
                _finish_texts(job, self.output, keep_work=self.work is not None)

    def _work_folder(self) -> AbstractContextManager[Path]:
        whole_run = is_whole_run(self.executor, self.only)
        default = self.output / ".work"
        return work_folder(self.work, default, self.output, whole_run=whole_run, lock=self.output)

    def _run(self, job: DatasetMix | TextMix) -> bool:
        """Run the stages; return whether all are finished."""
        from mega_data.error_limit import ErrorCount, ErrorLimit

        results = run_job(
            job,
            job.work,
            executor=self.executor,
            workers=self.workers,
            only=self.only,
            errors=ErrorCount(ErrorLimit()),
            marked=(self.output, "mix"),
        )
        return results is not None


def _write_blend(sources: Sequence[MixSource], epochs: Sequence[float], output: Path) -> None:
    from mega_data.mix.mix_report import BLEND, BLEND_WORDS, report_weights, weight_blend
    from mega_data.output_folder import has_finished_run, list_written, lock_folder, write_marker
    from mega_data.readers.inputs import REPORT
    from mega_schema.atomic_io import write_text

    if has_finished_run(output):
        warn_replaced(output, "output")
    with lock_folder(output, shared=False):
        report = report_weights(sources, epochs)
        (output / BLEND).unlink(missing_ok=True)  # of an earlier mix
        write_text(output / BLEND_WORDS, weight_blend(report))
        write_text(output / REPORT, _dump(report))
        write_marker(output, "mix", list_written(output))
    blend = output / BLEND_WORDS if output_url() is None else Path(BLEND_WORDS)  # a copy of it
    _print(report, f"{(output_url() or output) / BLEND_WORDS}: mega-train --data-args-path {blend}")


def _finish(job: DatasetMix, output: Path, *, keep_work: bool) -> None:
    """Publish the datasets, the blend and the report."""
    from mega_data.merge import save_tokenizer
    from mega_data.mix.dataset_mix import dataset_name
    from mega_data.mix.mix_report import BLEND, report_datasets, split_blend
    from mega_data.mix.sources import SPLITS
    from mega_data.output_folder import publish
    from mega_data.readers.inputs import REPORT
    from mega_data.task_stages import remove_folder, write_file
    from mega_schema.errors import ConfigError

    report = report_datasets(job)
    if not any(row["documents"] for row in report["splits"]["train"]):
        for folder in (job.output, *(() if keep_work else (job.work,))):
            remove_folder(folder)
        hint = "more --tokens, or a larger first share in --split"
        raise ConfigError("--tokens, --split", "no document is left for training", hint=hint)
    datasets = [source.data for source in job.sources]
    for split, name in enumerate(SPLITS):
        if any(row["documents"] for row in report["splits"][name]):
            job.publish(split)
            save_tokenizer(datasets, job.output / dataset_name(split))
    write_file(job.output / BLEND, split_blend(report, output_url()))
    write_file(job.output / REPORT, _dump(report))
    _remove_stale(job.output, output)
    publish(output, "mix", job.work)
    if not keep_work:
        remove_folder(job.work)
    blend = output / BLEND if output_url() is None else Path(BLEND)  # a copy of it
    _print(report, f"{(output_url() or output) / BLEND}: mega-train --per-split-data-args-path {blend}")


def _finish_texts(job: TextMix, output: Path, *, keep_work: bool) -> None:
    """Publish the files and the report.

    Raises:
        SystemExit: there are no lines: exit code 1.
    """
    from mega_data.output_folder import publish
    from mega_data.readers.inputs import REPORT
    from mega_data.task_stages import remove_folder, write_file

    report = job.report()
    write_file(job.output / REPORT, _dump(report))
    for path in output.glob("*-[0-9][0-9][0-9][0-9][0-9].jsonl"):  # of an earlier mix
        if path.name not in report["files"]:
            path.unlink()
    publish(output, "mix", job.work)
    if not keep_work:
        remove_folder(job.work)
    _print(report, f"{output_url() or output}: {format_count(len(report['files']), 'file')}")
    lines = sum(row["documents"] for rows in report["splits"].values() for row in rows)
    exit_if_nothing_left(lines, lines)


def _remove_stale(staging: Path, output: Path) -> None:
    """Remove the datasets of an earlier run that this run replaces or lacks, their cache and blend by weight.

    A dataset that a killed process has published already is not in `staging` and stays: the blend names it.
    """
    import shutil

    from mega_data.mix.dataset_mix import dataset_name
    from mega_data.mix.mix_report import BLEND, BLEND_WORDS
    from mega_data.mix.sources import SPLITS
    from mega_data.output_folder import INDEX_CACHE
    from mega_schema.dataset.indexed_dataset import sibling

    (output / BLEND_WORDS).unlink(missing_ok=True)
    shutil.rmtree(output / INDEX_CACHE, ignore_errors=True)
    blend = (staging / BLEND).read_text("utf-8")
    for split, name in enumerate(SPLITS):
        prefix = output / dataset_name(split)
        is_replaced = sibling(staging / dataset_name(split), ".idx").exists()
        if not is_replaced and f'"{name}"' in blend:
            continue
        # readers open the index first: none combines an old one with new tokens
        for suffix in (".idx", ".json", ".bin"):
            sibling(prefix, suffix).unlink(missing_ok=True)
        shutil.rmtree(sibling(prefix, ".tokenizer"), ignore_errors=True)


def _dump(report: Report) -> str:
    import json

    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def _print(report: Report, line: str) -> None:
    from mega_data.mix.mix_report import format_table, warnings

    rows = [row for rows in report["splits"].values() for row in rows]
    record_counts(
        documents_in=sum(row["available_documents"] for row in rows),
        documents_out=sum(row["documents"] for row in rows),
    )
    click.echo("\n".join(format_table(report)))
    click.echo(line)
    for warning in warnings(report):
        click.echo(f"note: {warning}", err=True)
