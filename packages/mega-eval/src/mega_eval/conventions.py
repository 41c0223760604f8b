"""Names of the published definitions that tasks follow. Imports nothing, so that `--help` is fast."""

from __future__ import annotations

from typing import Final

LAST_TOKEN: Final = "last-token"
STRICT: Final = "strict"
LAMBADA: Final = (LAST_TOKEN, STRICT, "openai", "standard")
OVERLAPPING: Final = "overlapping"
LM_EVAL: Final = "lm-eval"
