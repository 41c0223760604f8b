"""The engine behind `PUT /api`: text to ids, ids through the model, ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mega_model.build import build, fill
from mega_model.generate import Stop, beam_search, check_length, generate, score
from mega_model.runtime import Runtime
from mega_model.stage import Decoder
from mega_schema.checkpoint import Checkpoint
from mega_schema.errors import FormatError, RequestError
from mega_schema.tokenizer import Tokenizer, open_folder
from mega_serve.api.app import Gone
from mega_serve.api.megatron import BeamSearch, Refused, Sampling


class ModelEngine:
    """Answers from a model that one process holds whole.

    Args:
        most_tokens: prompts (or beams) times the longest row's tokens that one request may come to; it bounds
            the memory of the keys and values.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, most_tokens: int = 12000) -> None:
        self.model, self.tokenizer, self.most_tokens = model, tokenizer, most_tokens
        self.eod = tokenizer.identity.eod
        self.newline, self.two_newlines = _id_of(tokenizer, "\n"), _id_of(tokenizer, "\n\n")
        self.colon = _id_of(tokenizer, ":")
        self.words = min(tokenizer.identity.vocab_size, model.spec.vocab)

    def answer(self, ask: Sampling | BeamSearch, gone: Callable[[], bool]) -> dict[str, object]:
        """See `app.Engine`."""

        def before_step(_: int) -> None:
            if gone():
                raise Gone

        if isinstance(ask, BeamSearch):
            return self._search(ask, before_step)
        return self._sample(ask, before_step)

    def _sample(self, ask: Sampling, before_step: Callable[[int], None]) -> dict[str, object]:
        prompts = [self._encode(prompt, ask.add_bos) for prompt in ask.prompts]
        self._check(prompts, ask.tokens_to_generate, rows=len(prompts))
        if ask.tokens_to_generate == 0:
            done = score(self.model, prompts)
        else:
            done = generate(
                self.model,
                prompts,
                new_tokens=ask.tokens_to_generate,
                temperature=ask.temperature,
                top_k=ask.top_k,
                top_p=ask.top_p,
                top_p_decay=ask.top_p_decay,
                top_p_bound=ask.top_p_bound,
                stop=self._stop(ask),
                never_after=self._never_after(ask),
                words=self.words,
                logprobs=ask.logprobs,
                generator=self._generator(ask.random_seed),
                before_step=before_step,
            )
        return {
            "text": [self._text(*row) for row in zip(ask.prompts, prompts, done.rows, strict=True)],
            "segments": [self.tokenizer.pieces(row) for row in done.rows],
            "logprobs": done.logprobs,
        }

    def _search(self, ask: BeamSearch, before_step: Callable[[int], None]) -> dict[str, object]:
        prompt = self._encode(ask.prompts[0], ask.add_bos)
        self._check([prompt], ask.tokens_to_generate, rows=ask.beam_width)
        if ask.tokens_to_generate == 0:
            raise Refused("tokens_to_generate", "context length + tokens_to_generate too large")
        beams = beam_search(
            self.model,
            prompt,
            new_tokens=ask.tokens_to_generate,
            width=ask.beam_width,
            stop=self.eod if ask.stop_token is None else ask.stop_token,
            length_penalty=ask.length_penalty,
            never_after=self._never_after(ask),
            words=self.words,
            before_step=before_step,
        )
        return {
            "text": [self._text(ask.prompts[0], prompt, beam.row) for beam in beams],
            "segments": [self.tokenizer.pieces(beam.row) for beam in beams],
            "scores": [beam.score for beam in beams],
        }

    def _encode(self, text: str, add_bos: bool) -> list[int]:
        """The prompt's ids; the end of a document is what one begins with."""
        if add_bos and self.eod is None:
            message = "add_BOS needs a tokenizer with an end-of-document token, and this one has none"
            raise Refused("add_BOS", message, code="unsupported")
        ids = self.tokenizer.encode(text)
        return [self.eod, *ids] if add_bos and self.eod is not None else ids

    def _check(self, prompts: Sequence[Sequence[int]], new: int, *, rows: int) -> None:
        """Refuse what the model or this server has no room for, before any of it is allocated."""
        try:
            longest = check_length(self.model, prompts, new)
        except RequestError as error:
            raise Refused(str(error.where), error.what, code="context_length_exceeded") from None
        if rows * longest > self.most_tokens:
            raise Refused(
                "tokens_to_generate",
                f"Too many tokens.  {rows * longest} is greater than {self.most_tokens}",
                code="context_length_exceeded",
            )

    def _stop(self, ask: Sampling) -> Stop:
        wanted = "stop_on_double_eol" if ask.stop_on_double_eol else "stop_on_eol" if ask.stop_on_eol else ""
        if not wanted:
            return Stop(_known(self.eod))
        if self.newline is None:
            message = f"{wanted} needs a tokenizer with a token for a line break, and this one has none"
            raise Refused(wanted, message, code="unsupported")
        if ask.stop_on_double_eol:
            return Stop(_known(self.two_newlines), twice=self.newline)
        return Stop(_known(self.two_newlines, self.newline))

    def _never_after(self, ask: Sampling | BeamSearch) -> tuple[int, int] | None:
        if not ask.prevent_newline_after_colon or self.colon is None or self.newline is None:
            return None
        return self.colon, self.newline

    def _generator(self, seed: int | None) -> torch.Generator:
        """A generator of this request's own; seeds count modulo 2**63."""
        generator = torch.Generator(next(self.model.parameters()).device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed % 2**63)
        return generator

    def _text(self, prompt: str, ids: Sequence[int], row: Sequence[int]) -> str:
        """The prompt exactly as it was sent, then the text of what follows it.

        Clients cut len(prompt) characters off. What follows is taken from the decoded whole, because some
        tokenizers drop the space before a word that comes first.
        """
        whole, before = self.tokenizer.decode(row), self.tokenizer.decode(ids)
        if whole.startswith(before):
            return prompt + whole[len(before) :]
        return prompt + self.tokenizer.decode(row[len(ids) :])


def load(checkpoint: Checkpoint, *, most_tokens: int, device: str, dtype: torch.dtype) -> ModelEngine:
    """The engine of an open checkpoint.

    Raises:
        FormatError: the checkpoint has no tokenizer, or one with more ids than its model has words, or lacks
            a weight.
    """
    folder = checkpoint.tokenizer_folder
    tokenizer = open_folder(folder)
    if tokenizer.identity.vocab_size > checkpoint.spec.vocab:
        raise FormatError(
            folder,
            "the tokenizer has more ids than the model has words",
            found=tokenizer.identity.vocab_size,
            wanted=f"at most {checkpoint.spec.vocab}",
        )
    model = build(checkpoint.spec, Runtime.alone(checkpoint.spec, dtype=dtype, device=device))
    fill(model, checkpoint.model_slab)
    return ModelEngine(model.eval(), tokenizer, most_tokens=most_tokens)


def _id_of(tokenizer: Tokenizer, text: str) -> int | None:
    """The one id that `text` has in the middle of a line, or None where it takes several."""
    for lead in ("a", ".", ""):
        try:
            before, ids = tokenizer.encode(lead), tokenizer.encode(lead + text)
        except RequestError:
            return None  # this tokenizer's text is not words
        # one id more that is not the one for unknown text
        if ids[:-1] == before and len(ids) == len(before) + 1 and tokenizer.decode(ids) == lead + text:
            return ids[-1]
    return None


def _known(*ids: int | None) -> frozenset[int]:
    return frozenset(token for token in ids if token is not None)
