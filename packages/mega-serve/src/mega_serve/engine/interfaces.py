"""Interfaces between the parts of the server: model runner, engine core, engine client.

The engine core (scheduler, page pool, detokenizer) sees the model as a `ModelRunner`; the HTTP application
sees the engine as an `EngineClient`. Tests put small fakes in their places.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.requests import (
    EngineRequest,
    EngineStats,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to run in this step.

    Attributes:
        token_ids: the ids, of which the first has position `start`; their keys and values are written to the
            pages.
        pages: the sequence's block table; page i holds positions i · page_size and following. It covers
            `start + len(token_ids)` positions.
        logits_from: index in `token_ids` of the first token whose logits are returned; len(token_ids) for
            none. More than the last one for the verification of speculated tokens.
        score: ids that follow the tokens of the chunk, from the first on, to be scored (prompt
            log-probabilities); empty: none. One fewer than the tokens where the chunk ends the prompt.
        score_top: number of most probable words to report with each score.
        hidden: which hidden state, after the final norm, is returned: that of the last token, or the sum of
            all tokens; None for none.
        is_contiguous: the numbers in `pages` are consecutive, so that the keys and the values of the sequence
            are one slice of the pool that starts at page `pages[0]`.

    The lists in `token_ids` and `pages` belong to the engine core: a runner reads them during `run` only.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logits_from: int
    score: Sequence[int] = ()
    score_top: int = 0
    is_contiguous: bool = False
    hidden: Literal["last", "sum"] | None = None


class Logits(Protocol):
    """Logits of the asked rows: a torch tensor (R, V), float32, V without padding. Opaque to the core."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Logits:
        """Return some of the rows."""


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Results of a step, in the order of its chunks.

    Attributes:
        logits: rows of all chunks, chunk after chunk.
        scores: one tuple per chunk, one entry per id of its `score`.
        hidden: one list of D numbers per chunk whose `hidden` asks for it.
    """

    logits: Logits
    scores: Sequence[tuple[TokenLogprob, ...]]
    hidden: Sequence[Sequence[float]] = ()


class ModelRunner(Protocol):
    """Runs the model on chunks of sequences whose keys and values are in pages.

    Attributes:
        page_size: tokens of a page.
        num_pages: pages of the pool.
        vocab_size: ids that may be sampled (those of the tokenizer).
        max_seq_len: the model's context.
    """

    page_size: int
    num_pages: int
    vocab_size: int
    max_seq_len: int

    def run(self, chunks: Sequence[Chunk]) -> RunnerOutput:
        """Run one forward pass over all chunks."""

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages, (source, target), in all layers (copy on write of a fork)."""


class GrammarState(Protocol):
    """Progress of one sequence in its grammar, after all its output tokens.

    The sampler, which knows the class behind this protocol, masks the ids that the grammar does not allow.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing may follow it."""

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. An exception ends the sequence with "error"."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler knows of one row of logits.

    A sequence with k speculated tokens has k + 1 rows, of which each sees one more of them at the end of
    `output_token_ids`. A sequence with a grammar has one row: its `grammar` is always at the end of
    `output_token_ids`.

    Attributes:
        prompt_token_ids, output_token_ids: of the sequence; read-only, valid during the call.
        sequence_index: number of the sequence in its request.
        position: of the sampled token: len(prompt_token_ids) + len(output_token_ids).
        seed: of the request. The draw depends on (seed, sequence_index, position) only.
        top_p: the value after the decay of `SamplingParams.top_p_decay`.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    sequence_index: int
    position: int
    seed: int
    top_p: float
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The result of a row.

    Attributes:
        logprob: if `SamplingParams.logprobs` asks for it.
        error: why this row could not be sampled (its grammar, for example); its sequence ends with "error".
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class TokenSampler(Protocol):
    """Chooses tokens from logits. It knows the size of the tokenizer and never returns an id beyond it."""

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> Sequence[SampledToken]:
        """Sample a token for each row; row i of the logits belongs to rows[i].

        While a row has fewer than `SamplingParams.min_tokens` output tokens, end-of-document and the stop ids
        are masked. An error that concerns one row is reported in its result, never raised.
        """

    def top_logprobs(
        self, logits: Logits, count: int, banned: Sequence[int | None]
    ) -> Sequence[Sequence[tuple[int, float]]]:
        """Return the `count` most probable (id, log-probability) of each row, most probable first.

        Fewer where the vocabulary is smaller. The log-probabilities are normalized over all columns of the
        logits; banned[i], if any, has the logit -1e10 before that, as in Megatron's beam search.
        """


class IncrementalDetokenizer(Protocol):
    """Turns the output tokens of one sequence into text, as they come."""

    def append(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Return the text that is certain by now, and the stop string that the tokens complete, if any.

        Text that may still become a stop string, and bytes of an incomplete character, are held back.
        """

    def flush(self) -> str:
        """Return the text that was held back."""


class DetokenizerFactory(Protocol):
    """The constructor of an incremental detokenizer."""

    def __call__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str],
        include_stop_str: bool,
        min_tokens: int,
        skip_special_tokens: bool | None,
    ) -> IncrementalDetokenizer:
        """Return a detokenizer of the tokens that follow a prompt.

        Args:
            min_tokens: first tokens in whose text no stop string is looked for.
            skip_special_tokens: see `SamplingParams`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What clients may know of the served model.

    Attributes:
        name: the id in /v1/models.
        iteration: of the training run; changes when a newer checkpoint is swapped in.
        hidden_size: dimensions of an embedding.
    """

    name: str
    iteration: int
    created: int
    max_seq_len: int
    vocab_size: int
    eod: int | None
    bos: int | None
    hidden_size: int = 0


class EngineOverloadedError(Exception):
    """The queue is full.

    Args:
        retry_after: seconds until the backlog is worked off, an estimate.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailableError(Exception):
    """The engine is loading, draining or restarting; new requests get status 503."""


class RankConnectionError(RuntimeError):
    """Another rank of the model has ended or never came.

    The message is one line without text of a request.
    """


class EngineDeadError(Exception):
    """The engine stopped while it worked on the request; the request gets status 500."""


class EngineClient(Protocol):
    """The engine as the HTTP application sees it."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def stats(self) -> EngineStats:
        """The newest load that the engine reported."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine stepped lately: what /health reports."""

    def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        """Yield the outputs of all sequences of a request until each is finished.

        Closing the iterator early (`aclose`, cancellation of its task) aborts the request and frees its
        pages.

        Raises:
            EngineOverloadedError: before the first output.
            EngineUnavailableError: before the first output.
            EngineDeadError: at any time.
        """
