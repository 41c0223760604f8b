"""The engine of `PUT /api`: encode the prompts, run the model, decode the generated ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mega_model.build import load_model
from mega_model.decoder import Decoder
from mega_model.generate import StopCriteria, beam_search, check_length, generate, score
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.app import ClientDisconnected
from mega_serve.api.megatron import BadRequest, BeamSearchRequest, GenerationRequest, SamplingRequest
from mega_serve.limits import MAX_BATCH_TOKENS


class ModelEngine:
    """An `app.Engine` that runs a model in this process, on one device.

    Args:
        max_batch_tokens: largest number of prompts (or beams) times the tokens of the longest row. It bounds
            the memory of the KV cache.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, *, max_batch_tokens: int = MAX_BATCH_TOKENS
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_tokens = max_batch_tokens
        self.eod = tokenizer.identity.eod
        self.newline = _single_token_id(tokenizer, "\n")
        self.double_newline = _single_token_id(tokenizer, "\n\n")
        self.colon = _single_token_id(tokenizer, ":")
        self.vocab_size = min(tokenizer.identity.vocab_size, model.spec.vocab)

    def generate(self, request: GenerationRequest, should_abort: Callable[[], bool]) -> dict[str, object]:
        """Answer a request, as `app.Engine.generate` does."""

        def check_abort(_: int) -> None:
            if should_abort():
                raise ClientDisconnected

        if isinstance(request, BeamSearchRequest):
            return self._beam_search(request, check_abort)
        return self._sample(request, check_abort)

    def _sample(self, request: SamplingRequest, before_step: Callable[[int], None]) -> dict[str, object]:
        prompts = [self._encode(prompt, request.add_bos) for prompt in request.prompts]
        self._check_length(prompts, request.tokens_to_generate, rows=len(prompts))
        if request.tokens_to_generate == 0:
            output = score(self.model, prompts)
        else:
            output = generate(
                self.model,
                prompts,
                new_tokens=request.tokens_to_generate,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                top_p_decay=request.top_p_decay,
                top_p_bound=request.top_p_bound,
                stop=self._stop_criteria(request),
                banned_bigram=self._banned_bigram(request),
                vocab_limit=self.vocab_size,
                logprobs=request.logprobs,
                generator=self._seeded_generator(request.random_seed),
                before_step=before_step,
            )
        rows = zip(request.prompts, prompts, output.rows, strict=True)
        return {
            "text": [self._response_text(*row) for row in rows],
            "segments": [self.tokenizer.pieces(row) for row in output.rows],
            "logprobs": output.logprobs,
        }

    def _beam_search(
        self, request: BeamSearchRequest, before_step: Callable[[int], None]
    ) -> dict[str, object]:
        [text] = request.prompts
        prompt = self._encode(text, request.add_bos)
        self._check_length([prompt], request.tokens_to_generate, rows=request.beam_width)
        if request.tokens_to_generate == 0:
            raise BadRequest("tokens_to_generate", "context length + tokens_to_generate too large")
        beams = beam_search(
            self.model,
            prompt,
            new_tokens=request.tokens_to_generate,
            width=request.beam_width,
            stop=self.eod if request.stop_token is None else request.stop_token,
            length_penalty=request.length_penalty,
            banned_bigram=self._banned_bigram(request),
            vocab_limit=self.vocab_size,
            before_step=before_step,
        )
        return {
            "text": [self._response_text(text, prompt, beam.row) for beam in beams],
            "segments": [self.tokenizer.pieces(beam.row) for beam in beams],
            "scores": [beam.score for beam in beams],
        }

    def _encode(self, text: str, add_bos: bool) -> list[int]:
        """Encode a prompt; as in GPT-2, the end-of-document token also begins a document."""
        if add_bos and self.eod is None:
            message = "add_BOS needs a tokenizer with an end-of-document token, and this one has none"
            raise BadRequest("add_BOS", message, code="unsupported")
        ids = self.tokenizer.encode(text)
        return [self.eod, *ids] if add_bos and self.eod is not None else ids

    def _check_length(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, rows: int) -> None:
        """Refuse a request over the model's context or the server's limit before memory is allocated."""
        try:
            longest = check_length(self.model, prompts, new_tokens)
        except RequestError as error:
            where, what = str(error.where), error.what
            if where == "new_tokens":  # Megatron's field and text
                where = "tokens_to_generate"
                what = "Length of prompt + tokens_to_generate longer than allowed"
            raise BadRequest(where, what, code="context_length_exceeded") from None
        if rows * longest > self.max_batch_tokens:
            raise BadRequest(
                "tokens_to_generate",
                f"Too many tokens.  {rows * longest} is greater than {self.max_batch_tokens}",
                code="context_length_exceeded",
            )

    def _stop_criteria(self, request: SamplingRequest) -> StopCriteria:
        field = None
        if request.stop_on_double_eol:
            field = "stop_on_double_eol"
        elif request.stop_on_eol:
            field = "stop_on_eol"
        if field is None:
            return StopCriteria(_id_set(self.eod))
        if self.newline is None:
            message = f"{field} needs a tokenizer with a token for a line break, and this one has none"
            raise BadRequest(field, message, code="unsupported")
        if request.stop_on_double_eol:
            return StopCriteria(_id_set(self.double_newline), repeated_id=self.newline)
        return StopCriteria(_id_set(self.double_newline, self.newline))

    def _banned_bigram(self, request: GenerationRequest) -> tuple[int, int] | None:
        """Return the pair (colon, newline) if the request excludes it and the tokenizer has both."""
        if not request.prevent_newline_after_colon or self.colon is None or self.newline is None:
            return None
        return self.colon, self.newline

    def _seeded_generator(self, seed: int | None) -> torch.Generator:
        """Create a random generator for one request; a seed counts modulo 2**63."""
        generator = torch.Generator(next(self.model.parameters()).device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed % 2**63)
        return generator

    def _response_text(self, prompt: str, prompt_ids: Sequence[int], row: Sequence[int]) -> str:
        """Return the prompt exactly as it was sent, followed by the decoded continuation.

        Clients remove the first len(prompt) characters. The continuation is cut from the decoded row, because
        some tokenizers drop the space before the first word of a text.
        """
        row_text = self.tokenizer.decode(row)
        prompt_text = self.tokenizer.decode(prompt_ids)
        if row_text.startswith(prompt_text):
            return prompt + row_text[len(prompt_text) :]
        return prompt + self.tokenizer.decode(row[len(prompt_ids) :])


def load_engine(
    checkpoint: Checkpoint, *, max_batch_tokens: int, device: str | torch.device, dtype: torch.dtype
) -> ModelEngine:
    """Load the model and the tokenizer of an open checkpoint.

    Raises:
        FormatError: the checkpoint lacks a weight or a tokenizer, or the tokenizer is larger than the model's
            vocabulary.
    """
    tokenizer = open_checkpoint_tokenizer(checkpoint)
    model = load_model(checkpoint.spec, checkpoint.model_slab, dtype=dtype, device=device)
    return ModelEngine(model, tokenizer, max_batch_tokens=max_batch_tokens)


def _single_token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of `text` inside a line, or None if it takes several tokens."""
    for prefix in ("a", ".", ""):
        try:
            prefix_ids = tokenizer.encode(prefix)
            ids = tokenizer.encode(prefix + text)
        except RequestError:
            return None  # this tokenizer encodes numbers only
        # one more id, which is not the unknown token
        is_one_more = ids[:-1] == prefix_ids and len(ids) == len(prefix_ids) + 1
        if is_one_more and tokenizer.decode(ids) == prefix + text:
            return ids[-1]
    return None


def _id_set(*ids: int | None) -> frozenset[int]:
    return frozenset(token for token in ids if token is not None)
