"""Count the tokens of a request as OpenAI's `usage`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts and all sequences of a request.

    Attributes:
        cached_tokens: tokens of the prompts that the prefix cache had.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add_prompt(self, tokens: int, cached_tokens: int) -> None:
        """Count a prompt."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the object of completions and chat completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
