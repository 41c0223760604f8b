"""Make BERT's inputs of questions and passages: windows of a passage that overlap, as in BERT's run_squad.

    [CLS] question [SEP] tokens of the passage [SEP]

A window begins `doc_stride` tokens after the one before it; transformers' run_qa calls the overlap so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import ConfigError
from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL, TOKEN, TYPE, SpecialIds
from mega_schema.tasks.span_options import SPECIAL_TOKENS, SpanOptions
from mega_schema.tasks.squad_examples import SpanExample
from mega_schema.tokenizer.fast import FastTokenizer
from mega_schema.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
CLS_POSITION = 0  # label of a window without the answer
_BATCH = 1024  # texts that are encoded at a time


@dataclass(frozen=True, slots=True)
class Passage:
    """The tokens of a passage.

    Attributes:
        ids: (T,) int32.
        begins, ends: (T,) characters: the first of each token, and the one after its last.
    """

    ids: NDArray[np.int32]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]

    def find_tokens(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first and the last token that have characters of [begin, end)."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.begins, end, side="left")) - 1
        return first, last


@dataclass(frozen=True, slots=True)
class PassageWindow:
    """A window of a passage.

    Attributes:
        example: number of its question.
        begin, end: its tokens in the passage.
        start_label, end_label: positions of the answer in the sample; CLS_POSITION if the window does not
            have all of it, IGNORED in a test set.
    """

    example: int
    begin: int
    end: int
    start_label: int
    end_label: int


class SpanWindows:
    """The samples of questions, (4, length) each: windows of their passages.

    Attributes:
        rows: of a sample.
        windows: of all questions, in their order.
        total_tokens: without padding.
        token_counts: (W,) tokens of each sample, without padding.
    """

    rows = 1

    def __init__(
        self,
        examples: Sequence[SpanExample],
        tokenizer: Tokenizer,
        special: SpecialIds,
        length: int,
        options: SpanOptions,
    ) -> None:
        """Encode the questions, and every passage once.

        Raises:
            ConfigError: options do not fit, or the tokenizer does not know the characters of its tokens.
        """
        options.check(length)
        if not isinstance(tokenizer, FastTokenizer):
            raise ConfigError(
                "--tokenizer-type",
                "does not give the characters of its tokens",
                found=tokenizer.identity.type,
                wanted="BertWordPieceLowerCase | BertWordPieceCase | HuggingFaceTokenizer",
            )
        self.examples = examples
        self.length = length
        self._special = special
        contexts = list(dict.fromkeys(example.context for example in examples))
        numbers = {context: number for number, context in enumerate(contexts)}
        passages = _encode_passages(tokenizer, contexts)
        self._passages = [passages[numbers[example.context]] for example in examples]
        questions = list[list[int]]()
        for begin in range(0, len(examples), _BATCH):
            texts = [example.question.strip() for example in examples[begin : begin + _BATCH]]
            questions += (ids[: options.max_query_length] for ids in tokenizer.encode_batch(texts))
        self._questions = [np.array(ids, np.int32) for ids in questions]
        self.windows = [
            window for number in range(len(examples)) for window in self._cut(number, options.doc_stride)
        ]
        self.token_counts: Ints = np.array(
            [len(self._questions[w.example]) + w.end - w.begin + SPECIAL_TOKENS for w in self.windows]
        )
        self.total_tokens = int(self.token_counts.sum())

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> Ints:
        """Return sample `i`: rows of ids, types, real tokens, and in columns 0 and 1 the labels."""
        window = self.windows[i]
        question = self._questions[window.example]
        first, count = self.first_position(i), int(self.token_counts[i])
        sample = np.zeros((4, self.length), np.int64)
        sample[TOKEN] = self._special.pad
        sample[TOKEN, 0] = self._special.cls
        sample[TOKEN, 1 : first - 1] = question
        sample[TOKEN, [first - 1, count - 1]] = self._special.sep
        sample[TOKEN, first : count - 1] = self._passages[window.example].ids[window.begin : window.end]
        sample[TYPE, first:count] = 1
        sample[REAL, :count] = 1
        sample[LABEL] = IGNORED
        sample[LABEL, :2] = window.start_label, window.end_label
        return sample

    def filler(self) -> Ints:
        """Return a sample without labels, all of whose tokens are real."""
        sample = self[0]
        sample[LABEL] = IGNORED
        sample[REAL] = 1
        return sample

    def first_position(self, i: int) -> int:
        """Return the position of a window's first token of the passage."""
        return len(self._questions[self.windows[i].example]) + 2

    def passage(self, i: int) -> Passage:
        """Return the passage of window `i`."""
        return self._passages[self.windows[i].example]

    def _cut(self, number: int, stride: int) -> list[PassageWindow]:
        """Return the windows of a question: the last is the first that reaches the end of the passage."""
        passage, answers = self._passages[number], self.examples[number].answers
        question_tokens, tokens = len(self._questions[number]), len(passage.ids)
        room = self.length - question_tokens - SPECIAL_TOKENS
        begins = range(0, max(1, tokens - room + stride), stride)
        windows = []
        span = None
        if answers:  # training learns the first accepted answer
            span = passage.find_tokens(answers[0].begin, answers[0].begin + len(answers[0].text))
        for begin in begins:
            end = min(tokens, begin + room)
            start_label = end_label = IGNORED if answers is None else CLS_POSITION
            if span is not None and begin <= span[0] <= span[1] < end:
                shift = question_tokens + 2 - begin
                start_label, end_label = span[0] + shift, span[1] + shift
            windows.append(PassageWindow(number, begin, end, start_label, end_label))
        return windows


def _encode_passages(tokenizer: FastTokenizer, contexts: Sequence[str]) -> list[Passage]:
    passages = []
    for first in range(0, len(contexts), _BATCH):
        for ids, offsets in tokenizer.encode_offsets(contexts[first : first + _BATCH]):
            begin_end = np.array(offsets, np.int32).reshape(-1, 2)
            begins, ends = begin_end.T.copy()
            passages.append(Passage(np.array(ids, np.int32), begins, ends))
    return passages
