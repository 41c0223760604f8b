"""The engine: accepts requests and advances all of them by one step at a time.

A step expires deadlines, schedules chunks, runs the model, samples, and returns what each sequence gained. It
runs in one thread; requests are added and aborted between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.beam_search import BeamGroup
from mega_serve.engine.interfaces import (
    DetokenizerFactory,
    GrammarState,
    Logits,
    ModelRunner,
    RunnerOutput,
    SampledToken,
    SamplingRow,
    TokenSampler,
)
from mega_serve.engine.output_processor import OutputProcessor, describe_error
from mega_serve.engine.page_pool import PagePool
from mega_serve.engine.request_checks import check_request
from mega_serve.engine.requests import (
    BeamSearchParams,
    EngineRequest,
    EngineStats,
    FinishReason,
    GrammarSpec,
    SamplingParams,
    SequenceOutput,
)
from mega_serve.engine.scheduler import EngineConfig, ScheduledChunk, Scheduler, Unit
from mega_serve.engine.sequence import Lane, RequestState, Sequence
from mega_serve.engine.speculation import PromptLookup
from mega_serve.engine.step_sizes import StepSizes
from mega_serve.engine.throughput import Throughput
from mega_serve.engine.waiting_queue import WaitingQueue

GrammarFactory = Callable[[GrammarSpec], GrammarState]


class EngineCore:
    """Serves requests by continuous batching over a paged KV cache.

    Args:
        clock: time in seconds, time.monotonic.
        detokenizer_factory: the constructor of the incremental detokenizers.
        draw_seed: returns a fresh seed for a request without one.
        grammar_factory: compiles a grammar; None: requests with a grammar end with "error".
        iteration: of the served weights.

    Attributes:
        pool: the pages of the KV cache.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        sampler: TokenSampler,
        config: EngineConfig,
        *,
        clock: Callable[[], float],
        detokenizer_factory: DetokenizerFactory,
        draw_seed: Callable[[], int],
        grammar_factory: GrammarFactory | None = None,
        iteration: int = 0,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._config = config
        self._clock = clock
        self._detokenizer_factory = detokenizer_factory
        self._draw_seed = draw_seed
        self._grammar_factory = grammar_factory
        self._iteration = iteration
        self._processor = OutputProcessor(tokenizer, detokenizer_factory, clock)
        self._units: dict[str, list[Unit]] = {}  # of each unfinished request
        self._deadlines: WaitingQueue[str] = WaitingQueue()
        self._arrivals = 0
        self._waiting_tokens = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._last_step = clock()
        self._throughput = Throughput(self._last_step)
        self._step_sizes = StepSizes()
        self._early_outputs: list[SequenceOutput] = []  # of requests that ended when they were added
        self.pool = PagePool(runner.num_pages, runner.page_size, prefix_caching=config.prefix_caching)
        self._scheduler = Scheduler(config, self.pool)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._units or self._early_outputs)

    def check_pages(self) -> None:
        """Assert that the pool agrees with the pages that sequences hold (see `PagePool.check`)."""
        self.pool.check(lane.table for unit in self._scheduler.running for lane in unit.running_lanes)

    def add(self, request: EngineRequest) -> None:
        """Put a request into the queue.

        Raises:
            RequestError: its id is in use, or it could never be served (see `check_request`).
        """
        if request.request_id in self._units:
            raise RequestError("request_id", "in use", found=request.request_id, wanted="a fresh id")
        check_request(request, self._runner, self._config)
        deadline = None if request.timeout is None else self._clock() + request.timeout
        seed = request.params.seed if isinstance(request.params, SamplingParams) else 0
        state = RequestState(
            request,
            arrival=self._arrivals,
            deadline=deadline,
            seed=self._draw_seed() if seed is None else seed,
            unfinished=request.n,
            queue_time=self._clock(),
        )
        self._arrivals += 1
        try:
            units = self._create_units(state)
        except Exception as error:  # a grammar that does not compile, for example
            self._early_outputs += [
                SequenceOutput(
                    request_id=request.request_id,
                    index=index,
                    finish_reason="error",
                    error=describe_error(error),
                )
                for index in range(request.rows)
            ]
            return
        self._units[request.request_id] = units
        self._waiting_tokens += request.max_total_tokens
        if deadline is not None:
            self._deadlines.push((deadline, state.arrival), request.request_id)
        self._scheduler.add(units[0])

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request and free its pages at once.

        Returns:
            The last outputs of its sequences; none if it is not in work.
        """
        return self._finish_request(request_id, "abort")

    def step(self) -> list[SequenceOutput]:
        """Advance all requests; return what their sequences gained.

        An error of the runner passes through: the engine is then of no use.
        """
        outputs = self._early_outputs
        self._early_outputs = []
        outputs += self._expire(self._clock())
        scheduled, started = self._scheduler.schedule()
        for unit in started:
            self._count_admitted(unit.state)
        generated = self._generation_tokens
        if scheduled:
            result = self._runner.run([chunk.chunk for chunk in scheduled])
            outputs += self._update(scheduled, result)
            self._step_sizes.add(sum(len(chunk.chunk.token_ids) for chunk in scheduled))
        self._last_step = self._clock()
        self._throughput.add(self._last_step, self._generation_tokens - generated)
        return outputs

    def swap(self, iteration: int) -> None:
        """Continue with the weights that the runner has by now; call it between two steps.

        Keys and values of the old weights are discarded: the prefix cache is cleared, and running sequences
        keep their tokens, whose keys and values are computed again. So every token is sampled by one set of
        weights, in a context that the same set has read. Prompt log-probabilities that are not delivered are
        computed again too.
        """
        self._iteration = iteration
        self._scheduler.requeue_all()
        self.pool.clear_cache()
        for units in self._units.values():
            first = units[0]
            if isinstance(first, Sequence) and not first.has_output:
                first.state.prompt_logprobs.clear()

    def stats(self) -> EngineStats:
        """Return the load; `waiting` counts preempted sequences too."""
        return EngineStats(
            running=self._scheduler.running_sequences,
            waiting=len(self._scheduler.waiting),
            waiting_tokens=self._waiting_tokens,
            kv_usage=self.pool.held_pages / self.pool.num_pages,
            tokens_per_second=self._throughput.tokens_per_second(self._clock()),
            prefix_cache_queries=self._scheduler.cache_queries,
            prefix_cache_hits=self._scheduler.cache_hits,
            preemptions=self._scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_counts=self._step_sizes.counts,
            step_tokens=self._step_sizes.tokens,
            iteration=self._iteration,
            last_step=self._last_step,
        )

    def _create_units(self, state: RequestState) -> list[Unit]:
        params = state.request.params
        max_seq_len = self._runner.max_seq_len
        if isinstance(params, BeamSearchParams):
            return [BeamGroup(state, params, max_seq_len=max_seq_len, copy_pages=self._runner.copy_pages)]
        return [self._create_sequence(state, params, index) for index in range(state.request.n)]

    def _create_sequence(self, state: RequestState, params: SamplingParams, index: int) -> Sequence:
        grammar = None
        if params.grammar is not None:
            if self._grammar_factory is None:
                raise RequestError("grammar", "this engine has no grammars")
            grammar = self._grammar_factory(params.grammar)
        lookup = None
        if self._config.speculative_tokens:
            lookup = PromptLookup(self._config.min_ngram, self._config.max_ngram)
        detokenizer = self._detokenizer_factory(
            self._tokenizer,
            state.request.prompt_token_ids,
            stop=params.stop,
            include_stop_str=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        return Sequence(
            state,
            params,
            index,
            max_seq_len=self._runner.max_seq_len,
            detokenizer=detokenizer,
            grammar=grammar,
            lookup=lookup,
        )

    def _count_admitted(self, state: RequestState) -> None:
        if not state.is_admitted:
            state.is_admitted = True
            state.start_time = self._clock()
            self._waiting_tokens -= state.request.max_total_tokens
            self._prompt_tokens += len(state.request.prompt_token_ids)

    def _expire(self, now: float) -> list[SequenceOutput]:
        """End the requests whose deadline has passed."""
        outputs: list[SequenceOutput] = []
        while (key := self._deadlines.first_key()) is not None and key[0] <= now:
            request_id = self._deadlines.first()
            assert request_id is not None
            outputs += self._finish_request(request_id, "timeout")
        return outputs

    def _update(self, scheduled: Ids[ScheduledChunk], result: RunnerOutput) -> list[SequenceOutput]:
        """Sample from the logits of a step and append the tokens."""
        sampled_chunks: list[tuple[Sequence, ScheduledChunk]] = []
        groups: dict[int, BeamGroup] = {}
        hidden = iter(result.hidden)
        for scheduled_chunk, scores in zip(scheduled, result.scores, strict=True):
            unit = scheduled_chunk.unit
            if isinstance(unit, BeamGroup):
                scheduled_chunk.lane.advance(self.pool, scheduled_chunk.tokens)
                if scheduled_chunk.logits_rows:
                    groups[id(unit)] = unit
                continue
            missing = unit.state.missing_scores
            if scores and missing:
                start = scheduled_chunk.chunk.start
                unit.state.prompt_logprobs += scores[len(unit.state.prompt_logprobs) - start :]
            if scheduled_chunk.chunk.hidden is not None:
                unit.add_hidden(next(hidden))
            scheduled_chunk.lane.advance(self.pool, scheduled_chunk.tokens)
            if unit.is_computed:
                sampled_chunks.append((unit, scheduled_chunk))
        forked_outputs = self._fork_sequences([unit for unit, _ in sampled_chunks])
        sampled_rows = sum(chunk.logits_rows for _, chunk in sampled_chunks)
        # sequence 0 has the scores of the prompt: a stream needs them before its other sequences
        outputs = self._sample(sampled_chunks, result.logits, sampled_rows) + forked_outputs
        if groups:
            logits = result.logits[sampled_rows:] if sampled_rows else result.logits
            outputs += self._search_beams(list(groups.values()), logits)
        return outputs

    def _sample(
        self, sampled_chunks: Ids[tuple[Sequence, ScheduledChunk]], logits: Logits, row_count: int
    ) -> list[SequenceOutput]:
        rows: list[SamplingRow] = []
        for sequence, chunk in sampled_chunks:
            if chunk.logits_rows:
                rows += sequence.sampling_rows(chunk.drafts)
        sampled: Ids[SampledToken] = ()
        if rows:
            own_logits = logits if len(logits) == row_count else logits[:row_count]
            sampled = self._sampler.sample(own_logits, rows)
        outputs = []
        first = 0
        for sequence, chunk in sampled_chunks:
            count = chunk.logits_rows
            if not count:  # scores or an embedding only
                output = self._processor.finish(sequence, "stop" if sequence.params.pooling else "length")
            else:
                output = self._processor.append(sequence, sampled[first : first + count], chunk.drafts)
                first += count
                accepted = len(output.token_ids)
                self._generation_tokens += accepted
                if accepted > 1:  # the keys and values of accepted drafts are in the pages already
                    chunk.lane.advance(self.pool, accepted - 1)
            outputs.append(output)
            if output.finish_reason is not None:
                self._remove(sequence)
        return outputs

    def _fork_sequences(self, sequences: Ids[Sequence]) -> list[SequenceOutput]:
        """Begin the other sequences of requests whose prompt is computed.

        They share the full pages of the prompt and compute its last token again, whose logits they need.
        """
        outputs = []
        for parent in sequences:
            state = parent.state
            if state.is_prefilled:
                continue
            state.is_prefilled = True
            for sequence in self._units[state.request.request_id][1:]:
                assert isinstance(sequence, Sequence)
                if sequence.max_output_tokens == 0:
                    outputs.append(self._processor.finish(sequence, "length"))
                    self._remove(sequence)
                elif not self._fork(parent, sequence):
                    self._scheduler.add(sequence)
        return outputs

    def _fork(self, parent: Sequence, sequence: Sequence) -> bool:
        assert parent.lane is not None
        if not self._scheduler.has_slots(sequence):
            return False
        tokens = len(sequence.token_ids) - 1
        fork = self.pool.fork(parent.lane.table, tokens)
        if fork is None:
            return False
        table, pairs = fork
        if pairs:
            self._runner.copy_pages(pairs)
        sequence.lane = Lane(sequence.token_ids, table, tokens)
        self._scheduler.add_running(sequence)
        return True

    def _search_beams(self, groups: Ids[BeamGroup], logits: Logits) -> list[SequenceOutput]:
        """Choose the next beams of the groups, whose rows of logits come in the order of the groups."""
        banned = [token_id for group in groups for token_id in group.banned_token_ids]
        most = 2 * max(group.params.width for group in groups)
        rows = self._sampler.top_logprobs(logits, most, banned)
        outputs: list[SequenceOutput] = []
        first = 0
        for group in groups:
            beams = len(group.beams)
            top = [row[: 2 * group.params.width] for row in rows[first : first + beams]]
            first += beams
            if group.state.first_token_time is None:
                group.state.first_token_time = self._clock()
            if group.select(self.pool, top):
                self._remove(group)
                outputs += self._processor.finish_beams(group)
                self._generation_tokens += sum(len(beam.token_ids) for beam in group.finished.beams)
        return outputs

    def _finish_request(self, request_id: str, reason: FinishReason) -> list[SequenceOutput]:
        """End all sequences of a request that are not finished."""
        outputs: list[SequenceOutput] = []
        for unit in self._units.get(request_id, ()):
            if unit.is_finished:
                continue
            self._remove(unit)
            if isinstance(unit, BeamGroup):
                unit.finish_open_beams()
                outputs += self._processor.finish_beams(unit, reason)
            else:
                outputs.append(self._processor.finish(unit, reason))
        return outputs

    def _remove(self, unit: Unit) -> None:
        """Free the pages of a unit and forget its request if no other unit is left."""
        unit.is_finished = True
        self._scheduler.remove(unit)
        state = unit.state
        state.unfinished -= 1
        if not state.unfinished:
            if not state.is_admitted:
                self._waiting_tokens -= state.request.max_total_tokens
            del self._units[state.request.request_id]
            if state.deadline is not None:
                self._deadlines.discard((state.deadline, state.arrival))
