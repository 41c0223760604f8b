"""Statistics of a pass over documents: documents in and out, reasons, languages, lengths, examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_EXAMPLES, MAX_EXAMPLE_CHARACTERS = 3, 300


@dataclass(slots=True)
class StepStats:
    """The counts of one step.

    Attributes:
        reasons: documents dropped, by reason.
        replaced: occurrences that the step replaced, by kind.
        lengths_in: documents by the bit length of their number of characters.
        examples: the first dropped texts for each reason.
    """

    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    lengths_in: Counter[int] = field(default_factory=Counter)
    lengths_out: Counter[int] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count_in(self, text: str) -> None:
        self.documents_in += 1
        self.bytes_in += utf8_bytes(text)
        self.lengths_in[len(text).bit_length()] += 1

    def count_out(self, text: str) -> None:
        self.documents_out += 1
        self.bytes_out += utf8_bytes(text)
        self.lengths_out[len(text).bit_length()] += 1

    def count_dropped(self, reason: str, text: str) -> None:
        self.reasons[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(text[:MAX_EXAMPLE_CHARACTERS])

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values: the keys of all counts are strings, in order."""
        return {
            "step": self.step,
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "changed": self.changed,
            "reasons": dict(sorted(self.reasons.items())),
            "replaced": dict(sorted(self.replaced.items())),
            "languages": dict(sorted(self.languages.items())),
            "lengths_in": {str(length): self.lengths_in[length] for length in sorted(self.lengths_in)},
            "lengths_out": {str(length): self.lengths_out[length] for length in sorted(self.lengths_out)},
            "examples": dict(sorted(self.examples.items())),
        }


def utf8_bytes(text: str) -> int:
    """Count bytes in UTF-8; a lone surrogate counts as three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def merge_stats(stats: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum one step's counts over shards in their order; keep the first examples."""
    total: dict[str, Any] = {}
    for shard_stats in stats:
        for name, value in shard_stats.items():
            if isinstance(value, str):
                total[name] = value
            elif isinstance(value, int):
                total[name] = total.get(name, 0) + value
            else:
                counts = total.setdefault(name, {})
                for key, addition in value.items():
                    counts[key] = counts[key] + addition if key in counts else addition
    for name, counts in total.items():
        if isinstance(
            counts, dict
        ):  # in order, so that the report does not depend on the cuts of large files
            total[name] = dict(sorted(counts.items(), key=_count_order))
    total["examples"] = {reason: texts[:MAX_EXAMPLES] for reason, texts in total.get("examples", {}).items()}
    return total


def _count_order(item: tuple[str, Any]) -> tuple[int, str]:
    """Order lengths by number, names by alphabet."""
    key, _ = item
    return (int(key) if key.isdecimal() else 0, key)
