"""Every layout trains like one process: float32, 1e-5."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mega_model.attention_backends import PackedAttention
from mega_model.context_parallel import token_positions
from mega_model.distributed.mesh import Axis, Mesh, World
from mega_schema.parallel_layout import Layout
from tests.parity.failing_saves import one_rank_cannot_write
from tests.parity.linear import fused_products, products
from tests.parity.ranks import Body, Outcomes
from tests.parity.runs import resumes, same_as_one_process, steps, trainer
from tests.selection import every_nth, requested_values


def _cut(model: str, **values: object) -> Body:
    return partial(_compare, model, values)


def _compare(model: str, values: dict[str, object], world: World, meet: str, folder: Path) -> None:
    same_as_one_process(model, world, meet, folder, **values)


def _half(world: World, meet: str, folder: Path) -> None:
    """In bfloat16 two ranks round differently from one: a hundredth of the loss, and it falls as fast."""
    values = {"train__bf16": True, "optimizer__lr": 3e-3}
    single = steps(trainer("llama", World(), meet, folder, **values), 20)
    run = trainer("llama", world, meet, folder, **TP2, **SP, **values)
    two = steps(run, 20)
    run.mesh.destroy()
    assert two == pytest.approx(single, rel=1e-2)
    assert two[-1] < 0.9 * two[0]


def _ends_stay_equal(world: World, meet: str, folder: Path) -> None:
    """The first stage's embedding and the last stage's tied head are one weight: not a bit apart."""
    run = trainer("gpt", world, meet, folder, **PP2)
    steps(run, 5)
    pp = run.mesh.pp
    (weight,) = (w.detach() for row, w in run.params if "embed.weight" in (row.name, row.tied_to))
    reduced = torch.empty_like(weight)
    pp.exchange([(weight, 1 - pp.rank)], [(reduced, 1 - pp.rank)])
    run.mesh.destroy()
    assert torch.equal(weight, reduced), f"apart by {(weight - reduced).abs().max():.1e}"


def _gives_up(world: World, meet: str, folder: Path) -> None:
    """A rank that waits for one that never comes gives up after the minutes asked for, on any axis."""
    mesh = Mesh.join(Layout(tp=2, pp=2), world, init_method=meet, timeout_minutes=1 / 60)
    waiting = {0: mesh.tp, 3: mesh.pp}.get(world.rank)
    if waiting is not None:
        try:
            with pytest.raises(RuntimeError, match="Timed out"):
                waiting.reduce(torch.ones(1))
        finally:
            (folder / f"{world.rank}").touch()
    while not all((folder / name).exists() for name in "03"):
        time.sleep(0.05)
    mesh.destroy()


def _attention(causal: bool, apart: bool, world: World, meet: str, folder: Path) -> None:
    """Rows shared by all ranks: what comes out, and the gradients, are the shares of one process's."""
    mesh = Mesh.join(Layout(cp=world.size), world, init_method=meet)
    rng = torch.Generator().manual_seed(5)
    rows, length = 2, 8 * world.size
    whole = [
        torch.randn(rows, length, heads, 8, generator=rng) for heads in (4, 2, 2, 4)
    ]  # q, k, v, gradient
    document_BS = torch.randint(0, 2, (rows, length), generator=rng).cumsum(1) if apart else None

    def run(cp: Axis) -> list[torch.Tensor]:
        mine_s = token_positions(length, cp)
        q, k, v, gradient = (x[:, mine_s].flatten(0, 1).clone().requires_grad_() for x in whole)
        out = PackedAttention(rows, length, document_BS, causal=causal, cp=cp)(0, q, k, v)
        out.backward(gradient)
        return [x.unflatten(0, (rows, -1)) for x in (out.detach(), q.grad, k.grad, v.grad)]

    mine_s = token_positions(length, mesh.cp)
    for share, single in zip(run(mesh.cp), run(Axis("cp")), strict=True):
        torch.testing.assert_close(share, single[:, mine_s], atol=1e-5, rtol=1e-5)
    mesh.destroy()


ATTENTION = {
    f"attention_{order}_over_context{documents}": partial(_attention, order == "causal", bool(documents))
    for order in ("causal", "both_ways")
    for documents in ("", "_with_documents_apart")
}
TP2 = {"parallel__tensor_model_parallel_size": 2}
PP2 = {"parallel__pipeline_model_parallel_size": 2}
SP = {"parallel__sequence_parallel": True}
CP2 = {"parallel__context_parallel_size": 2}
DOCUMENTS = {
    "data__reset_position_ids": True,
    "data__reset_attention_mask": True,
    "data__eod_mask_loss": True,
}
DROPOUT = {"train__hidden_dropout": 0.2, "train__attention_dropout": 0.2}
FULL = {"recompute__recompute_granularity": "full"}
SELECTIVE = {
    "recompute__recompute_activations": True,
    "recompute__recompute_modules": "core_attn layernorm mlp_act",
}
TIED = {"model__untie_embeddings_and_output_weights": False}
KEYS_2 = {"model__num_query_groups": 2}
CASES: dict[int, dict[str, Body]] = {
    2: {
        "products_of_two_ranks": products,
        "fused_products_of_two_ranks": fused_products,
        "bfloat16_on_two_ranks": _half,
        "tensor_parallel_2_gpt": _cut("gpt", **TP2),
        "tensor_parallel_2_llama": _cut("llama", **TP2),
        "tensor_parallel_2_untied_gpt": _cut("gpt", model__untie_embeddings_and_output_weights=True, **TP2),
        "sequence_parallel_2_gpt": _cut("gpt", **TP2, **SP),
        "sequence_parallel_2_llama": _cut("llama", **TP2, **SP),
        "one_key_head_on_two_ranks_gpt": _cut("gpt", model__num_query_groups=1, **TP2),
        "one_key_head_on_two_ranks_with_a_tied_llama": _cut(
            "llama", model__num_query_groups=1, **TIED, **TP2, **SP
        ),
        "pipeline_2_tied_gpt": _cut("gpt", **PP2),
        "pipeline_2_llama": _cut("llama", **PP2),
        "pipeline_2_with_one_micro_batch": _cut("gpt", batch__micro_batch_size=8, **PP2),
        "data_parallel_2_gpt": _cut("gpt", batch__micro_batch_size=2, data__eod_mask_loss=True),
        "data_parallel_2_llama": _cut("llama"),
        "context_parallel_2_gpt": _cut("gpt", **CP2),
        "context_parallel_2_llama": _cut("llama", batch__micro_batch_size=2, **CP2),
        "documents_apart_across_context_parallel_2": _cut(
            "gpt", batch__micro_batch_size=2, **DOCUMENTS, **CP2
        ),
        "dropout_over_tensor_2_sequence_gpt": _cut("gpt", **DROPOUT, **TP2, **SP),
        "dropout_over_tensor_2_llama": _cut("llama", **DROPOUT, **TP2),
        "dropout_over_context_2_documents_llama": _cut("llama", **DROPOUT, **DOCUMENTS, **CP2),
        "dropout_over_pipeline_2_gpt": _cut("gpt", batch__micro_batch_size=2, **DROPOUT, **PP2),
        "dropout_over_data_2_gpt": _cut("gpt", **DROPOUT),
        "resume_with_dropout_is_bitwise": partial(resumes, "gpt", CP2 | DROPOUT, CP2 | DROPOUT, True),
        "full_recomputation_over_tensor_2_sequence_gpt": _cut("gpt", **FULL, **DROPOUT, **TP2, **SP),
        "shares_kept_over_tensor_2_llama": _cut(
            "llama",
            **FULL,
            recompute__distribute_saved_activations=True,
            recompute__recompute_num_layers=2,
            **TP2,
        ),
        "block_recomputation_over_pipeline_2_llama": _cut(
            "llama", **FULL, recompute__recompute_method="block", **PP2
        ),
        "selective_recomputation_over_context_2_llama": _cut("llama", **SELECTIVE, **DROPOUT, **CP2),
        "documents_apart_with_tensor_parallel_2": _cut(
            "gpt",
            data__reset_position_ids=True,
            data__reset_attention_mask=True,
            data__eod_mask_loss=False,
            **TP2,
            **SP,
        ),
        "a_checkpoint_that_one_rank_cannot_write": one_rank_cannot_write,
        "resume_on_the_same_layout_is_bitwise": partial(resumes, "gpt", TP2, TP2, True),
        "resume_from_tensor_on_pipeline": partial(resumes, "gpt", TP2 | SP, PP2, False),
        "resume_from_pipeline_on_data": partial(resumes, "llama", PP2, {}, False),
    },
    4: {
        "products_of_four_ranks": products,
        "tensor_parallel_4_gpt": _cut("gpt", parallel__tensor_model_parallel_size=4),
        "sequence_parallel_4_llama": _cut("llama", parallel__tensor_model_parallel_size=4, **SP),
        "two_key_heads_on_four_ranks_llama": _cut(
            "llama", model__num_query_groups=2, parallel__tensor_model_parallel_size=4, **SP
        ),
        "one_key_head_on_two_ranks_with_stretches_on_two_replicas": _cut(
            "gpt", model__num_query_groups=1, parallel__zero_stage=2, batch__micro_batch_size=2, **TP2, **SP
        ),
        "resume_from_key_heads_repeated_on_them_apart": partial(
            resumes, "gpt", KEYS_2 | {"parallel__tensor_model_parallel_size": 4}, KEYS_2 | TP2, False
        ),
        "resume_with_key_heads_repeated_is_bitwise": partial(
            resumes,
            "gpt",
            KEYS_2 | {"parallel__tensor_model_parallel_size": 4},
            KEYS_2 | {"parallel__tensor_model_parallel_size": 4},
            True,
        ),
        "pipeline_4_tied_gpt": _cut("gpt", parallel__pipeline_model_parallel_size=4),
        "pipeline_4_uneven_llama": _cut(
            "llama", model__num_layers=5, parallel__pipeline_model_parallel_size=4, batch__micro_batch_size=2
        ),
        "tensor_2_pipeline_2_gpt": _cut("gpt", **TP2, **PP2, **SP),
        "tensor_2_data_2_llama": _cut("llama", **TP2),
        **ATTENTION,
        "dropout_over_context_2_tensor_2_sequence_gpt": _cut("gpt", **DROPOUT, **CP2, **TP2, **SP),
        "full_recomputation_over_context_2_pipeline_2_gpt": _cut("gpt", **FULL, **DROPOUT, **CP2, **PP2),
        "selective_recomputation_over_tensor_2_data_2_llama": _cut("llama", **SELECTIVE, **TP2, **SP),
        "context_parallel_4_llama": _cut("llama", parallel__context_parallel_size=4),
        "context_2_tensor_2_sequence_gpt": _cut("gpt", **CP2, **TP2, **SP),
        "context_2_pipeline_2_llama": _cut("llama", **CP2, **PP2),
        "context_2_data_2_documents_gpt": _cut("gpt", **DOCUMENTS, **CP2),
        "resume_from_tensor_2_pipeline_2_is_bitwise": partial(resumes, "gpt", TP2 | PP2, TP2 | PP2, True),
        "resume_from_tensor_2_pipeline_2_on_tensor_4": partial(
            resumes, "gpt", TP2 | PP2, {"parallel__tensor_model_parallel_size": 4}, False
        ),
        "a_rank_that_waits_in_vain_gives_up": _gives_up,
    },
    8: {
        "both_ends_of_a_tied_weight_over_data_4": _ends_stay_equal,
        "tensor_2_pipeline_2_data_2_gpt": _cut("gpt", **TP2, **PP2),
        "context_2_tensor_2_pipeline_2_documents_llama": _cut(
            "llama", **CP2, **TP2, **PP2, **SP, **DOCUMENTS
        ),
        "dropout_full_recomputation_and_two_stages_a_rank_gpt": _cut(
            "gpt",
            **CP2,
            **TP2,
            **PP2,
            **SP,
            **DOCUMENTS,
            **DROPOUT,
            **FULL,
            parallel__num_virtual_stages_per_pipeline_rank=2,
        ),
        "dropout_selective_recomputation_and_zero_bubble_llama": _cut(
            "llama",
            **CP2,
            **TP2,
            **PP2,
            **SP,
            **DROPOUT,
            **SELECTIVE,
            parallel__pipeline_schedule="zero-bubble",
        ),
        "tensor_2_pipeline_2_data_2_sequence_llama": _cut("llama", **TP2, **PP2, **SP),
    },
}


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], str]:
    return Outcomes(CASES, tmp_path_factory, requested_values(request, "case")).outcome


ALL = [(ranks, case) for ranks in CASES for case in CASES[ranks]]


@pytest.mark.parametrize(("ranks", "case"), every_nth(5, ALL))
def test_the_layout_trains_as_one_process_does(
    outcome: Callable[[int, str], str], ranks: int, case: str
) -> None:
    assert outcome(ranks, case) == ""
