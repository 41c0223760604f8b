"""Beam search and greedy decoding of the engine against `mega_model.generate`, with a small random model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.generate import beam_search, generate
from mega_model.init import initial_values
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.spec import gpt
from mega_serve.engine.engine_core import EngineCore
from mega_serve.engine.interfaces import Chunk, RunnerOutput, SampledToken, SamplingRow
from mega_serve.engine.requests import BeamSearchParams, EngineRequest, SequenceOutput
from mega_serve.engine.scheduler import EngineConfig
from tests.engine_fakes import Clock, LetterDetokenizer, PageReadingRunner, letter_tokenizer, new_request

VOCAB, TOKENIZER_VOCAB, CONTEXT = 13, 11, 32
PROMPTS = [(5, 1, 9), (7,), (3, 3, 2, 8, 10, 4, 1), (1, 2)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    spec = gpt(layers=2, hidden=32, heads=4, vocab=VOCAB, max_seq_len=CONTEXT, init_std=0.3)
    model = build_model(Runtime.single_process(spec))
    fill_weights(model, initial_values(table(spec), seed=5))
    return model


class RecomputingRunner(PageReadingRunner):
    """Computes the logits of the whole context that it reads from the pages."""

    def __init__(self, model: Decoder, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages=num_pages, page_size=page_size, max_seq_len=CONTEXT)
        self.model = model

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> RunnerOutput:
        output = super().run(chunks)
        contexts: Any = output.logits
        rows = [
            self.model(torch.tensor(row), torch.arange(len(row)), PackedAttention(1, len(row)))[-1, :VOCAB]
            for row in contexts
        ]
        return RunnerOutput(torch.stack(rows) if rows else torch.empty(0, VOCAB), output.scores)


class ArgmaxSampler:
    def sample(self, logits: Any, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        return [SampledToken(token) for token in logits[:, :TOKENIZER_VOCAB].argmax(-1).tolist()]

    def top_logprobs(
        self, logits: Any, count: int, banned: Sequence[int | None]
    ) -> list[list[tuple[int, float]]]:
        logits_BV: Tensor = logits.clone()
        for row, token_id in enumerate(banned):
            if token_id is not None:
                logits_BV[row, token_id] = -1e10
        top = logits_BV.log_softmax(-1)[:, :TOKENIZER_VOCAB].topk(min(count, TOKENIZER_VOCAB))
        return [
            list(zip(ids, values, strict=True))
            for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]


def open_core(
    model: Decoder, *, num_pages: int, page_size: int, config: EngineConfig
) -> tuple[EngineCore, RecomputingRunner]:
    runner = RecomputingRunner(model, num_pages, page_size)
    core = EngineCore(
        runner,
        letter_tokenizer(),
        ArgmaxSampler(),
        config,
        clock=Clock(),
        detokenizer_factory=LetterDetokenizer,
        draw_seed=lambda: 1,
    )
    return core, runner


def finish_all(core: EngineCore) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check_pages()
    return outputs


def check_beams(model: Decoder, request: EngineRequest, outputs: list[SequenceOutput]) -> None:
    params = request.params
    assert isinstance(params, BeamSearchParams)
    expected = beam_search(
        model,
        request.prompt_token_ids,
        new_tokens=params.max_tokens,
        width=params.width,
        stop=params.stop_token_id,
        length_penalty=params.length_penalty,
        banned_bigram=params.banned_bigram,
        vocab_limit=TOKENIZER_VOCAB,
    )
    assert [output.index for output in outputs] == list(range(params.width))
    hypotheses = [output for output in outputs if output.score is not None]
    assert [[*request.prompt_token_ids, *output.token_ids] for output in hypotheses] == [
        beam.row for beam in expected
    ]
    assert [output.score for output in hypotheses] == pytest.approx([beam.score for beam in expected])
    for output in hypotheses:
        is_stopped = output.token_ids[-1] == params.stop_token_id
        assert output.finish_reason == ("stop" if is_stopped else "length")
        assert output.stop_reason == (params.stop_token_id if is_stopped else None)


def test_beams_are_those_of_the_plain_beam_search_in_any_mix(model: Decoder) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        page_size = rng.choice([1, 2, 4])
        config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=rng.choice([6, 9, 30]))
        num_pages = rng.choice([68, 100]) // page_size  # few, so that beams are preempted
        core, _ = open_core(model, num_pages=num_pages, page_size=page_size, config=config)
        requests = []
        for number in range(4):
            params = BeamSearchParams(
                max_tokens=rng.choice([1, 2, 6, 9]),
                width=rng.randint(1, 4),
                length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0]),
                stop_token_id=rng.choice([None, *range(6)]),
                banned_bigram=rng.choice([None, (rng.randrange(11), rng.randrange(11))]),
            )
            prompt = rng.choice(PROMPTS)
            requests.append(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
            core.add(requests[-1])
            core.add(new_request(f"greedy {number}", rng.choice(PROMPTS), max_tokens=5))
        outputs = finish_all(core)
        assert core.pool.held_pages == 0
        for request in requests:
            check_beams(model, request, outputs[request.request_id])


def test_beams_that_are_preempted_are_the_same(model: Decoder) -> None:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)
    core, _ = open_core(model, num_pages=22, page_size=2, config=config)
    params = BeamSearchParams(max_tokens=14, width=3, stop_token_id=2)
    request = EngineRequest(request_id="beams", prompt_token_ids=PROMPTS[0], params=params, priority=1)
    core.add(request)
    for _ in range(6):
        core.step()
    for number in range(3):
        core.add(new_request(str(number), PROMPTS[2], max_tokens=16, ignore_eos=True))
    outputs = finish_all(core)
    assert core.stats().preemptions > 0
    check_beams(model, request, outputs["beams"])


def test_more_beams_than_the_vocabulary_has_words_give_outputs_without_a_score(model: Decoder) -> None:
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=16)
    core, _ = open_core(model, num_pages=64, page_size=4, config=config)
    params = BeamSearchParams(max_tokens=1, width=TOKENIZER_VOCAB + 3)
    request = EngineRequest(request_id="a", prompt_token_ids=PROMPTS[0], params=params)
    core.add(request)
    outputs = finish_all(core)["a"]
    check_beams(model, request, outputs)
    assert [output.score is None for output in outputs] == [False] * TOKENIZER_VOCAB + [True] * 3


def test_an_aborted_beam_search_gives_its_open_beams(model: Decoder) -> None:
    core, _ = open_core(model, num_pages=64, page_size=4, config=EngineConfig())
    params = BeamSearchParams(max_tokens=9, width=3)
    core.add(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[0], params=params))
    for _ in range(3):
        core.step()
    outputs = core.abort("a")
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(2, "abort")] * 3
    assert core.pool.held_pages == 0


def test_beams_share_the_pages_of_their_prompt(model: Decoder) -> None:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32)
    core, _ = open_core(model, num_pages=64, page_size=4, config=config)
    params = BeamSearchParams(max_tokens=3, width=4)
    core.add(EngineRequest(request_id="a", prompt_token_ids=(1,) * 21, params=params))
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.pool.held_pages)
    assert 5 < most <= 5 + 4


def test_greedy_sequences_in_a_mixed_batch_equal_the_plain_loop(model: Decoder) -> None:
    for speculative_tokens in (0, 3):
        config = EngineConfig(
            max_num_seqs=3,
            max_num_batched_tokens=7,
            speculative_tokens=speculative_tokens,
            min_ngram=1,
            max_ngram=2,
        )
        core, runner = open_core(model, num_pages=16, page_size=4, config=config)
        for number, prompt in enumerate(PROMPTS):
            core.add(new_request(str(number), prompt, max_tokens=20, ignore_eos=True))
        outputs = finish_all(core)
        for number, prompt in enumerate(PROMPTS):
            rows = generate(model, [prompt], new_tokens=20, top_k=1, vocab_limit=TOKENIZER_VOCAB).rows
            new = [token_id for output in outputs[str(number)] for token_id in output.token_ids]
            assert [*prompt, *new] == rows[0]
        is_speculated = any(len(output.token_ids) > 1 for rows in outputs.values() for output in rows)
        assert is_speculated == bool(speculative_tokens)
