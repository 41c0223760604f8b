"""The request body of /api in the OpenAPI schema. `megatron.parse_request` checks it."""

from __future__ import annotations

from typing import Any

from mega_serve.api.megatron import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_SALT_CHARS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
)


def request_body() -> dict[str, Any]:
    """Return the request body of the operation, with examples."""
    schema = {
        "type": "object",
        "required": ["prompts"],
        "additionalProperties": False,
        "properties": _properties(),
    }
    examples = {
        "sample": {"value": {"prompts": ["Once upon a time"], "tokens_to_generate": 16, "top_k": 40}},
        "score": {"value": {"prompts": ["Hello world"], "tokens_to_generate": 0, "logprobs": True}},
        "beam search": {"value": {"prompts": ["Hello"], "tokens_to_generate": 8, "beam_width": 4}},
    }
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


def _properties() -> dict[str, object]:
    temperature = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TEMPERATURE, "default": 1.0}
    salt = {"type": "string", "maxLength": MAX_SALT_CHARS, "default": ""}
    return {
        "prompts": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "description": "An empty prompt needs add_BOS.",
        },
        "tokens_to_generate": _integer(0, default=64, description="0 scores the prompts; needs logprobs."),
        "logprobs": _boolean("Report the log-probability of every token but the first."),
        "temperature": {**temperature, "description": "Divisor of the logits."},
        "top_k": _integer(0, maximum=MAX_TOP_K, default=0, description="1 is greedy. Excludes top_p."),
        "top_p": _number(0, 1, 0.0, "Sample from the most probable tokens with this probability; 0: all."),
        "top_p_decay": _number(0, 1, 0.0, "Factor of top_p after each token. Needs top_p."),
        "top_p_bound": _number(0, 1, 0.0, "Least top_p of the decay. Above 0, at most top_p."),
        "add_BOS": _boolean("Put the beginning-of-text token before every prompt."),
        "stop_on_double_eol": _boolean("End at two line feeds."),
        "stop_on_eol": _boolean("End at a line feed."),
        "prevent_newline_after_colon": _boolean("Generate no line feed after a colon."),
        "random_seed": _integer(0, description="The same seed and request give the same text."),
        "no_log": _boolean("Keep the prompt out of the log, whatever --log-prompts says."),
        "beam_width": _integer(1, maximum=MAX_BEAM_WIDTH, description="Beam search; one prompt only."),
        "stop_token": {"type": "integer", "description": "Id that ends a beam; default end of document."},
        "length_penalty": _number(
            -MAX_LENGTH_PENALTY,
            MAX_LENGTH_PENALTY,
            1.0,
            "The score of a beam is divided by length ** this.",
        ),
        "priority": _integer(
            -MAX_PRIORITY,
            maximum=MAX_PRIORITY,
            default=0,
            description="Requests with a lower number run first.",
        ),
        "cache_salt": {**salt, "description": "Only requests with the same salt share cached prefixes."},
        "structured_outputs": {
            "type": ["object", "null"],
            "description": "One of json, regex, choice, grammar, json_object, structural_tag; "
            "disable_any_whitespace beside json and json_object.",
        },
    }


def _boolean(description: str) -> dict[str, object]:
    return {"type": "boolean", "default": False, "description": description}


def _number(low: float, high: float, default: float, description: str) -> dict[str, object]:
    limits = {"minimum": low, "maximum": high, "default": default}
    return {"type": "number", **limits, "description": description}


def _integer(low: int, **rest: object) -> dict[str, object]:
    return {"type": "integer", "minimum": low, **rest}
