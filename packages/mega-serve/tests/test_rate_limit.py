"""Token buckets against a clock of the test."""

from __future__ import annotations

import random

from mega_serve.http.rate_limit import RateLimiter, RateLimits, TokenBucket


def test_a_debt_delays_the_next_request_until_it_is_paid() -> None:
    bucket = TokenBucket(rate=2.0, capacity=10.0, now=0.0)
    assert bucket.wait_seconds(1.0, 0.0) == 0.0
    bucket.debit(30.0, 0.0)
    assert bucket.wait_seconds(1.0, 0.0) == 10.5
    assert bucket.wait_seconds(1.0, 10.5) == 0.0


def test_a_bucket_never_holds_more_than_its_capacity_and_a_clock_that_goes_back_adds_nothing() -> None:
    bucket = TokenBucket(rate=2.0, capacity=10.0, now=0.0)
    assert bucket.level(1e9) == 10.0
    bucket.debit(5.0, 1e9)
    assert bucket.level(0.0) == 5.0
    assert bucket.level(1e9 + 1) == 7.0


def test_in_any_history_at_most_the_rate_and_one_bucket_are_admitted() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        per_minute = rng.randint(1, 120)
        limiter = RateLimiter(RateLimits(requests_per_minute=per_minute))
        now = start = rng.uniform(0, 1e6)
        admitted = 0
        for _ in range(100):
            now += rng.choice((0.0, rng.uniform(0, 0.5), rng.uniform(0, 20)))
            seconds = limiter.admit("key", now)
            admitted += seconds == 0.0
            if seconds:
                assert limiter.admit("key", now + seconds + 1e-6) == 0.0
                admitted += 1
                now += seconds + 1e-6
        assert admitted <= per_minute + (now - start) * per_minute / 60 + 1e-3


def test_keys_have_buckets_of_their_own() -> None:
    limiter = RateLimiter(RateLimits(tokens_per_minute=60))
    assert limiter.admit("alice", 0.0) == 0.0
    limiter.debit_tokens("alice", 90, 0.0)
    assert limiter.admit("alice", 0.0) == 31.0
    assert limiter.admit("bob", 0.0) == 0.0


def test_without_limits_everything_is_admitted() -> None:
    limiter = RateLimiter(RateLimits())
    limiter.debit_tokens("alice", 10**9, 0.0)
    assert limiter.admit("alice", 0.0) == 0.0
