"""Score a long text in overlapping windows: what the perplexity tasks have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_eval import metrics
from mega_eval.metrics import Metric
from mega_eval.models.interface import Scorer
from mega_eval.task_result import Example
from mega_eval.tasks.token_scores import score_tokens
from mega_eval.windows import Window
from mega_schema.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamScores:
    """Scores of a stream of tokens.

    Attributes:
        loss: nats per token; its interval takes the windows as independent draws.
        nats: of all scored tokens.
        tokens, windows, tokens_read: numbers of scored tokens, of windows, and of tokens the model read.
        examples: one per window that scores tokens.
    """

    loss: Metric
    nats: float
    tokens: int
    windows: int
    tokens_read: int
    examples: Sequence[Example]


def score_stream(scorer: Scorer, tokenizer: Tokenizer, windows: Sequence[Window]) -> StreamScores:
    """Score the windows of a stream."""
    examples, nats, tokens = [], [], []
    for number, (window, score) in enumerate(zip(windows, scorer.score(windows), strict=True)):
        if window.target_length:
            nats.append(-float(score.logprobs.sum()))
            tokens.append(window.target_length)
            examples.append(
                Example(
                    id=f"window {number}",
                    prompt=tokenizer.decode(window.tokens[: -window.target_length].tolist()),
                    expected=tokenizer.decode(window.targets.tolist()),
                    prediction=tokenizer.decode(score.greedy_ids.tolist()),
                    scores={"nats": nats[-1], "nats_weight": float(window.target_length)},
                    tokens=score_tokens(tokenizer, window.targets, score),
                )
            )
    return StreamScores(
        loss=metrics.ratio(
            nats,
            tokens,
            "nats per token; the interval takes windows as independent",
            higher_is_better=False,
            example_score="nats",
        ),
        nats=sum(nats),
        tokens=sum(tokens),
        windows=len(windows),
        tokens_read=sum(window.input_length for window in windows if window.target_length),
        examples=examples,
    )
