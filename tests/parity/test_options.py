"""Options on parallel ranks: ALiBi slopes and norms per head, embedding norm, matrix optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mega_model.batch_invariant_attention import BatchInvariantAttention
from mega_model.distributed.mesh import World
from mega_model.kernels.dispatch import choose_kernels
from mega_model.kernels.numba import load_kernels
from tests.parity.linear import fp8_products
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import resumes, same_as_one_process, steps, trainer
from tests.selection import every_nth, requested_values

TP2, PP2, CP2 = (
    {"parallel__tensor_model_parallel_size": 2},
    {"parallel__pipeline_model_parallel_size": 2},
    {"parallel__context_parallel_size": 2},
)
SP = {"parallel__sequence_parallel": True}
DOCUMENTS = {
    "data__reset_position_ids": True,
    "data__reset_attention_mask": True,
    "data__eod_mask_loss": True,
}
DROPOUT = {"train__hidden_dropout": 0.2, "train__attention_dropout": 0.2}
SELECTIVE = {"recompute__recompute_activations": True}
BLOOM = {"model__position_embedding_type": "alibi", "model__embed_layernorm": True}
WINDOW = {"model__window_size": "4,0"}
SGD = {"optimizer__optimizer": "sgd", "optimizer__lr": 0.1, "optimizer__weight_decay": 0.1}
MUON = {"optimizer__optimizer": "muon", "optimizer__weight_decay": 0.1}
NEOX = {
    "model__parallel_residual": True,
    "model__position_embedding_type": "rope",
    "model__rotary_percent": 0.5,
}
# widths of which every share is a multiple of 16
FP8 = {"train__bf16": True, "train__fp8_format": "hybrid", "model__ffn_hidden_size": 64}
HEAD_NORMS = {"model__qk_layernorm": True, "model__apply_layernorm_1p": True}


def _cut(model: str, **values: object) -> Body:
    return partial(_compare, model, values)


def _compare(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _check_compiled(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    """By torch.compile, here without a compiler behind it, on ranks; and as it is in one process."""
    single = steps(trainer(model, World(), "", folder), 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mega_train.engine.trainer.choose_kernels", partial(choose_kernels, backend="aot_eager")
        )
        run = trainer(model, world, meet, folder, train__kernels="compile", **values)
    ranks = steps(run, 3)
    run.mesh.destroy()
    assert run.kernel_choice.sources["swiglu"] == "compile"
    assert ranks == pytest.approx(single, rel=1e-5)


def _fp8(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    """In bfloat16 ranks round differently from one: a hundredth of the loss, as without FP8."""
    single = steps(trainer(model, World(), "", folder, **FP8), 8)
    run = trainer(model, world, meet, folder, **FP8, **values)
    ranks = steps(run, 8)
    run.mesh.destroy()
    assert ranks == pytest.approx(single, rel=1e-2)
    assert ranks[-1] < 0.95 * ranks[0]


def _same_bits(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    """Every token's log-probability has the bits of one process, and a step has its loss."""
    invariant = values | {"train__batch_invariant": True}
    single = trainer(
        model, World(), "", folder, **{k: v for k, v in invariant.items() if k[:8] != "parallel"}
    )
    run = trainer(model, world, meet, folder, **invariant)
    token = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(world.size))
    losses = []
    for process in (single, run):
        attend = BatchInvariantAttention(load_kernels(), 2, 16)
        position = torch.arange(16).repeat(2)
        (decoder,) = process.models
        losses.append(decoder.token_losses(token[:, :-1].flatten(), position, attend, token[:, 1:].flatten()))
    assert torch.equal(*losses)
    assert float(losses[0].min()) < float(losses[0].max())
    ranks = steps(run, 3)
    run.mesh.destroy()
    tolerance = 1e-2 if values.get("train__bf16") else 1e-5
    assert ranks == pytest.approx(steps(single, 3), rel=tolerance)


CASES: dict[int, dict[str, Body]] = {
    2: {
        "the_bits_of_one_process_over_tensor_2": partial(_same_bits, "gpt", {**BLOOM, **TP2, **SP}),
        "the_bits_of_one_process_over_tensor_2_bf16": partial(
            _same_bits, "llama", {**TP2, "train__bf16": True}
        ),
        "sgd_over_data_2_zero_1": _cut("gpt", **SGD, parallel__zero_stage=1),
        "compiled_over_tensor_2_sequence_gpt": partial(_check_compiled, "gpt", TP2 | SP),
        "compiled_over_pipeline_2_llama": partial(_check_compiled, "llama", PP2),
        "muon_over_tensor_2_sequence": _cut("llama", **MUON, **TP2, **SP),
        "muon_over_data_2": _cut("gpt", **MUON),
        "muon_over_data_2_zero_1": _cut("llama", **MUON, parallel__zero_stage=1),
        "muon_over_data_2_zero_3": _cut("gpt", **MUON, parallel__zero_stage=3),
        "resume_of_sgd_is_bitwise": partial(resumes, "gpt", {**SGD, **TP2}, {**SGD, **TP2}, True),
        "resume_of_muon_is_bitwise": partial(
            resumes, "gpt", MUON | {"parallel__zero_stage": 1}, MUON | {"parallel__zero_stage": 1}, True
        ),
        "slopes_over_tensor_2": _cut("gpt", **BLOOM, **TP2),
        "slopes_over_tensor_2_sequence_with_dropout": _cut("gpt", **BLOOM, **DROPOUT, **TP2, **SP),
        "slopes_and_a_window_over_context_2": _cut("gpt", **BLOOM, **WINDOW, **DOCUMENTS, **CP2),
        "a_window_over_context_2": _cut("llama", **WINDOW, **CP2),
        "a_normed_embedding_over_pipeline_2": _cut("gpt", **BLOOM, **PP2),
        "a_normed_embedding_over_data_2_zero_3": _cut("gpt", **BLOOM, parallel__zero_stage=3),
        "branches_beside_each_other_over_tensor_2_sequence_with_dropout": _cut(
            "gpt", **NEOX, **DROPOUT, **TP2, **SP
        ),
        "branches_beside_each_other_over_pipeline_2_computed_again": _cut(
            "gpt", **NEOX, **PP2, recompute__recompute_granularity="full"
        ),
        "head_norms_over_tensor_2": _cut("gpt", **HEAD_NORMS, **TP2),
        "head_norms_over_tensor_2_sequence": _cut("llama", **HEAD_NORMS, **TP2, **SP),
        "head_norms_of_one_key_head_over_tensor_2": _cut(
            "llama", **HEAD_NORMS, model__num_query_groups=1, **TP2
        ),
        "biases_of_queries_alone_over_tensor_2": _cut(
            "llama", model__add_qkv_bias=True, model__rotary_interleaved=True, **TP2
        ),
        "products_in_fp8": fp8_products,
        "fp8_over_tensor_2": partial(_fp8, "gpt", TP2),
        "fp8_over_tensor_2_sequence": partial(_fp8, "llama", TP2 | SP),
        "fp8_over_pipeline_2_zero_bubble": partial(
            _fp8, "gpt", PP2 | {"parallel__pipeline_schedule": "zero-bubble"}
        ),
        "fp8_over_data_2_zero_1": partial(_fp8, "gpt", {"parallel__zero_stage": 1}),
        "fp8_over_data_2_zero_3": partial(_fp8, "llama", {"parallel__zero_stage": 3}),
        "resume_of_fp8_over_tensor_2_is_bitwise": partial(resumes, "gpt", FP8 | TP2, FP8 | TP2, True),
        "gates_of_gelu_over_tensor_2_sequence": _cut("gpt", model__glu_activation="geglu", **TP2, **SP),
    },
    4: {
        "the_bits_of_one_process_over_tensor_4": partial(
            _same_bits, "llama", {"parallel__tensor_model_parallel_size": 4}
        ),
        "the_bits_of_one_process_over_tensor_4_sequence_bf16": partial(
            _same_bits, "gpt", {"parallel__tensor_model_parallel_size": 4, **SP, "train__bf16": True}
        ),
        "muon_over_tensor_2_data_2_zero_2": _cut("gpt", **MUON, **TP2, parallel__zero_stage=2),
        "muon_over_pipeline_2_data_2_zero_1_bucket": _cut(
            "gpt", **MUON, **PP2, parallel__zero_stage=1, parallel__ddp_bucket_size=3000
        ),
        "muon_of_repeated_key_heads_over_tensor_4": _cut(
            "llama", **MUON, model__num_query_groups=2, parallel__tensor_model_parallel_size=4
        ),
        "muon_over_context_2_data_2_zero_1": _cut("gpt", **MUON, **CP2, parallel__zero_stage=1),
        "resume_of_muon_from_tensor_4_on_data_4": partial(
            resumes,
            "llama",
            {**MUON, "parallel__tensor_model_parallel_size": 4},
            {**MUON, "parallel__zero_stage": 1},
            False,
        ),
        "slopes_recomputed_over_tensor_2_context_2": _cut(
            "gpt", **BLOOM, **WINDOW, **SELECTIVE, **TP2, **CP2, **SP
        ),
        "head_norms_over_tensor_2_data_2_zero_3": _cut("gpt", **HEAD_NORMS, **TP2, parallel__zero_stage=3),
    },
}


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], str]:
    return Outcomes(CASES, tmp_path_factory, requested_values(request, "case")).outcome


ALL = [(ranks, case) for ranks in CASES for case in CASES[ranks]]


@pytest.mark.parametrize(("ranks", "case"), every_nth(3, ALL))
def test_the_options_train_as_in_one_process(
    outcome: Callable[[int, str], str], ranks: int, case: str
) -> None:
    assert outcome(ranks, case) == ""
