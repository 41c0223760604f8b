"""T5 learns and decodes pairs of texts on several ranks as in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_model.distributed.mesh import World
from mega_train.data.task_data import TaskReader
from mega_train.data.text2text import EncodedPairs
from mega_train.engine.greedy_decoding import decode_greedily
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import same_as_one_process, trainer
from tests.selection import named_cases

# samples are cut at 16 tokens; most are shorter
LENGTHS = {
    "batch__seq_length": 16,
    "encoder_data__decoder_seq_length": 24,
    "model__max_position_embeddings": 24,
}
TP = LENGTHS | {"parallel__tensor_model_parallel_size": 2}
SP = TP | {"parallel__sequence_parallel": True}
PP = LENGTHS | {"parallel__pipeline_model_parallel_size": 2}
SPLIT = PP | {"parallel__pipeline_model_parallel_split_rank": 1}
INTERLEAVED = PP | {"parallel__num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute__recompute_granularity": "full"}
DROPOUT = {"train__hidden_dropout": 0.1, "train__attention_dropout": 0.1}


def _trains_alike(values: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    same_as_one_process("text2text", world, meet, folder, **values)


def _decodes_alike(layout: dict[str, Any], world: World, meet: str, folder: Path) -> None:
    """All ranks decode the tokens of one process, for any guess."""
    outputs = []
    for size in (World(), world):
        values = (layout if size.size > 1 else LENGTHS) | {"model__init_method_std": 0.3}
        run = trainer("text2text", size, meet if size.size > 1 else "", folder, **values)
        reader = run.valid["dev-pairs"]
        assert isinstance(reader, TaskReader)
        assert isinstance(reader.samples, EncodedPairs)
        special = reader.samples.special
        guess = np.full((reader.batch, 24), special.end if size.size > 1 else 7, np.int64)
        next_tokens = partial(run.forward_backward.next_tokens, reader, 0)
        width = 4 * size.size
        outputs.append(decode_greedily(next_tokens, guess, start=special.start, end=special.end, width=width))
    run.mesh.destroy()
    assert outputs[1] == outputs[0]
    assert len({tuple(row) for row in outputs[0]}) > 1, outputs[0]


CASES: dict[int, dict[str, Body]] = {
    2: {
        "tensor_with_dropout": partial(_trains_alike, TP | DROPOUT),
        "sequence_with_dropout": partial(_trains_alike, SP | DROPOUT),
        "data_with_dropout": partial(_trains_alike, LENGTHS | DROPOUT),
        "pipeline": partial(_trains_alike, SPLIT),
        "interleaved_pipeline_with_dropout": partial(_trains_alike, INTERLEAVED | FULL | DROPOUT),
        "zero_3_with_full_recomputation": partial(
            _trains_alike, LENGTHS | FULL | {"parallel__zero_stage": 3}
        ),
        "decoding_over_tensor": partial(_decodes_alike, TP),
        "decoding_over_data": partial(_decodes_alike, LENGTHS),
        "decoding_over_interleaved_pipeline": partial(_decodes_alike, INTERLEAVED),
        "decoding_with_zero_3": partial(_decodes_alike, LENGTHS | {"parallel__zero_stage": 3}),
    },
    4: {
        "sequence_pipeline": partial(_trains_alike, SP | SPLIT | DROPOUT),
        "decoding_over_tensor_and_pipeline": partial(_decodes_alike, SP | SPLIT),
        "sequence_data": partial(_trains_alike, SP),
        "decoding_over_sequence_and_data": partial(_decodes_alike, SP),
    },
}
SHORT = {"sequence_pipeline", "decoding_over_tensor_and_pipeline", "data_with_dropout"}


@pytest.mark.parametrize(("ranks", "case"), named_cases(SHORT, CASES))
def test_text2text_over_several_ranks_is_as_in_one_process(outcomes: Outcomes, ranks: int, case: str) -> None:
    assert outcomes.outcome(ranks, case) == ""
