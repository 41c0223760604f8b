"""A model served by several ranks gives the tokens and log-probabilities of one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_model.distributed.mesh import World
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, boxes_to_write
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import LayoutError
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import ModelSpec, gpt, llama
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_serve.engine.requests import BeamSearchParams, EngineRequest, SamplingParams
from mega_serve.execution.engine_factory import build_engine, run_worker
from mega_serve.process.engine_process import LoadedEngine
from tests.parity.ranks import Body, on_ranks

SPECS = {
    "gpt": gpt(layers=4, hidden=32, heads=4, vocab=131, max_seq_len=64, init_std=0.3, vocab_multiple=8),
    "llama": llama(
        layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=131, max_seq_len=64, vocab_multiple=8
    ),
}
Case = tuple[str, int, int, bool]  # model, tp, pp, whether it is batch-invariant
SHORT: tuple[Case, ...] = (("gpt", 2, 1, False), ("llama", 1, 2, False), ("llama", 2, 1, True))
ALL = tuple(
    (family, tp, pp, invariant)
    for family in SPECS
    for tp, pp in ((2, 1), (1, 2), (2, 2))
    for invariant in (False, True)
)
PROMPTS = ([5, 9, 13], [7] * 30, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 9, 13, 22, 8])


def save_checkpoint(run: Path, spec: ModelSpec) -> None:
    open_tokenizer("NullTokenizer", vocab_size=spec.vocab - 1).save(run / "tokenizer")
    rng = np.random.default_rng(3)

    def values(box: BoxToWrite) -> np.ndarray:
        return rng.normal(1.0 if "norm.weight" in box.name else 0.0, 0.3, box.slab.shape).astype(np.float32)

    save = CheckpointWriter(run, 1)
    save.begin()
    rows = [row for row in table(spec) if row.tied_to is None]
    boxes = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write(MODEL, 0, boxes, values)
    save.commit(spec, layout=WHOLE, trainer={}, tokenizer=run / "tokenizer")


def options(run: Path, tp: int, pp: int, *, invariant: bool = False) -> dict[str, Any]:
    # small steps cut the prompts into chunks; a small pool makes sequences wait and be preempted
    return {
        "load": str(run),
        "device": "cpu",
        "tp": tp,
        "pp": pp,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "kv_cache_memory": 512 * 1024,
        "speculative_tokens": 2,
        "batch_invariant": invariant,
    }


def answer(engine: LoadedEngine) -> dict[str, Any]:
    """Serve greedy, sampled, scored and beam requests, and return all tokens and log-probabilities."""
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(
            max_tokens=10, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        beams = BeamSearchParams(max_tokens=4, width=3)
        for params in (sampling, beams):
            request_id = f"{i} {type(params).__name__}"
            request = EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)
            engine.core.add(request)
    answers: dict[str, Any] = {}
    while engine.core.has_work:
        for output in engine.core.step():
            assert output.error is None
            key = f"{output.request_id} {output.index}"
            record = answers.setdefault(key, {"ids": [], "logprobs": []})
            record["ids"] += output.token_ids
            scores = [entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs) if entry]
            record["logprobs"] += scores if output.score is None else [output.score]
    return answers


def _serve(world: World, meet: str, folder: Path, *, run: Path, tp: int, pp: int, invariant: bool) -> None:
    values = {**options(run, tp, pp, invariant=invariant), "rendezvous": str(folder / "ranks")}
    if world.rank > 0:
        run_worker(values, world.rank)
        return
    engine = build_engine(values)
    (folder / "answers.json").write_text(json.dumps(answer(engine)))
    assert engine.close is not None
    engine.close()


def serve_on_ranks(folder: Path, cases: Sequence[Case]) -> dict[str, str]:
    """Serve the requests of each case; return the failures by case, and write the answers to the folder."""
    failures: dict[str, str] = {}
    for family in {family for family, *_ in cases}:
        save_checkpoint(folder / family, SPECS[family])
    for ranks in sorted({tp * pp for _, tp, pp, _ in cases}):
        bodies: dict[str, Body] = {
            f"{family} {tp} {pp} {invariant}": partial(
                _serve, run=folder / family, tp=tp, pp=pp, invariant=invariant
            )
            for family, tp, pp, invariant in cases
            if tp * pp == ranks
        }
        failures |= on_ranks(ranks, bodies, folder)
    return failures


def check_answers(folder: Path, cases: Sequence[Case], failures: dict[str, str]) -> None:
    """Compare each case with one process."""
    assert failures == dict.fromkeys(failures, "")
    for family, tp, pp, invariant in cases:
        expected = answer(build_engine(options(folder / family, 1, 1, invariant=invariant)))
        answers = json.loads((folder / f"{family} {tp} {pp} {invariant}" / "answers.json").read_text())
        assert answers.keys() == expected.keys()
        for key, record in expected.items():
            assert answers[key]["ids"] == list(record["ids"]), (family, tp, pp, key)
            tolerance = 0.0 if invariant else 1e-4
            np.testing.assert_allclose(answers[key]["logprobs"], record["logprobs"], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "cases",
    [SHORT, pytest.param(ALL, marks=pytest.mark.long)],
    ids=["two ranks", "all layouts"],
)
def test_ranks_give_the_tokens_and_log_probabilities_of_one_process(
    tmp_path: Path, cases: Sequence[Case]
) -> None:
    check_answers(tmp_path, cases, serve_on_ranks(tmp_path, cases))


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (4, 1, "--tp: does not divide the model's 2 key and value heads: found 4, wanted 1 | 2"),
        (1, 3, "--pp: does not divide the model's 4 layers: found 3, wanted 1 | 2 | 4"),
    ],
)
def test_a_layout_that_splits_a_head_or_a_layer_is_refused(
    tmp_path: Path, tp: int, pp: int, message: str
) -> None:
    save_checkpoint(tmp_path, SPECS["llama"])
    with pytest.raises(LayoutError) as caught:
        build_engine(options(tmp_path, tp, pp))
    assert str(caught.value) == message
