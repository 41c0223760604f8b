"""The state of a request and of its sequences while the engine works on them."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

from mega_serve.engine.interfaces import Chunk, GrammarState, IncrementalDetokenizer, SamplingRow
from mega_serve.engine.page_pool import PagePool, PageTable
from mega_serve.engine.requests import (
    BeamSearchParams,
    EngineRequest,
    RequestTimes,
    SamplingParams,
    TokenLogprob,
)
from mega_serve.engine.speculation import PromptLookup

Key = tuple[int, int, int]  # priority, number of arrival, index: a smaller one is served first


class Lane:
    """Tokens and the pages that hold their keys and values.

    Attributes:
        num_computed: leading tokens whose keys and values are in the pages.
    """

    __slots__ = ("num_computed", "table", "token_ids")

    def __init__(self, token_ids: list[int], table: PageTable, num_computed: int = 0) -> None:
        self.token_ids = token_ids
        self.table = table
        self.num_computed = num_computed

    def chunk(self, tokens: int, *, has_logits: bool, drafts: Ids[int] = ()) -> Chunk:
        """Return the chunk of the next tokens, with the logits of the last one and of the drafts after it."""
        start = self.num_computed
        return Chunk(
            token_ids=[*self.token_ids[start : start + tokens], *drafts],
            start=start,
            pages=self.table.pages,
            logits_from=tokens - 1 if has_logits else tokens,
            is_contiguous=self.table.is_contiguous,
        )

    def advance(self, pool: PagePool, tokens: int) -> None:
        """Count tokens as computed and offer the pages that they fill to the prefix cache."""
        self.num_computed += tokens
        pool.register(self.table, self.token_ids, self.num_computed)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that is not finished.

    Attributes:
        arrival: number of requests before this one.
        deadline: time after which it is finished with "timeout"; None: never.
        seed: the request's, or a fresh one.
        unfinished: number of sequences without a finish reason.
        queue_time, start_time, first_token_time: of the engine's clock, in seconds; None: not yet.
        is_prefilled: the sequences other than the first have begun.
        is_admitted: it has left the queue once.
        cached_tokens: tokens of the prompt found in the prefix cache when it left the queue first.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are known.
    """

    request: EngineRequest
    arrival: int
    deadline: float | None
    seed: int
    unfinished: int
    queue_time: float
    start_time: float | None = None
    first_token_time: float | None = None
    is_prefilled: bool = False
    is_admitted: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def missing_scores(self) -> int:
        """Number of prompt log-probabilities that were asked for and are not known."""
        params = self.request.params
        if isinstance(params, BeamSearchParams) or params.prompt_logprobs is None:
            return 0
        return len(self.request.prompt_token_ids) - 1 - len(self.prompt_logprobs)

    def times(self, now: float) -> RequestTimes:
        """Return where the time went, of a request that came to its end now."""
        start = now if self.start_time is None else self.start_time
        first_token = now if self.first_token_time is None else self.first_token_time
        return RequestTimes(
            queue=start - self.queue_time, prefill=first_token - start, decode=now - first_token
        )

    def key(self, index: int) -> Key:
        """Return the rank of a sequence among all: smaller is served first."""
        return self.request.priority, self.arrival, index


class Sequence:
    """One sampled sequence of a request; a unit of the scheduler.

    Attributes:
        output_token_ids: its tokens after the prompt.
        lane: its pages; None while it waits.
        top_p: the value for the next token.
        has_output: an output was delivered.
        hidden_sum: sum of the hidden states that `pooling` needs, of the tokens computed so far.
    """

    slots = 1  # of the batch

    __slots__ = (
        "detokenizer",
        "grammar",
        "has_output",
        "hidden_sum",
        "index",
        "is_finished",
        "key",
        "lane",
        "lookup",
        "max_output_tokens",
        "output_token_ids",
        "params",
        "state",
        "token_ids",
        "top_p",
    )

    def __init__(
        self,
        state: RequestState,
        params: SamplingParams,
        index: int,
        *,
        max_seq_len: int,
        detokenizer: IncrementalDetokenizer,
        grammar: GrammarState | None,
        lookup: PromptLookup | None,
    ) -> None:
        self.state = state
        self.params = params
        self.index = index
        self.key = state.key(index)
        self.detokenizer = detokenizer
        self.grammar = grammar
        self.lookup = lookup
        self.token_ids = list(state.request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.max_output_tokens = min(params.max_tokens, max_seq_len - len(self.token_ids))
        self.top_p = params.top_p
        self.lane: Lane | None = None
        self.has_output = False
        self.hidden_sum: Ids[float] = ()
        self.is_finished = False

    @property
    def known_tokens(self) -> int:
        """Number of tokens that `start` looks up."""
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the next chunk is the last token alone, to sample the one after it."""
        if self.lane is None or self.max_output_tokens == 0:
            return False
        return self.lane.num_computed == len(self.token_ids) - 1

    @property
    def is_computed(self) -> bool:
        """Whether all tokens have keys and values, so that the next can be sampled."""
        return self.lane is not None and self.lane.num_computed == len(self.token_ids)

    @property
    def running_lanes(self) -> Ids[Lane]:
        """The lanes that hold pages."""
        return () if self.lane is None else (self.lane,)

    def start(self, pool: PagePool, reserve: int) -> int | None:
        """Allocate the pages of all tokens so far; reuse the prefix cache.

        The last token is always computed, because its logits or its hidden state are needed; and so are the
        tokens whose scores or hidden states are.

        Args:
            reserve: pages that must remain available for the sequences that run.

        Returns:
            Tokens found in the cache; None if too few pages are available.
        """
        reusable = len(self.token_ids) - 1
        if self.index == 0 and self.state.missing_scores:
            reusable = len(self.state.prompt_logprobs)
        if self.params.pooling == "mean":
            reusable = 0
        self.hidden_sum = ()
        prefix = pool.find_prefix(self.token_ids, self.state.request.cache_namespace, reusable)
        pages = pool.pages_of(len(self.token_ids))
        table = pool.open_table(self.state.request.cache_namespace, prefix, pages, reserve=reserve)
        if table is None:
            return None
        self.lane = Lane(self.token_ids, table, len(prefix) * pool.page_size)
        return self.lane.num_computed

    def secure_pages(self, pool: PagePool) -> bool:
        """Allocate the page of the last token; return whether it is there."""
        assert self.lane is not None
        table = self.lane.table
        needed = len(self.token_ids)
        return len(table.pages) * pool.page_size >= needed or pool.extend(table, pool.pages_of(needed))

    def stop_running(self, pool: PagePool) -> None:
        """Give up the pages; the tokens remain, so that `start` can compute them again."""
        if self.lane is not None:
            pool.release(self.lane.table)
            self.lane = None

    def prefill_chunks(self, budget: int) -> list[tuple[Lane, Chunk]]:
        """Return the next tokens that have no keys and values, `budget` at most."""
        assert self.lane is not None
        return [(self.lane, self._prefill_chunk(self.lane, budget))]

    def draft(self, count: int) -> list[int]:
        """Speculate up to `count` tokens, fewer than the output may still have."""
        if self.lookup is None or self.grammar is not None:
            return []  # a grammar's state stands after the last token, not after drafts
        count = min(count, self.max_output_tokens - len(self.output_token_ids) - 1)
        return self.lookup.draft(self.token_ids, count) if count > 0 else []

    def sampling_rows(self, drafts: Ids[int]) -> list[SamplingRow]:
        """Return the row of the next token, and one after each draft as if it were accepted."""
        rows = []
        top_p = self.top_p
        output_token_ids = self.output_token_ids
        for count in range(len(drafts) + 1):
            rows.append(
                SamplingRow(
                    self.params,
                    self.state.request.prompt_token_ids,
                    [*output_token_ids, *drafts[:count]] if count else output_token_ids,
                    self.index,
                    len(self.token_ids) + count,
                    self.state.seed,
                    top_p,
                    self.grammar,
                )
            )
            top_p = decay_top_p(top_p, self.params)
        return rows

    def add_hidden(self, row: Ids[float]) -> None:
        """Add the hidden state that a chunk asked for."""
        self.hidden_sum = (
            [a + b for a, b in zip(self.hidden_sum, row, strict=True)] if self.hidden_sum else row
        )

    @property
    def embedding(self) -> tuple[float, ...]:
        """The pooled hidden state of the prompt; empty while it is not computed, or if nobody asks for it."""
        if self.params.pooling is None or not self.is_computed:
            return ()
        tokens = len(self.token_ids) if self.params.pooling == "mean" else 1
        return tuple(value / tokens for value in self.hidden_sum)

    def _prefill_chunk(self, lane: Lane, budget: int) -> Chunk:
        start = lane.num_computed
        tokens = min(budget, len(self.token_ids) - start)
        is_end = start + tokens == len(self.token_ids)
        chunk = lane.chunk(tokens, has_logits=is_end and self.max_output_tokens > 0)
        if self.params.pooling == "mean":
            return replace(chunk, hidden="sum")
        if self.params.pooling == "last":
            return replace(chunk, hidden="last" if is_end else None)
        scored_end = min(start + tokens + 1, len(self.state.request.prompt_token_ids))
        if self.index or not self.state.missing_scores or scored_end <= start + 1:
            return chunk
        return Chunk(
            token_ids=chunk.token_ids,
            start=start,
            pages=chunk.pages,
            logits_from=chunk.logits_from,
            score=self.token_ids[start + 1 : scored_end],
            score_top=self.params.prompt_logprobs or 0,
            is_contiguous=chunk.is_contiguous,
        )


def decay_top_p(top_p: float, params: SamplingParams) -> float:
    """Return top_p after one more token (arXiv:2206.04624)."""
    return max(top_p * params.top_p_decay, params.top_p_bound) if params.top_p_decay > 0.0 else top_p
