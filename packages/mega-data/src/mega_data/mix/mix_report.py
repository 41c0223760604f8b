"""The report of a mix: for each source its documents, tokens, epochs and share, and the blend file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mega_data.mix.dataset_mix import TRAINING, DatasetMix, dataset_name
from mega_data.mix.sources import SPLITS, MixSource

BLEND: Final = "blend.json"  # for --per-split-data-args-path
BLEND_WORDS: Final = "blend.txt"  # for --data-args-path
MANY_EPOCHS: Final = 4.0  # more repetitions are worth less than new data (arXiv:2305.16264)
Report = dict[str, Any]


def report_datasets(mix: DatasetMix) -> Report:
    """Return the counts of a finished mix, by split and source."""
    splits = {
        name: [
            {
                "source": str(source.prefix),
                "weight": source.weight,
                "documents": documents,
                "tokens": tokens,
                "available_documents": available[0],
                "available_tokens": available[1],
                "epochs": tokens / available[1] if available[1] else 0.0,
            }
            for source, (documents, _, tokens), available in zip(
                mix.sources, mix.totals(split), mix.available(split), strict=True
            )
        ]
        for split, name in enumerate(SPLITS)
    }
    return {"seed": mix.seed, "splits": add_shares(splits)}


def report_weights(sources: Sequence[MixSource], epochs: Sequence[float]) -> Report:
    """Return what a blend by weight reads of each source; its documents are not selected."""
    rows = [
        {
            "source": str(source.prefix),
            "weight": source.weight,
            "documents": source.documents,
            "tokens": source.data.tokens * source_epochs,
            "available_documents": source.documents,
            "available_tokens": source.data.tokens,
            "epochs": source_epochs,
        }
        for source, source_epochs in zip(sources, epochs, strict=True)
    ]
    shares = add_shares({SPLITS[TRAINING]: rows})
    return {
        "splits": {
            name: [{**row, "tokens": round(row["tokens"])} for row in rows] for name, rows in shares.items()
        }
    }


def add_shares(splits: Mapping[str, Sequence[Report]], unit: str = "tokens") -> dict[str, list[Report]]:
    """Add to each source its share of the split.

    Args:
        unit: key of the size.
    """
    totals = {name: sum(row[unit] for row in rows) for name, rows in splits.items()}
    return {
        name: [{**row, "share": row[unit] / totals[name] if totals[name] else 0.0} for row in rows]
        for name, rows in splits.items()
    }


def split_blend(report: Report, url: Path | None) -> str:
    """Return the content of BLEND: the dataset of each split that has tokens.

    Args:
        url: of the datasets, if they are uploaded; mega-train reads a local copy of BLEND. None: the datasets
            are beside it.
    """
    splits = {
        name: [str(url / dataset_name(split)) if url else dataset_name(split)]
        for split, name in enumerate(SPLITS)
        if any(row["tokens"] for row in report["splits"][name])
    }
    return json.dumps(splits, indent=1) + "\n"


def weight_blend(report: Report) -> str:
    """Return the content of BLEND_WORDS: the share and the prefix of each source."""
    rows = report["splits"][SPLITS[TRAINING]]
    lines = (f"{row['share']:.9g} {shlex.quote(str(Path(row['source']).resolve()))}" for row in rows)
    return "\n".join(lines) + "\n"


def format_table(report: Report) -> list[str]:
    """Return the lines of a table of the sources, for each split with documents."""
    unit = _unit(report)
    head = ("split", "source", "documents", unit, "epochs", "share")
    table = [head]
    for name, rows in report["splits"].items():
        for row in rows:
            if row[unit]:
                numbers = (f"{row['documents']:,}", f"{row[unit]:,}", f"{row['epochs']:.2f}")
                table.append((name, row["source"], *numbers, f"{row['share']:.2%}"))
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _unit(report: Report) -> str:
    """Return the key of the sizes: tokens of datasets, bytes of texts."""
    rows = next(iter(report["splits"].values()))
    return "tokens" if "tokens" in rows[0] else "bytes"


def warnings(report: Report) -> list[str]:
    """Return a line for each source that is read often or not at all, and for each empty split."""
    unit = _unit(report)
    training, *others = report["splits"].items()
    lines = [
        f"{row['source']}: read for {row['epochs']:.1f} epochs"
        for row in training[1]
        if row["epochs"] > MANY_EPOCHS
    ]
    lines += [f"{row['source']}: no training document" for row in training[1] if not row["documents"]]
    return [*lines, *(f"{name}: no document" for name, rows in others if not any(r[unit] for r in rows))]
