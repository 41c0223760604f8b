"""Choose what each step computes: continuous batching with chunked prefill under a token budget.

Units (a sampled sequence, or the beams of a request) are served in order of priority, then of arrival. A step
first takes one token of every unit that decodes, so that the time between tokens stays low; prefill chunks
share the rest of the budget, the most important first. When pages run out, the least important unit that runs
is preempted: it gives up its pages and computes its tokens again later. Nobody is preempted for a slot.

The work of a step grows with the batch, not with the queue.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from mega_schema.errors import ConfigError
from mega_serve.engine.beam_search import BeamGroup
from mega_serve.engine.interfaces import Chunk
from mega_serve.engine.page_pool import PagePool
from mega_serve.engine.sequence import Lane, Sequence
from mega_serve.engine.waiting_queue import WaitingQueue

Unit = Sequence | BeamGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine core.

    Attributes:
        max_num_seqs: sequences (or beams) that run at a time.
        max_num_batched_tokens: tokens of a step, speculated ones included.
        max_prefill_chunk: tokens that one prompt may have in a step; None: all that the budget leaves.
        prefix_caching: keep pages of finished requests for prompts that begin alike.
        speculative_tokens: tokens speculated per sequence and step by prompt lookup; 0: none.
        min_ngram, max_ngram: lengths of the n-grams that prompt lookup compares.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int | None = None
    prefix_caching: bool = True
    speculative_tokens: int = 0
    min_ngram: int = 2
    max_ngram: int = 4

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("max_num_seqs", "too small", found=self.max_num_seqs, wanted="1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                "a step has no room for one token of each sequence",
                found=self.max_num_batched_tokens,
                wanted=f"max_num_seqs ({self.max_num_seqs}) or more",
            )
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            found = self.max_prefill_chunk
            raise ConfigError("max_prefill_chunk", "too small", found=found, wanted="1 or more")
        if self.speculative_tokens < 0:
            found = self.speculative_tokens
            raise ConfigError("speculative_tokens", "negative", found=found, wanted="0 or more")
        if not 1 <= self.min_ngram <= self.max_ngram:
            ngrams = f"{self.min_ngram} and {self.max_ngram}"
            raise ConfigError("min_ngram", "no range", found=ngrams, wanted="1 <= min_ngram <= max_ngram")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A chunk of a step and the unit that it belongs to.

    Attributes:
        tokens: number of its tokens that are not speculated.
        drafts: the speculated tokens after them.
    """

    unit: Unit
    lane: Lane
    chunk: Chunk
    tokens: int
    drafts: Ids[int] = ()

    @property
    def logits_rows(self) -> int:
        """Number of rows of logits that the runner returns for it."""
        return len(self.chunk.token_ids) - self.chunk.logits_from


class Scheduler:
    """The running units, in order of importance, and the queue.

    Attributes:
        preemptions: units that were preempted because pages ran out.
        cache_queries, cache_hits: tokens looked up and found in the prefix cache.
    """

    def __init__(self, config: EngineConfig, pool: PagePool) -> None:
        self._config = config
        self._pool = pool
        self._slots = 0
        self._blocked: tuple[Unit, int] | None = None  # a unit that lacked pages; the pool's releases then
        self.running: list[Unit] = []
        self.waiting: WaitingQueue[Unit] = WaitingQueue()
        self.preemptions = 0
        self.cache_queries = 0
        self.cache_hits = 0

    @property
    def running_sequences(self) -> int:
        """Sequences and beams in the batch."""
        return self._slots

    def add(self, unit: Unit) -> None:
        """Put a unit into the queue."""
        self.waiting.push(unit.key, unit)

    def has_slots(self, unit: Unit) -> bool:
        """Whether the batch has room for the unit's sequences."""
        return self._slots + unit.slots <= self._config.max_num_seqs

    def add_running(self, unit: Unit) -> None:
        """Put a unit that has its pages into the batch."""
        self._slots += unit.slots
        insort(self.running, unit, key=_key)

    def remove(self, unit: Unit) -> None:
        """Remove a unit from the batch or the queue and free its pages."""
        self.waiting.discard(unit.key)
        self._stop(unit)

    def requeue_all(self) -> None:
        """Move the whole batch back to the queue; its tokens will be computed again."""
        for unit in tuple(self.running):
            self._stop(unit)
            self.waiting.push(unit.key, unit)

    def schedule(self) -> tuple[list[ScheduledChunk], list[Unit]]:
        """Return the chunks of the next step, and the units that left the queue for it.

        Chunks of sampled sequences come before those of beams.
        """
        preemptions = self.preemptions
        self._secure_pages()
        decoding = [unit for unit in self.running if unit.is_decoding]
        prefilling = [unit for unit in self.running if not unit.is_decoding]
        budget = self._config.max_num_batched_tokens - sum(_decode_tokens(unit) for unit in decoding)
        # half of what is left, so that speculation cannot starve the prompts
        draft_budget = budget // 2 if prefilling or self.waiting else budget
        scheduled: list[ScheduledChunk] = []
        for unit in decoding:
            drafted = self._schedule_decode(unit, draft_budget, scheduled)
            draft_budget -= drafted
            budget -= drafted
        for unit in prefilling:
            budget -= self._schedule_prefill(unit, budget, scheduled)
        # pages that a preempted unit gave up belong to the units that run
        started = self._admit(budget, scheduled) if self.preemptions == preemptions else []
        scheduled.sort(key=lambda chunk: isinstance(chunk.unit, BeamGroup))
        return scheduled, started

    def _secure_pages(self) -> None:
        """Give each running unit the pages of its next step, the most important first."""
        pool = self._pool
        for unit in tuple(self.running):
            # the units behind the first that lacks pages may be preempted by now
            while unit.running_lanes and not unit.secure_pages(pool):
                self._preempt(self.running[-1])

    def _preempt(self, unit: Unit) -> None:
        self._stop(unit)
        self.waiting.push(unit.key, unit)
        self.preemptions += 1

    def _stop(self, unit: Unit) -> None:
        if unit.running_lanes:
            unit.stop_running(self._pool)
            self.running.remove(unit)
            self._slots -= unit.slots

    def _schedule_decode(self, unit: Unit, draft_budget: int, scheduled: list[ScheduledChunk]) -> int:
        """Schedule the last token of each lane; return the number of drafts beside them."""
        if isinstance(unit, BeamGroup):
            for beam_lane in unit.running_lanes:
                scheduled.append(ScheduledChunk(unit, beam_lane, beam_lane.chunk(1, has_logits=True), 1))
            return 0
        lane = unit.lane
        assert lane is not None
        count = min(self._config.speculative_tokens, draft_budget)
        drafts = unit.draft(count) if count > 0 else []
        # drafts get pages that are available; nobody is preempted for them
        pages = self._pool.pages_of(len(unit.token_ids) + len(drafts))
        if drafts and not self._pool.extend(lane.table, pages):
            drafts = []
        chunk = lane.chunk(1, has_logits=True, drafts=drafts)
        scheduled.append(ScheduledChunk(unit, lane, chunk, 1, drafts))
        return len(drafts)

    def _schedule_prefill(self, unit: Unit, budget: int, scheduled: list[ScheduledChunk]) -> int:
        """Schedule the next tokens of a prompt; return their number."""
        if self._config.max_prefill_chunk is not None:
            budget = min(budget, self._config.max_prefill_chunk)
        if budget <= 0:
            return 0
        chunks = [
            ScheduledChunk(unit, lane, chunk, len(chunk.token_ids))
            for lane, chunk in unit.prefill_chunks(budget)
        ]
        scheduled += chunks
        return sum(chunk.tokens for chunk in chunks)

    def _admit(self, budget: int, scheduled: list[ScheduledChunk]) -> list[Unit]:
        """Move units from the queue into the batch while slots, pages and tokens last."""
        started: list[Unit] = []
        while budget > 0 and (unit := self.waiting.first()) is not None:
            if not self.has_slots(unit):
                break
            if self.running and self._blocked == (unit, self._pool.releases):
                break
            hits = unit.start(self._pool, reserve=len(self.running))
            if hits is None:
                self._blocked = unit, self._pool.releases
                break
            self._blocked = None
            self.waiting.discard(unit.key)
            self.add_running(unit)
            self.cache_hits += hits
            self.cache_queries += unit.known_tokens
            if not unit.state.is_admitted:
                unit.state.cached_tokens = hits
            started.append(unit)
            tokens = self._schedule_prefill(unit, budget, scheduled)
            budget -= tokens
        return started


def _key(unit: Unit) -> tuple[int, int, int]:
    return unit.key


def _decode_tokens(unit: Unit) -> int:
    return len(unit.running_lanes)
