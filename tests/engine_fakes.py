"""A language model, a sampler and a tokenizer without numbers, as oracles of the engine core.

The model's "keys and values" are the token ids themselves, stored in the pages. Its "logits" are the context
that it reads back from the pages, so that a page that was lost, shared or overwritten by mistake changes the
output. The next token is a hash of that context.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.engine_core import EngineCore
from mega_serve.engine.interfaces import Chunk, RunnerOutput, SampledToken, SamplingRow
from mega_serve.engine.requests import EngineRequest, SamplingParams, SequenceOutput, TokenLogprob
from mega_serve.engine.scheduler import EngineConfig

EOD = 0
VOCAB = 11


def hash_context(context: Sequence[int], *salt: int) -> int:
    return zlib.crc32(repr((tuple(context), salt)).encode())


def next_token(
    context: Sequence[int], params: SamplingParams, index: int, seed: int, weights: int = 0
) -> int:
    """The model and the sampler in one: what follows a context."""
    if params.is_greedy:
        return hash_context(context, weights) % VOCAB
    return hash_context(context, weights, seed, index, len(context)) % VOCAB


def score(context: Sequence[int], token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -float(hash_context(context, token_id) % 1000))


def hidden_row(context: Sequence[int]) -> list[float]:
    """The hidden state of the last token of a context, of two dimensions."""
    return [float(hash_context(context, salt) % 1000) for salt in (1, 2)]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class PageReadingRunner:
    """A `ModelRunner` that stores token ids in pages and checks every chunk.

    Args:
        max_tokens: no step may have more.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_seq_len: int = 64, max_tokens: int = 10**9
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.vocab_size = VOCAB
        self.max_seq_len = max_seq_len
        self.max_tokens = max_tokens
        self.pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.steps: list[int] = []
        self.copied_pages = 0

    def run(self, chunks: Sequence[Chunk]) -> RunnerOutput:
        assert chunks, "a step without chunks"
        self.steps.append(sum(len(chunk.token_ids) for chunk in chunks))
        assert self.steps[-1] <= self.max_tokens, "the step exceeds the budget"
        writers: dict[tuple[int, int], int] = {}
        logits: list[tuple[int, ...]] = []
        scores = []
        hidden = []
        for number, chunk in enumerate(chunks):
            assert chunk.token_ids, "a chunk without tokens"
            end = chunk.start + len(chunk.token_ids)
            assert len(chunk.pages) * self.page_size >= end, "no page for a token"
            assert end <= self.max_seq_len, "a token outside the context"
            first = chunk.pages[0]
            assert chunk.is_contiguous == (list(chunk.pages) == [*range(first, first + len(chunk.pages))])
            for offset, token_id in enumerate(chunk.token_ids):
                page, slot = divmod(chunk.start + offset, self.page_size)
                place = chunk.pages[page], slot
                assert place not in writers, f"chunks {writers[place]} and {number} write to one place"
                writers[place] = number
                self.pages[place[0]][slot] = token_id
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            stored = [
                self.pages[chunk.pages[position // self.page_size]][position % self.page_size]
                for position in range(end)
            ]
            assert None not in stored, "a token without keys and values"
            context = cast(list[int], stored)
            for offset in range(chunk.logits_from, len(chunk.token_ids)):
                logits.append(tuple(context[: chunk.start + offset + 1]))
            if chunk.hidden is not None:
                first = chunk.start + 1 if chunk.hidden == "sum" else end
                rows = [hidden_row(context[:count]) for count in range(first, end + 1)]
                hidden.append([sum(column) for column in zip(*rows, strict=True)])
            scores.append(
                tuple(
                    score(context[: chunk.start + offset + 1], token_id)
                    for offset, token_id in enumerate(chunk.score)
                )
            )
        return RunnerOutput(cast(Any, logits), scores, hidden)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.copied_pages += len(pairs)
        for source, target in pairs:
            self.pages[target] = list(self.pages[source])


class HashSampler:
    """A `Sampler` of contexts; `weights` stands for the weights of the model."""

    def __init__(self) -> None:
        self.weights = 0
        self.top_ps: list[float] = []

    def sample(self, logits: Any, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        assert len(logits) == len(rows)
        return [self._sample_row(context, row) for context, row in zip(logits, rows, strict=True)]

    def _sample_row(self, context: tuple[int, ...], row: SamplingRow) -> SampledToken:
        self.top_ps.append(row.top_p)
        assert context == (*row.prompt_token_ids, *row.output_token_ids), "another sequence's logits"
        assert row.position == len(context)
        token_id = next_token(context, row.params, row.sequence_index, row.seed, self.weights)
        logprob = score(context, token_id) if row.params.logprobs is not None else None
        return SampledToken(token_id, logprob)

    def top_logprobs(
        self, logits: Any, count: int, banned: Sequence[int | None]
    ) -> list[list[tuple[int, float]]]:
        assert len(logits) == len(banned)
        rows = []
        for context, excluded in zip(logits, banned, strict=True):
            values = [(token_id, -(hash_context(context, token_id) % 997) / 100) for token_id in range(VOCAB)]
            values = [(token_id, -1e10 if token_id == excluded else value) for token_id, value in values]
            rows.append(sorted(values, key=lambda pair: -pair[1])[:count])
        return rows


class LetterDetokenizer:
    """Writes id i as the i-th letter; holds back text that may become a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str],
        include_stop_str: bool,
        min_tokens: int,
        skip_special_tokens: bool | None,
    ) -> None:
        self._stop = stop
        self._unmatched = min_tokens
        self._include = include_stop_str
        self._text = ""

    def append(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        assert len(token_ids) == 1 or not self._stop, "which of the tokens completed the string?"
        if self._unmatched > 0:
            self._unmatched -= 1
            return decode(token_ids), None
        self._text += decode(token_ids)
        for string in self._stop:
            start = self._text.find(string)
            if start >= 0:
                end = start + len(string) if self._include else start
                text, self._text = self._text[:end], ""
                return text, string
        pending = max(
            (size for s in self._stop for size in range(1, len(s)) if self._text.endswith(s[:size])),
            default=0,
        )
        cut = len(self._text) - pending
        text, self._text = self._text[:cut], self._text[cut:]
        return text, None

    def flush(self) -> str:
        text, self._text = self._text, ""
        return text


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def letter_tokenizer() -> Tokenizer:
    return cast(Tokenizer, SimpleNamespace(identity=SimpleNamespace(eod=EOD), decode=decode))


@dataclass
class Engine:
    """An engine core with its fakes."""

    core: EngineCore
    runner: PageReadingRunner
    sampler: HashSampler
    clock: Clock

    def check_pool(self) -> None:
        self.core.check_pages()

    def finish_all(self, most_steps: int = 10_000) -> dict[tuple[str, int], list[SequenceOutput]]:
        """Step until all requests are answered; return the outputs of each sequence."""
        outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            collect(outputs, self.core.step())
            self.check_pool()
        assert not self.core.has_work, "the engine does not come to an end"
        return outputs


def collect(
    outputs: dict[tuple[str, int], list[SequenceOutput]], new: Sequence[SequenceOutput]
) -> dict[tuple[str, int], list[SequenceOutput]]:
    """Append outputs to those of their sequences; none may follow a finish reason."""
    for output in new:
        earlier = outputs.setdefault((output.request_id, output.index), [])
        assert not earlier or earlier[-1].finish_reason is None, "an output after the last"
        earlier.append(output)
    return outputs


def open_engine(
    config: EngineConfig | None = None,
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_seq_len: int = 64,
    **arguments: Any,
) -> Engine:
    config = config or EngineConfig(max_num_seqs=8, max_num_batched_tokens=16)
    runner = PageReadingRunner(
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=max_seq_len,
        max_tokens=config.max_num_batched_tokens,
    )
    sampler = HashSampler()
    clock = Clock()
    core = EngineCore(
        runner,
        letter_tokenizer(),
        sampler,
        config,
        clock=clock,
        detokenizer_factory=LetterDetokenizer,
        draw_seed=lambda: 1,
        **arguments,
    )
    return Engine(core, runner, sampler, clock)


def new_request(request_id: str, prompt: Sequence[int], *, n: int = 1, **values: Any) -> EngineRequest:
    """Return a request; values of `EngineRequest` and of `SamplingParams` may be mixed."""
    own = {name: values.pop(name) for name in ("priority", "cache_namespace", "timeout") if name in values}
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "seed": 5, **values})
    return EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params, n=n, **own)


def naive_output(request: EngineRequest, index: int, max_seq_len: int = 64) -> list[int]:
    """Sample one sequence by itself."""
    params = request.params
    assert isinstance(params, SamplingParams)
    context = list(request.prompt_token_ids)
    most = min(len(context) + params.max_tokens, max_seq_len)
    while len(context) < most:
        context.append(next_token(context, params, index, params.seed or 0))
        new = len(context) - len(request.prompt_token_ids)
        if new <= params.min_tokens:
            continue
        is_eod = context[-1] == EOD and not params.ignore_eos
        is_repeated = context[-1] == params.stop_repeated_id == context[-2]
        if is_eod or is_repeated or context[-1] in params.stop_token_ids:
            break
        text = decode(context[len(request.prompt_token_ids) :])[params.min_tokens :]
        if any(string in text for string in params.stop):
            break
    return context[len(request.prompt_token_ids) :]
