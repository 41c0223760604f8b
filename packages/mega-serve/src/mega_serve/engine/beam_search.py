"""Beam search on paged sequences, with the semantics of `mega_model.generate.beam_search`.

All beams of a request run in the same steps as one unit of the scheduler. Beams that continue the same parent
share its full pages; the partly filled last page is copied. Sums of log-probabilities are double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from mega_serve.engine.interfaces import Chunk
from mega_serve.engine.page_pool import PagePool
from mega_serve.engine.requests import BeamSearchParams
from mega_serve.engine.sequence import Lane, RequestState

CopyPages = Callable[[Ids[tuple[int, int]]], None]


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A hypothesis: its tokens after the prompt, the stop token included, and its score."""

    token_ids: tuple[int, ...]
    score: float
    is_stopped: bool


class FinishedBeams:
    """The `width` best finished hypotheses."""

    def __init__(self, width: int, length_penalty: float) -> None:
        self._width = width
        self._length_penalty = length_penalty
        self.beams: list[FinishedBeam] = []

    def add(self, token_ids: Ids[int], logprob: float, *, is_stopped: bool) -> None:
        """Keep a hypothesis if it is among the best; of two equal ones, the earlier."""
        score = self._score(logprob, len(token_ids))
        self.beams.append(FinishedBeam(tuple(token_ids), score, is_stopped))
        self.beams.sort(key=lambda beam: beam.score, reverse=True)
        del self.beams[self._width :]

    def is_done(self, best_logprob: float, new_tokens: int) -> bool:
        """Whether `width` beams are finished and no open beam scores higher than the worst of them."""
        if len(self.beams) < self._width:
            return False
        return self.beams[-1].score >= self._score(best_logprob, new_tokens)

    def _score(self, logprob: float, new_tokens: int) -> float:
        return float(logprob / new_tokens**self._length_penalty)


@dataclass(slots=True, eq=False)
class Beam:
    """An open hypothesis.

    Attributes:
        logprob: Σ ln P over its tokens.
        lane: its pages; None until `source` is forked.
        source: the lane of its parent, which another child has taken over.
    """

    token_ids: list[int]
    logprob: float
    lane: Lane | None = None
    source: Lane | None = None


class BeamGroup:
    """The beams of one request; a unit of the scheduler.

    A stem computes the prompt but its last token; then all beams fork from it. After a preemption the stem
    is computed again, then each beam's own tokens but the last, then the search continues.

    Args:
        copy_pages: the runner's.

    Attributes:
        stem: the prompt without its last token, until the beams have forked.
        beams: the open hypotheses, best first.
        finished: the finished ones.
    """

    __slots__ = (
        "_copy_pages",
        "beams",
        "finished",
        "is_finished",
        "key",
        "max_output_tokens",
        "params",
        "slots",
        "state",
        "stem",
    )

    def __init__(
        self, state: RequestState, params: BeamSearchParams, *, max_seq_len: int, copy_pages: CopyPages
    ) -> None:
        self._copy_pages = copy_pages
        self.state = state
        self.params = params
        self.key = state.key(0)
        self.slots = params.width
        prompt = list(state.request.prompt_token_ids)
        self.max_output_tokens = min(params.max_tokens, max_seq_len - len(prompt))
        self.stem: Lane | None = None
        self.beams = [Beam(prompt, 0.0)]
        self.finished = FinishedBeams(params.width, params.length_penalty)
        self.is_finished = False

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.state.request.prompt_token_ids)

    @property
    def known_tokens(self) -> int:
        """Number of tokens that `start` looks up."""
        return self.prompt_tokens

    @property
    def banned_token_ids(self) -> list[int | None]:
        """The id that may not follow each beam, if any."""
        before, banned = self.params.banned_bigram or (None, None)
        return [banned if beam.token_ids[-1] == before else None for beam in self.beams]

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token of each beam is to be computed."""
        return self.stem is None and all(
            beam.lane is not None and beam.lane.num_computed == len(beam.token_ids) - 1 for beam in self.beams
        )

    @property
    def running_lanes(self) -> list[Lane]:
        """The lanes that hold pages."""
        stem = [] if self.stem is None else [self.stem]
        return stem + [beam.lane for beam in self.beams if beam.lane is not None]

    def start(self, pool: PagePool, reserve: int) -> int | None:
        """Allocate the pages of the stem; reuse the prefix cache. See `Sequence.start`."""
        request = self.state.request
        stem_tokens = self.prompt_tokens - 1
        prefix = pool.find_prefix(request.prompt_token_ids, request.cache_namespace, stem_tokens)
        shared = stem_tokens // pool.page_size
        stem_pages = pool.pages_of(stem_tokens)
        all_pages = shared + sum(pool.pages_of(len(beam.token_ids)) - shared for beam in self.beams)
        reserve += all_pages - stem_pages
        table = pool.open_table(request.cache_namespace, prefix, stem_pages, reserve=reserve)
        if table is None:
            return None
        prompt = list(request.prompt_token_ids)
        self.stem = Lane(prompt, table, len(prefix) * pool.page_size)
        return self.stem.num_computed

    def secure_pages(self, pool: PagePool) -> bool:
        """Fork the beams that have no pages and allocate the pages of all tokens."""
        if self.stem is not None:
            if self.stem.num_computed < self.prompt_tokens - 1:
                return True
            first, *others = self.beams
            first.lane = Lane(first.token_ids, self.stem.table, self.stem.num_computed)
            for beam in others:
                beam.source = self.stem
            self.stem = None
        return self._fork_beams(pool) and all(
            pool.extend(lane.table, pool.pages_of(len(lane.token_ids))) for lane in self.running_lanes
        )

    def _fork_beams(self, pool: PagePool) -> bool:
        pairs = []
        for beam in self.beams:
            if beam.lane is not None:
                continue
            assert beam.source is not None
            fork = pool.fork(beam.source.table, beam.source.num_computed)
            if fork is None:
                break
            beam.lane = Lane(beam.token_ids, fork[0], beam.source.num_computed)
            beam.source = None
            pairs += fork[1]
        if pairs:
            self._copy_pages(pairs)
        return all(beam.lane is not None for beam in self.beams)

    def stop_running(self, pool: PagePool) -> None:
        """Give up the pages; the tokens remain, so that `start` can compute them again."""
        for lane in self.running_lanes:
            pool.release(lane.table)
        self.stem = None
        for beam in self.beams:
            beam.lane = None
            beam.source = None

    def prefill_chunks(self, budget: int) -> list[tuple[Lane, Chunk]]:
        """Return the next tokens of the stem, or those of each beam before its last; `budget` at most."""
        chunks = []
        for lane in self.running_lanes:
            end = self.prompt_tokens if lane is self.stem else len(lane.token_ids)
            tokens = min(budget, end - 1 - lane.num_computed)
            if tokens > 0:
                chunks.append((lane, lane.chunk(tokens, has_logits=False)))
                budget -= tokens
        return chunks

    def select(self, pool: PagePool, top_logprobs: Ids[Ids[tuple[int, float]]]) -> bool:
        """Choose the beams of the next step; return whether the search has ended.

        Args:
            top_logprobs: the 2 · width most probable (id, log-probability) after each beam.
        """
        width = self.params.width
        new_tokens = len(self.beams[0].token_ids) + 1 - self.prompt_tokens
        continuations = sorted(self._continuations(top_logprobs), key=lambda item: -item[0])[: 2 * width]
        children: list[tuple[float, Beam, int]] = []
        for rank, (logprob, beam, token_id) in enumerate(continuations):
            if token_id != self.params.stop_token_id:
                children.append((logprob, beam, token_id))
            elif rank < width:
                tokens = [*beam.token_ids[self.prompt_tokens :], token_id]
                self.finished.add(tokens, logprob, is_stopped=True)
            if len(children) == width:
                break
        best = continuations[0][0] if continuations else -math.inf
        if self.finished.is_done(best, new_tokens) or not children:
            return True
        self._replace_beams(pool, children)
        if new_tokens < self.max_output_tokens:
            return False
        self.finish_open_beams()
        return True

    def finish_open_beams(self) -> None:
        """Count the open beams as finished, as they are."""
        for beam in self.beams:
            if tokens := beam.token_ids[self.prompt_tokens :]:
                self.finished.add(tokens, beam.logprob, is_stopped=False)

    def _continuations(self, top_logprobs: Ids[Ids[tuple[int, float]]]) -> Iterator[tuple[float, Beam, int]]:
        for beam, top in zip(self.beams, top_logprobs, strict=True):
            for token_id, logprob in top:
                if logprob > -math.inf:
                    yield beam.logprob + logprob, beam, token_id

    def _replace_beams(self, pool: PagePool, children: Ids[tuple[float, Beam, int]]) -> None:
        """Replace the beams by their children; the first child of each takes over its pages."""
        parents = {id(parent): parent for _, parent, _ in children}
        for beam in self.beams:
            if id(beam) not in parents and beam.lane is not None:
                pool.release(beam.lane.table)  # before the others fork, so that the pages suffice
        beams = []
        for logprob, parent, token_id in children:
            lane = parent.lane
            assert lane is not None
            child = Beam([*parent.token_ids, token_id], logprob, source=lane)
            if parents.pop(id(parent), None) is not None:
                child.lane = Lane(child.token_ids, lane.table, lane.num_computed)
                child.source = None
            beams.append(child)
        self.beams = beams
