"""Options of questions about passages. Imports neither torch nor numpy, for `--help`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mega_schema.errors import ConfigError

SPECIAL_TOKENS = 3  # [CLS], and [SEP] after the question and after the passage


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOptions:
    """Options of windows and of the choice of answers, by the names of BERT's run_squad.

    Attributes:
        doc_stride: tokens between the begins of two windows.
        max_query_length: tokens of a question; longer ones are cut.
        max_answer_length: tokens of an answer that is predicted.
        n_best_size: answers of a question that are compared, and begins and ends of each window.
        null_score_diff_threshold: a question has no answer if the score of none exceeds that of the best
            answer by more than this.
    """

    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    n_best_size: int = 20
    null_score_diff_threshold: float = 0.0

    def check(self, length: int) -> None:
        """Check that the options fit windows of `length` tokens.

        Raises:
            ConfigError: a count is below 1, the threshold is not finite, or windows do not overlap.
        """
        for name in ("doc_stride", "max_query_length", "max_answer_length", "n_best_size"):
            if (count := getattr(self, name)) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, "not a count", found=count, wanted="1 or more")
        if not math.isfinite(self.null_score_diff_threshold):
            flag, value = "--null-score-diff-threshold", self.null_score_diff_threshold
            raise ConfigError(flag, "not a finite number", found=value)
        window = length - self.max_query_length - SPECIAL_TOKENS
        if window < 2:
            raise ConfigError(
                "--seq-length",
                "has no place for a passage",
                found=length,
                wanted=f"{self.max_query_length + SPECIAL_TOKENS + 2} or more with a question of "
                f"{self.max_query_length} tokens",
                hint="--max-query-length with a smaller number",
            )
        if self.doc_stride >= window:
            raise ConfigError(
                "--doc-stride",
                "is not less than the window of the passage",
                found=self.doc_stride,
                wanted=f"less than {window}: --seq-length {length} without question and special tokens",
                hint=f"--doc-stride {max(1, window // 2)}",
            )
