"""The scores of a target's tokens, for the page of a result."""

from __future__ import annotations

from mega_eval.models.interface import WindowScores
from mega_eval.task_result import TargetToken
from mega_eval.windows import Tokens
from mega_schema.tokenizer.tokenizer import Tokenizer


def score_tokens(tokenizer: Tokenizer, target: Tokens, scores: WindowScores) -> tuple[TargetToken, ...]:
    """Return text, ln P and greedy verdict of each token of a target."""
    return tuple(
        TargetToken(tokenizer.decode([token]), round(float(logprob), 6), bool(is_greedy))
        for token, logprob, is_greedy in zip(target.tolist(), scores.logprobs, scores.is_greedy, strict=True)
    )
