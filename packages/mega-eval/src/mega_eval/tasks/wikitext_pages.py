"""WikiText and the like by document, as lm-evaluation-harness's task `wikitext` computes it (version 2).

Its dataset, EleutherAI/wikitext_document_level, cuts the file into pages at top-level headings. A page is
detokenized, encoded and scored by itself, from the tokenizer's bos or eod on, in disjoint windows of the
model's context. Words and bytes are those of the page before it is detokenized.

Metrics: `word_perplexity` and `byte_perplexity`, exp of the nats of all pages per word and per byte;
`bits_per_byte`; `perplexity`, exp of the nats per token, which the harness does not report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mega_eval import metrics
from mega_eval.conventions import LM_EVAL
from mega_eval.detokenize import DETOKENIZERS
from mega_eval.harness_encoding import HarnessEncoder
from mega_eval.metrics import Metric
from mega_eval.models.interface import Scorer, WindowScores
from mega_eval.task_result import Example, TargetToken, TaskResult
from mega_eval.tasks.rolling_windows import rolling_windows
from mega_eval.tasks.token_scores import score_tokens
from mega_eval.windows import Window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer


def split_pages(text: str) -> list[str]:
    """Cut a `wiki.*` file into pages: one before every line that is a heading between single `=`.

    Lines are joined by the line breaks between them, and a page of white space before the first heading is
    dropped; the last page is kept whatever it holds.
    """
    pages: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        collapsed = line.replace("= = =", "===").replace("= =", "==").strip()
        if collapsed.startswith("= ") and collapsed.endswith(" ="):
            pages += [page] if (page := "\n".join(lines)).strip() else []
            lines = []
        lines.append(line)
    return [*pages, "\n".join(lines)]


def count_words(page: str) -> int:
    """Count the strings between runs of white space; those before the first and after the last run count."""
    return len(re.split(r"\s+", page))


def evaluate(
    scorer: Scorer,
    tokenizer: Tokenizer,
    text: str,
    *,
    task: str,
    detokenizer: str,
    seq_length: int,
    limit: int | None = None,
    where: object = "--data",
) -> TaskResult:
    """Score the pages of a text.

    Args:
        text: the content of the file, before detokenizing.
        task: name of the task.
        detokenizer: a key of `DETOKENIZERS`.
        seq_length: tokens the model reads at once.
        limit: score the first pages only.
        where: the name of the text in an error.

    Raises:
        FormatError: no page has a token.
    """
    all_pages = split_pages(text)
    pages = all_pages[:limit]
    encoder = HarnessEncoder(tokenizer)
    encodings = encoder.encode_texts([DETOKENIZERS[detokenizer](page) for page in pages])
    windows = [rolling_windows(ids, encoder.prefix_id, seq_length) for ids in encodings]
    if not any(windows):
        raise FormatError(where, "too short to score", found="no tokens", wanted="one at least")
    scores = iter(scorer.score([window for page_windows in windows for window in page_windows]))
    examples = [
        _build_example(tokenizer, number, page, page_windows, [next(scores) for _ in page_windows])
        for number, (page, page_windows) in enumerate(zip(pages, windows, strict=True))
    ]
    return TaskResult(
        task=task,
        convention=LM_EVAL,
        metrics=_metrics(examples),
        counts={
            "pages": len(pages),
            "original_words": sum(map(count_words, pages)),
            "original_bytes": sum(len(page.encode()) for page in pages),
            "tokens_scored": sum(map(len, encodings)),
            "windows": sum(map(len, windows)),
            "seq_length": seq_length,
        },
        examples=examples,
        is_whole=len(pages) == len(all_pages),
        tokens_read=sum(window.input_length for page_windows in windows for window in page_windows),
    )


def _build_example(
    tokenizer: Tokenizer,
    number: int,
    page: str,
    windows: Sequence[Window],
    scores: Sequence[WindowScores],
) -> Example:
    """Build the example of a page; its nats stand once for each denominator."""
    tokens: list[TargetToken] = []
    for window, score in zip(windows, scores, strict=True):
        tokens += score_tokens(tokenizer, window.targets, score)
    nats = -sum(float(score.logprobs.sum()) for score in scores)
    denominators = {
        "word_nats": count_words(page),
        "byte_nats": len(page.encode()),
        "token_nats": len(tokens),
    }
    return Example(
        id=f"page {number}",
        prompt="",
        expected="".join(token.text for token in tokens),
        prediction="",
        scores=dict.fromkeys(denominators, nats)
        | {f"{name}_weight": float(weight) for name, weight in denominators.items()},
        tokens=tokens,
    )


def _metrics(examples: Sequence[Example]) -> dict[str, Metric]:
    def nats_per(unit: str, definition: str) -> Metric:
        return metrics.ratio(
            [example.scores[f"{unit}_nats"] for example in examples],
            [example.scores[f"{unit}_nats_weight"] for example in examples],
            definition,
            higher_is_better=False,
            example_score=f"{unit}_nats",
        )

    word = nats_per("word", "nats of all pages per word of the original pages")
    byte = nats_per("byte", "nats of all pages per byte of the original pages")
    token = nats_per("token", "nats per token")
    return {
        "word_perplexity": metrics.exponential(word, "exp of the nats per word of the original pages"),
        "byte_perplexity": metrics.exponential(byte, "exp of the nats per byte of the original pages"),
        "bits_per_byte": metrics.scale_metric(
            byte, 1 / math.log(2), "bits per byte of the original pages, UTF-8"
        ),
        "perplexity": metrics.exponential(token, "exp of the nats per token"),
        "loss": token,
    }
