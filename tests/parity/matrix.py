"""A pairwise covering design of parallel layouts.

There are hundreds of combinations, but most faults need only two settings. So rows are chosen
deterministically until every valid pair of values occurs in some row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

Row = dict[str, Any]

MOST = 8  # processes
FACTORS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "model": ("gpt", "llama"),
        "tp": (1, 2, 4),
        "sequence": (False, True),
        "pp": (1, 2, 4),
        "virtual": (1, 2),
        "cp": (1, 2),
        "dp": (1, 2),
        "zero": (0, 1, 3),
        "recompute": ("none", "selective", "full"),
    }
)


def ranks(row: Row) -> int:
    """Processes that a row takes."""
    return int(row["tp"] * row["pp"] * row["cp"] * row["dp"])


def possible() -> Iterator[Row]:
    """Every combination that means something on at most eight processes, and more than one."""
    for values in itertools.product(*FACTORS.values()):
        row = dict(zip(FACTORS, values, strict=True))
        alone = row["dp"] * row["cp"] == 1
        if (
            1 < ranks(row) <= MOST
            and not (row["sequence"] and row["tp"] == 1)
            and not (row["virtual"] > 1 and row["pp"] == 1)
            and not (row["zero"] and alone)
        ):
            yield row


def pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two settings of a row."""
    return set(itertools.combinations(row.items(), 2))


def covering_rows() -> list[Row]:
    """Few rows in which every two settings that can stand together do so; the first best row each time."""
    rows = list(possible())
    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: (len(pairs(row) & missing), -ranks(row)))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def sentence(row: Row) -> str:
    """The row in words."""
    cuts = [
        f"tensor_{row['tp']}" + ("_with_sequence" if row["sequence"] else "") if row["tp"] > 1 else "",
        f"pipeline_{row['pp']}" + ("_of_virtual_stages" if row["virtual"] > 1 else "")
        if row["pp"] > 1
        else "",
        f"context_{row['cp']}" if row["cp"] > 1 else "",
        f"data_{row['dp']}" if row["dp"] > 1 else "",
        f"zero_{row['zero']}" if row["zero"] else "",
        f"{row['recompute']}_recomputation" if row["recompute"] != "none" else "",
    ]
    return f"{row['model']}_over_" + "_".join(cut for cut in cuts if cut)


def settings(row: Row) -> dict[str, Any]:
    """The row as a run's configuration."""
    chosen = {
        "model__num_layers": max(4, row["pp"] * row["virtual"]),
        "batch__global_batch_size": 4,
        "parallel__tensor_model_parallel_size": row["tp"],
        "parallel__sequence_parallel": row["sequence"],
        "parallel__pipeline_model_parallel_size": row["pp"],
        "parallel__context_parallel_size": row["cp"],
        "parallel__zero_stage": row["zero"],
    }
    if row["virtual"] > 1:
        chosen["parallel__num_virtual_stages_per_pipeline_rank"] = row["virtual"]
    if row["recompute"] != "none":
        chosen["recompute__recompute_granularity"] = row["recompute"]
    return chosen
