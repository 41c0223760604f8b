"""Compare answers as SQuAD's evaluation scripts do (arXiv:1606.05250, arXiv:1806.03822)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def word_f1(prediction: str, answer: str) -> float:
    """Return F1 of the words of two normalized texts; of an empty one, whether both are."""
    words, expected = prediction.split(), answer.split()
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def score_answer(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 with the best of the right answers; without any, the empty text is right."""
    text = normalize_answer(prediction)
    accepted = [answer for answer in map(normalize_answer, answers) if answer] or [""]
    return float(text in accepted), max(word_f1(text, answer) for answer in accepted)
