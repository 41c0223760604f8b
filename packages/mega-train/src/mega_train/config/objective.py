"""Options of the objective that a decoder is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from mega_schema.app.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Options of prefix language models."""

    prefix: bool = option(
        "--prefix-lm",
        False,
        "tokens of a prefix of random length see each other; mega-train prefix sets it",
    )
    targets_only: bool = option(
        "--loss-on-targets-only", False, "no loss for targets within the prefix (prefix language models)"
    )
    reweight: bool = option(
        "--reweight-loss-based-on-position-frequency",
        False,
        "multiply the loss of token i of S by 2 (S - i) / (S + 1) (prefix language models)",
    )
