"""Options of the samples of BERT and T5."""

from __future__ import annotations

from typing import Literal

MaskType = Literal["words", "pieces", "long-words", "geometric", "permutation"]
SampleRule = Literal["mcore", "legacy"]
