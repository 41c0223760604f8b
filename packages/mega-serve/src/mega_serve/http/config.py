"""Settings of the HTTP application."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_serve.http.auth import KeyRing
from mega_serve.http.limits import Limits
from mega_serve.http.rate_limit import RateLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the operator decided by flags.

    Attributes:
        keys: accepted API keys; an empty ring accepts every request.
        rate_limits: of each key; without keys, of all requests together.
        allowed_hosts: values of the Host header beside loopback and the bound address.
        allowed_origins: origins of web pages that may read responses (CORS).
        public_metrics: /metrics needs no key.
        vllm_metrics: every metric has a second name that begins with `vllm:`.
        log_prompts: messages of unexpected exceptions, which may quote a prompt, are logged.
        root_path: prefix of paths that a proxy takes away.
        traces_endpoint: OTLP endpoint for traces, the only connection that the server ever opens; "": none.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    rate_limits: RateLimits = RateLimits()
    limits: Limits = Limits()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    public_metrics: bool = False
    vllm_metrics: bool = False
    log_prompts: bool = False
    root_path: str = ""
    traces_endpoint: str = ""
