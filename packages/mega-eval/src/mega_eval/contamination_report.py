"""The outcome of a search for contamination, as lines for a terminal and as a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from mega_eval.contamination import ExampleOverlap, TrainingSet
from mega_eval.contamination_subsets import SubsetMetric
from mega_eval.number_format import format_number

FORMAT = 1
KEYS = (
    "format",
    "task",
    "data",
    "train",
    "unit",
    "ngram",
    "counts",
    "subsets",
    "examples",
    "seconds",
    "megabytes_per_second",
)
_SHOWN_EXAMPLES = 5


def count_overlaps(overlaps: Sequence[ExampleOverlap]) -> dict[str, int]:
    """Count dirty and clean examples, and those of the clean ones that are shorter than an n-gram."""
    dirty = sum(overlap.is_dirty for overlap in overlaps)
    short = sum(overlap.ngrams == 0 for overlap in overlaps)
    return {"examples": len(overlaps), "dirty": dirty, "clean": len(overlaps) - dirty, "short": short}


def format_overlaps(
    overlaps: Sequence[ExampleOverlap],
    counts: Mapping[str, int],
    subsets: Mapping[str, SubsetMetric],
    ngram: str,
) -> Iterator[str]:
    """Yield the lines for a terminal."""
    share = counts["dirty"] / counts["examples"]
    yield f"{counts['dirty']:,} of {counts['examples']:,} examples are dirty ({share:.1%}) by {ngram}"
    if counts["short"]:
        yield f"{counts['short']:,} examples are shorter than {ngram} and count as clean"
    dirty = [overlap for overlap in overlaps if overlap.first is not None]
    for overlap in dirty[:_SHOWN_EXAMPLES]:
        assert overlap.first is not None
        place = f"document {overlap.first.document:,} of {overlap.first.train}"
        yield f"  {overlap.id}: {overlap.matched:,} of {overlap.ngrams:,} n-grams, first in {place}:"
        yield f"    {overlap.first.ngram!r}"
    if len(dirty) > _SHOWN_EXAMPLES:
        yield f"  and {len(dirty) - _SHOWN_EXAMPLES:,} more; --output writes all"
    for name, subset in subsets.items():
        yield f"{name.replace('_', ' ')}:"
        for kind, metric in (("clean", subset.clean), ("dirty", subset.dirty)):
            interval = _format_interval(metric.interval)
            yield f"  {kind:<13}  {format_number(metric.value):>9}  {interval}  {metric.count:,} examples"
        difference = format_number(subset.difference, "+")
        yield f"  dirty - clean  {difference:>9}  {_format_interval(subset.interval)}"


def _format_interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"95 % {' to '.join(map(format_number, interval))}"


def build_record(
    task: str | None,
    fingerprints: Sequence[Mapping[str, object]],
    training_sets: Sequence[TrainingSet],
    unit: str,
    ngram: int,
    counts: Mapping[str, int],
    subsets: Mapping[str, SubsetMetric],
    overlaps: Sequence[ExampleOverlap],
) -> dict[str, object]:
    """Return the record but its times, which come last."""
    return {
        "format": FORMAT,
        "task": task,
        "data": list(fingerprints),
        "train": [
            {
                "prefix": str(train.prefix.resolve()),
                "documents": len(train.dataset.documents) - 1,
                "tokens": train.dataset.tokens,
                "tokenizer_sha256": train.tokenizer.identity.sha256,
            }
            for train in training_sets
        ],
        "unit": unit,
        "ngram": ngram,
        "counts": dict(counts),
        "subsets": {name: asdict(subset) for name, subset in subsets.items()},
        "examples": [{**asdict(overlap), "is_dirty": overlap.is_dirty} for overlap in overlaps],
    }
