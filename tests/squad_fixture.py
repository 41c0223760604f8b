"""Files in the layout of SQuAD: the answer is the only word of a passage that is no filler."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FILLER = [f"w{number}" for number in range(13, 40) if number % 3]
ANSWERS = [f"w{number}" for number in range(100, 130) if number % 3]


def write_squad(
    path: Path, questions: int, seed: int, *, unanswerable: bool = False, labels: bool = True
) -> Path:
    """Write passages of 6 to 29 words with a question each.

    Args:
        unanswerable: every third question has no answer, as in SQuAD 2.0.
        labels: with answers; False writes a test set.
    """
    rng = np.random.default_rng(seed)
    paragraphs = []
    for number in range(questions):
        words = rng.choice(FILLER, rng.integers(6, 30)).tolist()
        place = int(rng.integers(len(words)))
        is_impossible = unanswerable and number % 3 == 0
        if not is_impossible:
            words[place] = str(rng.choice(ANSWERS))
        begin = len(" ".join([*words[:place], ""]))
        question: dict[str, object] = {"id": f"q{number}", "question": f"w{(10, 11)[number % 2]}"}
        if labels:
            answers = [] if is_impossible else [{"text": words[place], "answer_start": begin}]
            question |= {"answers": answers} | ({"is_impossible": is_impossible} if unanswerable else {})
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    path.write_text(json.dumps({"data": [{"title": "words", "paragraphs": paragraphs}]}), "utf-8")
    return path
