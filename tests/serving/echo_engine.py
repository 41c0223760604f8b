"""An engine without a model: it repeats the prompt, one token a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_schema.errors import ConfigError
from mega_serve.engine.interfaces import ModelInfo, RankConnectionError
from mega_serve.engine.requests import EngineRequest, EngineStats, SequenceOutput
from mega_serve.process.engine_process import LoadedEngine

# prompts that do something else
CRASH = 13  # the step raises
REFUSE = 14  # add raises
HANG = 15  # the step does not return
LOSE_RANK = 16  # the step finds that another rank has ended
MODEL = ModelInfo(name="echo", iteration=7, created=0, max_seq_len=4096, vocab_size=256, eod=0, bos=None)


@dataclass
class EchoCore:
    """An engine core whose sequences repeat the ids of their prompt until `max_tokens`."""

    step_seconds: float = 0.0
    max_num_seqs: int = 32
    running: dict[str, tuple[EngineRequest, int]] = field(default_factory=dict)
    generation_tokens: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[:1] == (REFUSE,):
            raise ValueError(f"no such thing: {request.prompt_token_ids}")
        self.running[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def step(self) -> Sequence[SequenceOutput]:
        time.sleep(self.step_seconds)
        outputs = []
        for request_id, (request, count) in list(self.running.items())[: self.max_num_seqs]:
            token = request.prompt_token_ids[count % len(request.prompt_token_ids)]
            if token == CRASH:
                raise RuntimeError(f"the model is broken: {request.prompt_token_ids}")
            if token == LOSE_RANK:
                raise RankConnectionError("rank 1 has ended")
            if token == HANG:
                time.sleep(3600)
            is_last = count + 1 == request.params.max_tokens
            for index in range(request.rows):
                outputs.append(
                    SequenceOutput(
                        request_id=request_id,
                        index=index,
                        token_ids=(token,),
                        text=chr(token),
                        finish_reason="length" if is_last else None,
                    )
                )
            self.generation_tokens += request.rows
            self.running[request_id] = (request, count + 1)
            if is_last:
                del self.running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            tokens_per_second=100.0,
            generation_tokens=self.generation_tokens,
            iteration=MODEL.iteration,
            last_step=time.monotonic(),
        )


def build_echo_engine(options: Mapping[str, Any]) -> LoadedEngine:
    """Make the engine, after `load_seconds`."""
    time.sleep(options.get("load_seconds", 0.0))
    if options.get("refuse"):
        raise ConfigError("--load", "no checkpoint", found="here")
    if options.get("lose_rank"):
        raise RankConnectionError("rank 1, at its start, got signal 9")
    if options.get("crash"):
        raise RuntimeError("cannot load")
    core = EchoCore(options.get("step_seconds", 0.0), options.get("max_num_seqs", 32))
    return LoadedEngine(core=core, model=MODEL)
