"""Options of the model that parallel ranks share: slopes and norms by head, an embedding that is normed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mega_model.mesh import World
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import same_as_one_process

TP2, PP2, CP2 = {"parallel__tp": 2}, {"parallel__pp": 2}, {"parallel__cp": 2}
SP = {"parallel__sequence": True}
DOCUMENTS = {"data__reset_positions": True, "data__reset_attention": True, "data__eod_mask_loss": True}
DROPOUT = {"train__hidden_dropout": 0.2, "train__attention_dropout": 0.2}
SELECTIVE = {"recompute__selective": True}
BLOOM = {"model__positions": "alibi", "model__embed_norm": True}
WINDOW = {"model__window": "4,0"}
HEAD_NORMS = {"model__qk_norm": True, "model__norm_1p": True}


def _cut(model: str, **values: object) -> Body:
    return partial(_compare, model, values)


def _compare(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    same_as_one_process(model, world, meet, folder, **values)


CASES: dict[int, dict[str, Body]] = {
    2: {
        "slopes_over_tensor_2": _cut("gpt", **BLOOM, **TP2),
        "slopes_over_tensor_2_sequence_with_dropout": _cut("gpt", **BLOOM, **DROPOUT, **TP2, **SP),
        "slopes_and_a_window_over_context_2": _cut("gpt", **BLOOM, **WINDOW, **DOCUMENTS, **CP2),
        "a_window_over_context_2": _cut("llama", **WINDOW, **CP2),
        "a_normed_embedding_over_pipeline_2": _cut("gpt", **BLOOM, **PP2),
        "a_normed_embedding_over_data_2_zero_3": _cut("gpt", **BLOOM, parallel__zero_stage=3),
        "head_norms_over_tensor_2": _cut("gpt", **HEAD_NORMS, **TP2),
        "head_norms_over_tensor_2_sequence": _cut("llama", **HEAD_NORMS, **TP2, **SP),
        "head_norms_of_one_key_head_over_tensor_2": _cut("llama", **HEAD_NORMS, model__kv_heads=1, **TP2),
        "biases_of_queries_alone_over_tensor_2": _cut(
            "llama", model__qkv_bias=True, model__rope_interleaved=True, **TP2
        ),
        "gates_of_gelu_over_tensor_2_sequence": _cut("gpt", model__glu="geglu", **TP2, **SP),
    },
    4: {
        "slopes_recomputed_over_tensor_2_context_2": _cut(
            "gpt", **BLOOM, **WINDOW, **SELECTIVE, **TP2, **CP2, **SP
        ),
        "head_norms_over_tensor_2_data_2_zero_3": _cut("gpt", **HEAD_NORMS, **TP2, parallel__zero_stage=3),
    },
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    return Outcomes(CASES, tmp_path_factory).of


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in CASES for case in CASES[ranks]])
def test_the_options_train_as_in_one_process(
    outcome: Callable[[int, str], str], ranks: int, case: str
) -> None:
    assert outcome(ranks, case) == ""
