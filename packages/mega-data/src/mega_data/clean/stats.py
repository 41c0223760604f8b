"""What a pass over documents counts: in and out, reasons, languages, lengths, examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

EXAMPLES, EXAMPLE_CHARACTERS = 3, 300


@dataclass(slots=True)
class Tally:
    """The counts of one step.

    Attributes:
        reasons: documents dropped, by reason.
        lengths_in: documents by the logarithm of their characters to the base 2, rounded down.
        examples: the first texts dropped for each reason.
    """

    step: str
    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    lengths_in: Counter[int] = field(default_factory=Counter)
    lengths_out: Counter[int] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def entered(self, text: str) -> None:
        self.documents_in += 1
        self.bytes_in += size(text)
        self.lengths_in[len(text).bit_length()] += 1

    def left(self, text: str) -> None:
        self.documents_out += 1
        self.bytes_out += size(text)
        self.lengths_out[len(text).bit_length()] += 1

    def dropped(self, reason: str, text: str) -> None:
        self.reasons[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(text[:EXAMPLE_CHARACTERS])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the keys of all counts are strings, in order."""
        return {
            "step": self.step,
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "changed": self.changed,
            "reasons": dict(sorted(self.reasons.items())),
            "languages": dict(sorted(self.languages.items())),
            "lengths_in": {str(length): self.lengths_in[length] for length in sorted(self.lengths_in)},
            "lengths_out": {str(length): self.lengths_out[length] for length in sorted(self.lengths_out)},
            "examples": dict(sorted(self.examples.items())),
        }


def size(text: str) -> int:
    """Bytes in UTF-8; a lone surrogate counts as the three it would take."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def together(tallies: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of one step's counts over shards, in their order: of examples the first are kept."""
    total: dict[str, Any] = {}
    for tally in tallies:
        for name, value in tally.items():
            if isinstance(value, str):
                total[name] = value
            elif isinstance(value, int):
                total[name] = total.get(name, 0) + value
            else:
                counts = total.setdefault(name, {})
                for key, more in value.items():
                    counts[key] = counts[key] + more if key in counts else more
    total["examples"] = {reason: texts[:EXAMPLES] for reason, texts in total.get("examples", {}).items()}
    return total
