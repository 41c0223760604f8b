"""Limits of requests, of the queue and of connections. Each has a flag of `mega-serve serve`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds that every request is checked against before anything is allocated for it.

    Attributes:
        body_bytes: size of a request body.
        prompts: prompts of one request.
        n: sequences sampled from one prompt.
        beam_width: hypotheses of a beam search.
        request_tokens: rows x tokens of the longest row (prompt and new tokens), over all prompts of a
            request (Megatron's --max-tokens-to-oom).
        logprobs: most probable words reported with a token.
        stop_strings: stop strings of a request.
        stop_string_chars: characters of a stop string.
        bad_words: words of `bad_words`.
        logit_biases: entries of `logit_bias`, and of `allowed_token_ids`.
        grammar_bytes: a JSON schema, regular expression or grammar, in UTF-8.
        queue_requests: engine requests that wait for the engine or run in it.
        queue_tokens: the sum of their `max_total_tokens`.
        request_timeout: seconds from arrival after which a request is ended.
        header_timeout: seconds from the connection, or the first byte of a further request, to the end of
            the headers.
        body_timeout: seconds from the end of the headers to the end of the body.
        keep_alive: seconds that a connection may be idle between two requests.
        write_timeout: seconds that a client may leave the response unread while the send buffer is full.
        connections: open connections; the ones above are closed at once.
    """

    body_bytes: int = 2 * 1024 * 1024
    prompts: int = 128
    n: int = 16
    beam_width: int = 32
    request_tokens: int = 12_000
    logprobs: int = 20
    stop_strings: int = 16
    stop_string_chars: int = 256
    bad_words: int = 128
    logit_biases: int = 1024
    grammar_bytes: int = 64 * 1024
    queue_requests: int = 1024
    queue_tokens: int = 1_000_000
    request_timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    keep_alive: float = 30.0
    write_timeout: float = 60.0
    connections: int = 2048
