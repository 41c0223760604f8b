"""A checkpoint over tp x pp x dp ranks as a model for the tasks.

Rank 0 runs the task and sends rounds of requests to all ranks. Each of the dp copies of the model answers a
contiguous part of a round, so that requests with equal prefixes stay together; the parts have about equal
numbers of tokens. The answers are summed up on rank 0, where each rank adds zeros for those of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import orjson
import torch
import torch.distributed as dist

from mega_eval.models.batch_generator import BatchGenerator
from mega_eval.models.greedy_continuation import cut_at_stop
from mega_eval.models.interface import GenerationRequest, ModelIdentity, WindowScores
from mega_eval.models.rank_scorer import RankScorer
from mega_eval.windows import Window, as_tokens
from mega_model.distributed.mesh import Mesh
from mega_schema.tokenizer.tokenizer import Tokenizer

ROUND_TOKENS = 1 << 14  # of a model copy: passes of several batches, and a few seconds of work
_IDLE = timedelta(days=7)  # rank 0 may read and tokenize for long between two commands
_SCORE, _GENERATE, _STOP = range(3)


class RankWatch(Protocol):
    """Names a rank that has ended."""

    def explain(self, error: RuntimeError) -> Exception:
        """Return the error to raise instead of that of a collective."""

    def close(self) -> None:
        """End the other ranks."""


@dataclass(frozen=True, slots=True)
class RankEngine:
    """One rank's part of the model and of the work: every rank makes the same calls.

    Attributes:
        scorer: of windows.
        generator: of continuations.
        commands: the group over which rank 0 sends commands and receives answers; gloo.
    """

    mesh: Mesh
    scorer: RankScorer
    generator: BatchGenerator
    tokenizer: Tokenizer
    commands: dist.ProcessGroup

    def score(self, windows: Sequence[Window]) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a round; return ln P and the greedy tokens of all targets, on rank 0."""
        ends = np.cumsum([0, *(window.target_length for window in windows)])
        logprob_M = torch.zeros(int(ends[-1]), dtype=torch.float64)
        greedy_M = torch.zeros(int(ends[-1]), dtype=torch.int64)
        part = self._choose_part([window.input_length for window in windows])
        for batch in self.scorer.score_batches([windows[index] for index in part]):
            for number, score in batch:
                index = part[number]
                place = slice(int(ends[index]), int(ends[index + 1]))
                if self.scorer.has_scores:
                    logprob_M[place] = torch.from_numpy(score.logprobs)
                    greedy_M[place] = torch.from_numpy(score.greedy_ids)
        return self._sum(logprob_M), self._sum(greedy_M)

    def generate(self, requests: Sequence[GenerationRequest]) -> torch.Tensor:
        """Continue the prompts of a round; return the tokens + 1, (requests, longest), on rank 0; 0: none."""
        longest = max(request.max_tokens for request in requests)
        token_BS = torch.zeros(len(requests), longest, dtype=torch.int64)
        part = self._choose_part([len(request.prompt) for request in requests])
        for batch in self.generator.continue_batches([requests[index] for index in part]):
            for number, continuation in batch:
                ids = continuation.ids
                if self.scorer.has_scores:
                    token_BS[part[number], : len(ids)] = torch.tensor(ids, dtype=torch.int64) + 1
        return self._sum(token_BS)

    def _choose_part(self, sizes: Sequence[int]) -> range:
        """Return the indices of this model copy: a contiguous part with about its share of the tokens."""
        total = np.cumsum([0, *sizes])
        dp = self.mesh.dp
        begin, end = (
            int(np.searchsorted(total, total[-1] * copy / dp.size)) for copy in (dp.rank, dp.rank + 1)
        )
        return range(begin, len(sizes) if dp.rank == dp.size - 1 else end)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        dist.reduce(values, 0, group=self.commands)
        return values

    def send(self, kind: int, requests: object = ()) -> None:
        """Send a command from rank 0 to all others."""
        content = torch.frombuffer(
            bytearray(orjson.dumps(requests, option=orjson.OPT_SERIALIZE_NUMPY)), dtype=torch.uint8
        )
        dist.broadcast(torch.tensor([kind, len(content)]), 0, group=self.commands)
        dist.broadcast(content, 0, group=self.commands)

    def obey(self) -> None:
        """Do what rank 0 commands until it says stop: the loop of every other rank."""
        while True:
            head = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(head, 0, group=self.commands)
            content = torch.zeros(int(head[1]), dtype=torch.uint8)
            dist.broadcast(content, 0, group=self.commands)
            requests: Any = orjson.loads(content.numpy().tobytes())
            if head[0] == _STOP:
                return
            if head[0] == _SCORE:
                self.score([Window(as_tokens(tokens), count) for tokens, count in requests])
            else:
                self.generate(
                    [GenerationRequest(tuple(ids), count, tuple(stop)) for ids, count, stop in requests]
                )


def open_command_group() -> dist.ProcessGroup:
    """Create the group of commands; every rank must call it."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_IDLE)
    return group


class RankModel:
    """The `RequestModel` of rank 0."""

    def __init__(self, engine: RankEngine, identity: ModelIdentity, watch: RankWatch) -> None:
        self._engine = engine
        self._watch = watch
        self._is_broken = False
        self.identity = identity
        self.tokenizer = engine.tokenizer
        self.context_length = engine.scorer.context_length
        self.vocab_size = engine.scorer.vocab_size

    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield the scores of a round at a time, as `RequestModel.score_batches` does."""
        for indices in self._rounds([window.input_length for window in windows], answered):
            part = [windows[index] for index in indices]
            logprob_M, greedy_M = self._run(
                _SCORE,
                [(window.tokens, window.target_length) for window in part],
                partial(self._engine.score, part),
            )
            ends = np.cumsum([window.target_length for window in part])[:-1]
            columns = (np.split(column.numpy(), ends) for column in (logprob_M, greedy_M))
            yield [
                (index, WindowScores(logprobs, greedy == windows[index].targets, greedy))
                for index, logprobs, greedy in zip(indices, *columns, strict=True)
            ]

    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield the continuations of a round at a time, as `RequestModel.generate_batches` does."""
        sizes = [len(request.prompt) + request.max_tokens for request in requests]
        for indices in self._rounds(sizes, answered):
            part = [requests[index] for index in indices]
            token_BS = self._run(
                _GENERATE, [astuple(request) for request in part], partial(self._engine.generate, part)
            )
            texts = []
            for request, row in zip(part, token_BS.tolist(), strict=True):
                text = self.tokenizer.decode([token - 1 for token in row if token])
                texts.append(cut_at_stop(text, request.stop))
            yield list(zip(indices, texts, strict=True))

    def _rounds(self, sizes: Sequence[int], answered: Collection[int]) -> Iterator[range]:
        """Yield contiguous ranges of about `ROUND_TOKENS` tokens a model copy that are not all answered."""
        limit = ROUND_TOKENS * self._engine.mesh.dp.size
        starts, tokens = [0], 0
        for index, size in enumerate(sizes):
            if tokens + size > limit and tokens:
                starts.append(index)
                tokens = 0
            tokens += size
        for begin, end in pairwise([*starts, len(sizes)]):
            indices = range(begin, end)
            if not all(index in answered for index in indices):
                yield indices

    def _run(self, kind: int, requests: object, answer: Any) -> Any:
        """Run a round on all ranks; the error of a collective becomes the name of the rank that ended."""
        try:
            self._engine.send(kind, requests)
            return answer()
        except RuntimeError as error:  # gloo has no class for it
            self._is_broken = True
            raise self._watch.explain(error) from None
        except BaseException:
            self._is_broken = True
            raise

    def close(self) -> None:
        """End the other ranks."""
        if not self._is_broken:
            try:
                self._engine.send(_STOP)
                # a rank aborts if another leaves while it closes its connections
                self._engine.mesh.barrier()
            except RuntimeError:  # one has ended already
                self._is_broken = True
        self._watch.close()
        if not self._is_broken:
            self._engine.mesh.destroy()
