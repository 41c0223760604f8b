"""The scores of a target's tokens, for the page of a result."""

from __future__ import annotations

from mega_eval.models.interface import WindowScores
from mega_eval.task_result import TargetToken
from mega_eval.windows import Tokens
from mega_schema.tokenizer.tokenizer import Tokenizer


def score_tokens(tokenizer: Tokenizer, target: Tokens, scores: WindowScores) -> tuple[TargetToken, ...]:
    """Return text, ln P and greedy verdict of each token of a target."""
    # not `decode`, which drops the space before a SentencePiece token that is alone
    pieces = tokenizer.pieces(target.tolist())
    return tuple(
        TargetToken(piece, round(float(logprob), 6), bool(is_greedy))
        for piece, logprob, is_greedy in zip(pieces, scores.logprobs, scores.is_greedy, strict=True)
    )
