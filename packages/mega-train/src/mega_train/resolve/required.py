"""Check required values."""

from __future__ import annotations

import math
from typing import TypeVar

from mega_schema.errors import ConfigError

N = TypeVar("N", int, float)


def require_positive(value: N | None, flag: str, what: str, hint: str) -> N:
    """Return the value, which must be given and above 0.

    Raises:
        ConfigError: it is missing or not above 0.
    """
    if value is None:
        raise ConfigError(flag, "missing", wanted=what, hint=hint)
    if not 0 < value < math.inf:
        raise ConfigError(flag, "not above 0", found=value, wanted=what, hint=hint)
    return value
