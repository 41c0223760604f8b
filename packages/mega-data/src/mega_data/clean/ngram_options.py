"""The options of the training of an n-gram model, without numpy: `--help` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mega_schema.errors import ConfigError

MAX_ORDER: Final = 8
FALLBACK: Final = (0.5, 1.0, 1.5)  # lmplz's --discount_fallback


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """How to train a model.

    Attributes:
        order: words of the longest n-grams.
        prune: for each order, n-grams of at most this count are left out of the model; the last value also
            counts for higher orders.
        fallback: take the discounts FALLBACK where they cannot be computed, as for a small corpus.
        max_bytes: of the n-grams in memory.
    """

    order: int = 5
    prune: tuple[int, ...] = (0,)
    fallback: bool = False
    max_bytes: int = 1 << 62

    def threshold(self, order: int) -> int:
        return self.prune[min(order, len(self.prune)) - 1]

    def check(self) -> None:
        """Check the thresholds.

        Raises:
            ConfigError: they fall, or there are more than orders, or unigrams are pruned.
        """
        found = " ".join(map(str, self.prune))
        if len(self.prune) > self.order:
            wanted = f"at most {self.order} values, see --order"
            raise ConfigError("--prune", "too many values", found=found, wanted=wanted)
        if self.prune[0] or list(self.prune) != sorted(self.prune):
            wanted = "0 for the first, and none below the one before it"
            raise ConfigError("--prune", "not thresholds", found=found, wanted=wanted, hint="--prune 0 0 1")
