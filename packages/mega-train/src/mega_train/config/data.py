"""What is read, for training and for validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is read."""

    path: Path | None = option("--data-path", None, "prefix of an indexed dataset: the path without .bin")
    split: str = option("--split", "969, 30, 1", "shares of the sequences for training, validation and test")
    split_rule: Literal["mcore", "legacy"] = option(
        "--split-rule", "mcore", "whose rounding: Megatron core's, or that of before October 2023"
    )
    reset_positions: bool = option(
        "--reset-position-ids", False, "count places from the document's first token"
    )
    reset_attention: bool = option("--reset-attention-mask", False, "a token sees its own document only")
    eod_mask_loss: bool = option("--eod-mask-loss", False, "no loss where the input is the end of a document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Validation during training."""

    iterations: int = option("--eval-iters", 100, "batches of a validation; 0 for none")
    interval: int = option("--eval-interval", 1000, "optimizer steps between validations")
