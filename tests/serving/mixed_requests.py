"""Random requests to every API of a server, good ones and bad ones."""

from __future__ import annotations

import random
from typing import Any

_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<"],
}
_MESSAGES = [{"role": "user", "content": "Hi"}]


def build_mixed_request(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """Return a path, a body and the status that it deserves."""
    prompt = "".join(rng.choice("abc de:\n") for _ in range(rng.randint(1, 40)))
    completion = {"prompt": prompt, "max_tokens": rng.randint(1, 24), "seed": rng.randrange(2**32)}
    grammar = {"structured_outputs": {"choice": ["yes", "no"]}}
    megatron = {"prompts": [prompt], "tokens_to_generate": rng.randint(1, 16)}
    return rng.choice(
        [
            ("/v1/completions", {**completion, "temperature": 0}, 200),
            ("/v1/completions", {**completion, "top_p": 0.8, "top_k": 20, "presence_penalty": 1}, 200),
            ("/v1/completions", {**completion, "n": 3, "logprobs": 2}, 200),
            ("/v1/completions", {**completion, "max_tokens": 0, "echo": True, "logprobs": 1}, 200),
            ("/v1/completions", {**completion, "max_tokens": 40, **grammar}, 200),
            ("/v1/completions", {**completion, "stop": ["a", "zz"], "stream": True}, 200),
            ("/v1/completions", {**completion, "response_format": _TAG, "return_token_ids": True}, 200),
            ("/v1/completions", {**completion, "truncate_prompt_tokens": 3, "min_tokens": 2}, 200),
            ("/v1/embeddings", {"input": [prompt, prompt[:5]], "encoding_format": "base64"}, 200),
            ("/v1/embeddings", {"input": prompt, "dimensions": 5, "cache_salt": "s"}, 200),
            ("/v1/embeddings", {"input": prompt, "dimensions": 10_000}, 400),
            ("/v1/completions", {**completion, "temprature": 1}, 400),
            ("/v1/completions", {**completion, "max_tokens": 10_000}, 400),
            ("/v1/completions", {**completion, "structured_outputs": {"regex": "(a"}}, 400),
            ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 8, "stream": True}, 200),
            ("/v1/chat/completions", {"messages": []}, 400),
            ("/v1/responses", {"input": prompt, "max_output_tokens": 4}, 200),
            ("/api", {**megatron, "beam_width": rng.randint(1, 4)}, 200),
            ("/api", {**megatron, "tokens_to_generate": 0, "logprobs": True}, 200),
            ("/api", {**megatron, "top_p": 0.9, "top_p_decay": 0.9, "random_seed": 3}, 200),
            ("/api", {"prompts": [prompt] * 3, "tokens_to_generate": 5}, 200),
            ("/api", {"prompts": []}, 400),
        ]
    )
