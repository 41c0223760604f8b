"""The planner against its sources: published tables, the parameter table, schedules' own tables."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.plan import Prediction, median, predictions
from bench.published_other_runs import LLAMA_405B, META, OTHERS
from bench.published_runs import FP16_GRADIENTS, PUBLISHED, model
from mega_schema.arch import table
from mega_schema.errors import ConfigError, LayoutError, MegaError
from mega_schema.parallel_layout import Layout, Stage, split_layers
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import ModelSpec, gpt, llama
from mega_train.config.parallel import ScheduleName
from mega_train.pipeline.schedules import SCHEDULES, Backward, PipelineShape
from mega_train.planning.activations import layers_bytes
from mega_train.planning.communication import comm_volume
from mega_train.planning.estimate import estimate
from mega_train.planning.flops import hardware_flops, model_flops, parameters
from mega_train.planning.hardware import HARDWARE
from mega_train.planning.memory import micro_batches_in_flight, peak_rank, rank_memory
from mega_train.planning.roofline import MicroBatchCost
from mega_train.planning.search import search
from mega_train.planning.sharded_sizes import ShardedModel
from mega_train.planning.workload import BF16, FLOAT32, FP8, Implementation, Precision, Workload
from tests.pipeline_simulator import PassCosts, simulate

GPT = gpt(layers=8, hidden=64, heads=4, vocab=1000, max_seq_len=32)
FREE = replace(HARDWARE["a100"], network=1e18, nvlink=1e18)  # transfers take no time
SLOW = replace(HARDWARE["a100"], network=2e9, nvlink=2e9)
LLAMA = llama(layers=7, hidden=64, heads=8, kv_heads=4, ffn=160, vocab=1000, max_seq_len=32)
PIPES = [
    PipelineShape(p, v, m)
    for p in (1, 2, 4, 5)
    for v in (1, 2, 3)
    for m in (1, 2, 4, 7, 12)
    if p > 1 or v == 1
]

# with rounds of unequal length a table takes a little longer than the closed form says
EVEN = [p for p in PIPES if p.micros >= p.ranks and (p.chunks == 1 or p.micros % p.ranks == 0)]


def job(spec: ModelSpec = GPT, layout: Layout | None = None, **options: object) -> Workload:
    values = {"seq_length": spec.max_seq_len, "micro_batch_size": 1, "global_batch_size": 16, **options}
    return Workload(model=ShardedModel.from_layout(spec, layout or Layout()), **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def all_predictions() -> list[Prediction]:
    return predictions()


def test_published_utilisations_are_met_and_those_held_out_as_well(all_predictions: list[Prediction]) -> None:
    tables = {p.row.table for p in all_predictions}
    assert tables == {"2021", "2022", "2024"}
    for year in tables:
        assert median([p.error for p in all_predictions if p.row.table == year]) < 0.12
    held_out = [p.error for p in all_predictions if not p.row.fitted]
    assert len(held_out) > len(all_predictions) / 2
    assert median(held_out) < 0.06
    assert max(map(abs, held_out)) < 0.15


def test_published_runs_fitted_the_memory_they_ran_in(all_predictions: list[Prediction]) -> None:
    assert [p.row.name for p in all_predictions if not p.estimate.fits] == []


def test_runs_of_other_teams_are_scored_apart_and_nothing_was_fitted_to_them() -> None:
    others = predictions(OTHERS)
    assert len({(p.row.table, p.row.name) for p in others}) == len(others) >= 18
    assert not any(p.row.fitted for p in others)
    assert all(p.row.software for p in others)
    assert median([p.error for p in others]) < 0.08  # docs/howto/plan.md says which


@pytest.mark.parametrize(("dp", "total"), [(64, 75.9), (128, 69.5)])
def test_llama_405b_fits_80_gb_cards_with_the_layers_published_for_each_stage(dp: int, total: float) -> None:
    """arXiv:2407.21783 table 4: 32 or 16 micro-batches, and no recomputation."""
    layers = split_layers(126, pp=16, vp=8, embedding=True, head=True)
    workload = job(
        LLAMA_405B, Layout(tp=8, pp=16, dp=dp, vp=8, layers_per_stage=layers), seq_length=8192,
        global_batch_size=2048, sequence=True, zero=2, implementation=META,
    )  # fmt: skip
    assert peak_rank(workload).total < HARDWARE["h100"].memory
    assert peak_rank(workload).total / 2**30 == pytest.approx(total, abs=0.05)
    kept_by_reference_kernels = peak_rank(replace(workload, implementation=replace(META, fused=False))).total
    assert kept_by_reference_kernels > 80 * 2**30


def test_a_freed_stage_input_is_one_activation_of_every_stage_that_keeps_layers() -> None:
    workload, frees = job(LLAMA), Implementation(frees_stage_inputs=True)
    freed = replace(workload, implementation=frees)
    input_bytes = 32 * 64 * 2
    assert (
        layers_bytes(workload, Stage(0, 1, range(3))) - layers_bytes(freed, Stage(0, 1, range(3)))
        == input_bytes
    )
    for policy, layers in ((RecomputePolicy(), 0), (RecomputePolicy("full"), 3)):
        jobs = [replace(variant, recompute=policy) for variant in (workload, freed)]
        assert len({layers_bytes(variant, Stage(0, 1, range(layers))) for variant in jobs}) == 1


def test_sends_that_block_double_the_transfers_of_a_stage_and_not_the_bubble() -> None:
    spec = replace(GPT, tied=False)
    duplex = job(spec, Layout(pp=4, dp=2))
    blocking = replace(duplex, implementation=Implementation(duplex_p2p=False))
    both, blocking_seconds = (estimate(variant, HARDWARE["a100"]).seconds for variant in (duplex, blocking))
    assert both.pp > 0
    assert blocking_seconds.pp == pytest.approx(2 * both.pp)
    assert blocking_seconds.bubble == both.bubble


@pytest.mark.parametrize("pipe", [p for p in PIPES if p.chunks > 1 and p.micros % p.ranks == 0], ids=str)
def test_interleaved_stages_finish_a_round_apart(pipe: PipelineShape) -> None:
    """What the planner hides the sums of gradients behind."""
    for rank in range(pipe.ranks):
        passes = [a.chunk for a in SCHEDULES["1f1b"](pipe, rank) if isinstance(a, Backward)]
        last = [len(passes) - 1 - passes[::-1].index(chunk) for chunk in range(pipe.chunks)]
        assert [before - after for before, after in pairwise(last)] == [pipe.ranks] * (pipe.chunks - 1)


def test_interleaved_stages_hide_sums_of_gradients_that_one_micro_batch_cannot() -> None:
    spec = gpt(layers=32, hidden=4096, heads=32, vocab=51200, max_seq_len=2048)
    machine = replace(HARDWARE["a100"], nvlink=3e10)

    def exposed_seconds(vp: int, software: Implementation) -> float:
        workload = job(spec, Layout(pp=4, dp=8, vp=vp), zero=1, global_batch_size=64, implementation=software)
        return estimate(workload, machine).seconds.dp

    hides = Implementation(overlaps_reduce=True, overlaps_gather=True)
    seconds = [exposed_seconds(vp, hides) for vp in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < seconds[-1] < seconds[0] / 2
    assert exposed_seconds(1, Implementation()) == exposed_seconds(8, Implementation()) > seconds[0]


def test_an_interleaved_pipeline_that_does_not_receive_ahead_waits_while_it_fills_and_drains() -> None:
    """For vp p - 1 passes each way, however many micro-batches follow."""
    waits = Implementation(overlaps_pp_fill=False)
    for samples in (8, 64):
        workload = job(
            replace(GPT, tied=False), Layout(pp=4, vp=2), global_batch_size=samples, implementation=waits
        )
        seconds = estimate(workload, SLOW).seconds
        transfer_seconds = 32 * 64 * 2 / SLOW.link_bandwidth(2, 1)
        assert seconds.pp == pytest.approx(2 * 7 * transfer_seconds)
        assert estimate(replace(workload, implementation=Implementation()), SLOW).seconds.pp == 0


def test_eager_kernels_are_slower_where_a_definition_is_many_operations() -> None:
    for spec, slower in ((GPT, False), (LLAMA, True)):
        fused, eager = (
            estimate(job(spec, implementation=Implementation(eager=on)), HARDWARE["h100"]).seconds
            for on in (False, True)
        )
        assert (eager.stream > 2 * fused.stream) == slower
        assert (eager.stream == fused.stream) != slower
        assert (eager.gemm, eager.attention) == (fused.gemm, fused.attention)


def test_an_encoder_computes_the_scores_of_later_tokens_too() -> None:
    encoder = replace(GPT, family="bert", causal=False)
    causal, both_ways = (estimate(job(spec), HARDWARE["h100"]).seconds for spec in (GPT, encoder))
    assert both_ways.attention == pytest.approx(2 * causal.attention)
    assert both_ways.gemm == causal.gemm


def test_flash_attention_2_is_slower_than_kernels_for_hopper_on_hopper_alone() -> None:
    old = Implementation(attention="flash-2")
    for name, share in (("a100", 1), ("h100", 0.45 / 0.35), ("h200", 0.45 / 0.35)):
        workload = job(LLAMA)
        new, two = (
            estimate(variant, HARDWARE[name]).seconds.attention
            for variant in (workload, replace(workload, implementation=old))
        )
        assert two == pytest.approx(share * new)
    assert rank_memory(job(LLAMA, implementation=old), 0) == rank_memory(job(LLAMA), 0)


def test_layers_multiply_in_fp8_and_the_head_does_not() -> None:
    spec = llama(layers=4, hidden=4096, heads=32, ffn=14336, vocab=32000, max_seq_len=4096)
    machine = HARDWARE["h100"]
    half, fp8 = (MicroBatchCost.from_workload(job(spec, precision=p), machine) for p in (BF16, FP8))
    assert 1.6 < half.layer.gemm / fp8.layer.gemm < 2
    assert (fp8.head, fp8.layer.attention) == (half.head, half.layer.attention)
    assert rank_memory(job(spec, precision=FP8), 0) == rank_memory(job(spec), 0)


def test_fp8_on_gpus_without_it_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--fp8-format: .*A100.*wanted h100, h200"):
        estimate(job(precision=FP8), HARDWARE["a100"])


def test_gradients_reduced_by_the_round_wait_for_it_in_memory() -> None:
    layout = Layout(pp=2, dp=2, vp=2)
    variant = job(layout=layout, zero=2, global_batch_size=32)
    rounds = replace(variant, implementation=Implementation(reduces_by_round=True))
    assert (variant.reductions, rounds.reductions) == (16, 8)
    assert comm_volume(rounds).dp < comm_volume(variant).dp
    assert rank_memory(rounds, 0).gradients > rank_memory(variant, 0).gradients
    # the gradients that are on their way are those that waited
    assert rank_memory(variant, 0).buffers - rank_memory(rounds, 0).buffers == rounds.model.elements[0] * 4


@pytest.mark.parametrize(
    ("precision", "alone", "whole", "shared"),
    [(FP16_GRADIENTS, 20, 4, 16), (BF16, 18, 6, 12), (FLOAT32, 16, 8, 8)],
)
@pytest.mark.parametrize("d", [1, 2, 3, 8, 64])
def test_bytes_per_parameter_are_those_of_megatrons_table(
    precision: Precision, alone: int, whole: int, shared: int, d: int
) -> None:
    assert sum(precision.bytes_per_param(0, d)) == alone
    assert sum(precision.bytes_per_param(1, d)) == whole + shared / d
    for zero in (0, 1, 2, 3):
        memory = rank_memory(job(layout=Layout(dp=d), precision=precision, zero=zero, global_batch_size=d), 0)
        n = parameters(GPT) + 24 * 64  # padding of the vocabulary
        actual = memory.weights + memory.gradients + memory.optimizer
        assert actual == pytest.approx(n * sum(precision.bytes_per_param(zero, d)), abs=3)


@pytest.mark.parametrize("row", PUBLISHED[:11], ids=lambda row: row.name)
def test_flops_are_those_of_the_papers_closed_forms(row: object) -> None:
    workload = row.job  # type: ignore[attr-defined]
    m, s, b = workload.spec, workload.seq_length, workload.global_batch_size
    a, v = s / (6 * m.hidden), m.vocab / (m.layers * m.hidden)
    unit = b * s * m.layers * m.hidden**2
    assert model_flops(workload) == pytest.approx(72 * unit * (1 + a + v / 12))  # arXiv:2205.05198 eq. 7
    assert hardware_flops(workload) == pytest.approx(96 * unit * (1 + a + v / 16))  # arXiv:2104.04473 eq. 3


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("granularity", [None, "selective", "full"])
def test_activations_are_those_of_the_paper_with_scores_and_dropout(
    t: int, sequence: bool, granularity: str | None
) -> None:
    """arXiv:2205.05198 table 2; it leaves out the norms' statistics."""
    spec = model(48, 6144, 64)
    workload = job(
        spec, Layout(tp=t), sequence=sequence, recompute=RecomputePolicy(granularity),  # type: ignore[arg-type]
        precision=FP16_GRADIENTS, implementation=Implementation(attention="scores", keeps_masks=True),
    )  # fmt: skip
    s, h, a = 2048, 6144, 64
    outer = t if sequence else 1
    wanted = {
        None: s * h * (10 / outer + 24 / t + 5 * a * s / (h * t)),
        "selective": s * h * (10 / outer + 24 / t),
        "full": 2 * s * h / outer,
    }[granularity]
    assert layers_bytes(workload, Stage(0, 1, range(1))) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        (RecomputePolicy("full"), 7),
        (RecomputePolicy("full", "uniform", 3), 3),
        (RecomputePolicy("full", distribute_saved=True), 7 / 4),
        (RecomputePolicy("full", "block", 7), 7),
    ],
)
def test_of_layers_computed_again_only_what_enters_a_group_is_kept(
    policy: RecomputePolicy, parts: float
) -> None:
    workload = job(LLAMA, Layout(tp=4), recompute=policy)
    assert layers_bytes(workload, Stage(0, 1, range(7))) == parts * 32 * 64 * 2


def test_the_first_layers_of_a_stage_computed_again_take_a_part_of_the_time_and_the_memory() -> None:
    jobs = [job(LLAMA, recompute=RecomputePolicy("full", "block", n)) for n in range(1, 8)]
    activations = [rank_memory(workload, 0).activations for workload in jobs]
    assert activations == sorted(activations, reverse=True)
    flops = [hardware_flops(workload) for workload in jobs]
    seconds = [estimate(workload, HARDWARE["h100"]).seconds.step for workload in jobs]
    for costs in (flops, seconds):
        assert costs == sorted(costs)
        steps = [b - a for a, b in pairwise(costs)]
        assert steps == pytest.approx([steps[0]] * 6)
    assert hardware_flops(jobs[-1]) == hardware_flops(job(LLAMA, recompute=RecomputePolicy("full")))


@pytest.mark.parametrize("spec", [GPT, LLAMA, replace(GPT, tied=False)], ids=["gpt", "llama", "untied"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=3, vp=2), Layout(pp=7), Layout(dp=2)])
def test_the_weights_of_all_stages_are_the_whole_model(spec: ModelSpec, layout: Layout) -> None:
    elements = ShardedModel.from_layout(spec, layout).elements
    padded = sum(math.prod(row.local_shape(1)) for row in table(spec) if row.tied_to is None)
    copies = (
        math.prod(ShardedModel.from_layout(spec, layout).shares.head) if spec.tied and layout.pp > 1 else 0
    )
    assert len(elements) == layout.pp
    assert sum(elements) == padded + copies


@pytest.mark.parametrize("spec", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_more_tensor_parallelism_never_needs_more_weights_or_activations(spec: ModelSpec, pp: int) -> None:
    before = peak_rank(job(spec, Layout(pp=pp)))
    for tp in (2, 4):
        now = peak_rank(job(replace(spec, vocab_multiple=1), Layout(tp=tp, pp=pp), sequence=True))
        assert now.weights < before.weights
        assert now.activations < before.activations
        before = now


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_are_those_of_the_schedules_tables(schedule: ScheduleName) -> None:
    for pipe in PIPES:
        layout = Layout(pp=pipe.ranks, vp=pipe.chunks)
        workload = job(replace(GPT, layers=30), layout, global_batch_size=pipe.micros, schedule=schedule)
        timeline = simulate([SCHEDULES[schedule](pipe, rank) for rank in range(pipe.ranks)], pipe)
        for rank in range(pipe.ranks):
            assert sum(micro_batches_in_flight(workload, rank)) == timeline.micro_batches_in_flight(rank), (
                pipe,
                rank,
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipe", EVEN, ids=str)
def test_the_bubble_is_that_of_the_schedules_tables(schedule: ScheduleName, pipe: PipelineShape) -> None:
    """Stages are equal where the vocabulary is one token, and transfers free where p2p is."""
    spec = gpt(layers=60, hidden=1024, heads=16, vocab=1, max_seq_len=1024, vocab_multiple=1)
    workload = job(
        spec, Layout(pp=pipe.ranks, vp=pipe.chunks), global_batch_size=pipe.micros, schedule=schedule
    )
    work = MicroBatchCost.from_workload(workload, FREE)
    costs = PassCosts(
        forward=work.layer.seconds,
        input=work.layer_back.seconds - work.layer_weights,
        weight=work.layer_weights,
    )
    tables = [SCHEDULES[schedule](pipe, rank) for rank in range(pipe.ranks)]
    layers = 60 / (pipe.ranks * pipe.chunks)
    wanted = layers * simulate(tables, pipe, costs).makespan
    spent = estimate(workload, FREE).seconds
    assert spent.step - spent.optimizer == pytest.approx(wanted, rel=0.015)


@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=2, vp=2), Layout(pp=2, vp=4), Layout(pp=5)])
def test_the_bubble_of_equal_stages_is_the_papers(layout: Layout) -> None:
    """(p - 1) / (v m) of the time at work, arXiv:2104.04473 §2.2; a vocabulary of one makes stages equal."""
    spec = gpt(layers=40, hidden=1024, heads=16, vocab=1, max_seq_len=1024, vocab_multiple=1)
    spent = estimate(job(spec, layout, global_batch_size=20), HARDWARE["a100"]).seconds
    working = spent.step - spent.bubble - spent.optimizer
    share = (layout.pp - 1) / (layout.vp * 20)
    assert spent.bubble / working == pytest.approx(share, rel=0.02)


def test_the_fullest_place_is_found_among_one_of_each_kind() -> None:
    for layout in (Layout(pp=3), Layout(pp=4), Layout(pp=2, vp=2), Layout(pp=8)):
        workload = job(replace(LLAMA, layers=11), layout)
        everywhere = [rank_memory(workload, place).total for place in range(layout.pp)]
        assert peak_rank(workload).total == max(everywhere)


def test_a_search_gives_layouts_that_fit_the_fastest_first() -> None:
    spec = model(48, 6144, 64)
    results = search(job(spec, global_batch_size=256), 64, HARDWARE["a100"], limit=20)
    assert len(results) == 20
    assert all(e.fits and e.workload.layout.world == 64 for e in results)
    steps = [e.seconds.step for e in results]
    assert steps == sorted(steps)
    for e in results:  # each is what estimating it alone gives
        alone = replace(e.workload, model=ShardedModel.from_layout(spec, e.workload.layout))
        assert estimate(alone, HARDWARE["a100"]).seconds == e.seconds
    assert search(job(model(105, 20480, 128), global_batch_size=8), 8, HARDWARE["a100"]) == []


@pytest.mark.parametrize(
    ("layout", "options", "kind", "where"),
    [
        (
            Layout(pp=4, vp=4),
            {},
            LayoutError,
            "--num-virtual-stages-per-pipeline-rank: a stage would have no",
        ),
        (Layout(tp=8), {}, LayoutError, "layers.0.qkv.weight: 4 heads cannot be split evenly over tp"),
        (Layout(dp=3), {}, ConfigError, "--global-batch-size: is not a multiple of micro-batch size x data"),
        (Layout(cp=32), {}, LayoutError, "--context-parallel-size: the tokens of a sample cannot be split"),
        (Layout(vp=2), {}, LayoutError, "--num-layers-per-virtual-pipeline-stage: there is no pipeline"),
    ],
)
def test_a_layout_that_cannot_be_is_one_line(
    layout: Layout, options: dict[str, object], kind: type[MegaError], where: str
) -> None:
    with pytest.raises(kind) as raised:
        estimate(job(GPT, layout, **options), HARDWARE["h100"])
    assert str(raised.value).startswith(where)
    assert "\n" not in str(raised.value)
