"""Rate limits per API key: token buckets of requests and of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


class TokenBucket:
    """A bucket that fills at a constant rate and may be overdrawn by its last user.

    Work is admitted while the level is positive and debited as it happens: how many tokens a request will
    generate is unknown before, and a debt delays the next one for exactly as long as it takes to pay.

    Args:
        rate: units per second.
        capacity: units of a full bucket, as which it starts.
    """

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        self._level = capacity
        self._updated = now

    def level(self, now: float) -> float:
        """Return the units in the bucket; negative: a debt. A clock that goes back adds nothing."""
        self._level = min(self.capacity, self._level + self.rate * max(0.0, now - self._updated))
        self._updated = max(now, self._updated)
        return self._level

    def wait_seconds(self, needed: float, now: float) -> float:
        """Return the seconds until the bucket has `needed` units, at most its capacity; 0 if it has."""
        return max(0.0, min(needed, self.capacity) - self.level(now)) / self.rate

    def debit(self, units: float, now: float) -> None:
        """Take units out, into debt if need be."""
        self._level = self.level(now) - units


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Limits of one key; 0: none.

    Attributes:
        requests_per_minute: HTTP requests to the APIs.
        tokens_per_minute: tokens of prompts, and generated.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class RateLimiter:
    """The buckets of all keys. There are as many as keys in the key file."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}

    def admit(self, key_id: str, now: float) -> float:
        """Count a request and return 0, or return the seconds to wait before it would be admitted."""
        requests = _bucket_of(self._requests, key_id, self._limits.requests_per_minute, now)
        tokens = _bucket_of(self._tokens, key_id, self._limits.tokens_per_minute, now)
        seconds = max(
            requests.wait_seconds(1.0, now) if requests else 0.0,
            tokens.wait_seconds(1.0, now) if tokens else 0.0,
        )
        if seconds == 0.0 and requests:
            requests.debit(1.0, now)
        return seconds

    def describe(self, key_id: str, now: float) -> str:
        """Return which limit a refused request is above, and by how much."""
        limits = self._limits
        requests = _bucket_of(self._requests, key_id, limits.requests_per_minute, now)
        tokens = _bucket_of(self._tokens, key_id, limits.tokens_per_minute, now)
        owner = "the API key's" if key_id else "the server's"
        request_seconds = requests.wait_seconds(1.0, now) if requests else 0.0
        token_seconds = tokens.wait_seconds(1.0, now) if tokens else 0.0
        if tokens and token_seconds >= request_seconds:
            debt = max(0, -math.floor(tokens.level(now)))
            limit = f"{limits.tokens_per_minute:,} tokens a minute"
            return f"{owner} rate limit of tokens is reached: found {debt:,} above it, wanted at most {limit}"
        limit = f"{limits.requests_per_minute:,} a minute"
        return f"{owner} rate limit of requests is reached: found none left, wanted at most {limit}"

    def debit_tokens(self, key_id: str, tokens: int, now: float) -> None:
        """Count tokens that were processed for the key."""
        bucket = _bucket_of(self._tokens, key_id, self._limits.tokens_per_minute, now)
        if bucket:
            bucket.debit(tokens, now)


def _bucket_of(
    buckets: dict[str, TokenBucket], key_id: str, per_minute: int, now: float
) -> TokenBucket | None:
    if not per_minute:
        return None
    if key_id not in buckets:
        buckets[key_id] = TokenBucket(per_minute / 60, per_minute, now)
    return buckets[key_id]
