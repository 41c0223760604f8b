"""A tokenizer of bytes and a model without weights, for tasks on texts."""

from __future__ import annotations

import numpy as np

from mega_eval.models.interface import ModelIdentity, WindowScores
from mega_schema.tokenizer.tokenizer import TokenizerIdentity


class Characters:
    """A tokenizer of UTF-8 bytes; id 256 ends a document."""

    def __init__(self, bos=None) -> None:
        self.identity = TokenizerIdentity("NullTokenizer", 257, 256, bos, None, "1" * 64)

    def encode(self, text):
        return list(text.encode())

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def pieces(self, ids):
        return [self.decode([i]) for i in ids]


class HashModel:
    """A model whose ln P of a target is a hash of its window up to it, between -9 and 0."""

    def __init__(self, tokenizer=None, context_length=10_000) -> None:
        self.tokenizer = tokenizer or Characters()
        self.context_length = context_length
        self.vocab_size = self.tokenizer.identity.vocab_size
        self.identity = ModelIdentity(
            source="hash",
            sha256="0" * 64,
            tokenizer_sha256="1" * 64,
            iteration=None,
            dtype="float64",
            device="cpu",
        )
        self.windows = []
        self.answers = {}

    def logprob(self, tokens):
        state = 7
        for token in tokens[-12:]:
            state = (state * 31 + int(token) + 1) % 100_003
        return -9 * state / 100_003

    def score(self, windows):
        self.windows += windows
        scores = []
        for window in windows:
            assert window.input_length <= self.context_length
            ends = range(len(window.tokens) - window.target_length + 1, len(window.tokens) + 1)
            logprobs = np.array([self.logprob(window.tokens[:end]) for end in ends])
            scores.append(WindowScores(logprobs, logprobs > -1, window.targets))
        return scores

    def generate(self, requests):
        self.requests = requests
        return [self.answers.get(self.tokenizer.decode(request.prompt), "nothing") for request in requests]

    def close(self) -> None:
        pass
