"""Training equals Megatron Core's step by step, from the same weights and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mega_model.distributed.mesh import Mesh, World
from mega_model.kernels.reference import cross_entropy
from mega_schema.parallel_layout import Layout, split_layers
from tests.megatron_core import reference_process, runs
from tests.megatron_core.runs import VOCAB, Case, TrainingResult

LLAMA = "--num-query-groups 2 --ffn-hidden-size 44 --rotary-base 500 --norm-epsilon 1e-6"
PARTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss --global-batch-size 8"
CASES: dict[str, Case] = {
    "gpt": Case(),
    "llama": Case(LLAMA, "llama"),
    "gelu by erf, untied, two micro-batches": Case(
        "--no-bias-gelu-fusion --untie-embeddings-and-output-weights --global-batch-size 8 "
        "--weight-decay-incr-style cosine --start-weight-decay 0.02 --end-weight-decay 0.4 "
        "--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-wsd-decay-style exponential"
    ),
    "squared relu, rotary pairs, a window, normed heads": Case(
        "--squared-relu --disable-bias-linear --position-embedding-type rope --rotary-percent 0.5 "
        "--rotary-interleaved --window-size 5,0 --qk-layernorm --decoupled-lr 2e-3 --decoupled-min-lr 1e-4 "
        "--untie-embeddings-and-output-weights"
    ),
    "no biases, no activation named": Case("--disable-bias-linear"),
    "documents apart": Case(PARTS),
    "documents apart, loss per token": Case(PARTS + " --calculate-per-token-loss"),
    "sgd": Case(
        "--optimizer sgd --sgd-momentum 0.8 --lr 0.3 --min-lr 0.01 --weight-decay-incr-style linear "
        "--start-weight-decay 0.0 --end-weight-decay 0.2 --lr-decay-style inverse-square-root"
    ),
    "llama 3.1, wide heads, a bias of queries, tied": Case(
        "--num-query-groups 1 --kv-channels 12 --add-qkv-bias --use-rope-scaling --rope-scaling-factor 4 "
        "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
        "--decoupled-lr 1e-3"
    ),
    "no positions, no clipping": Case("--position-embedding-type none --clip-grad 0"),
    "interpolated": Case(
        LLAMA + " --rotary-seq-len-interpolation-factor 3 --lr-decay-style linear "
        "--apply-query-key-layer-scaling --attention-softmax-in-fp32",
        "llama",
        theirs={"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    ),
    "rotary positions that are asked to begin again": Case(LLAMA + " --reset-position-ids", "llama"),
    "recomputed": Case(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        theirs={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "fp16 gpt": Case("--fp16 --initial-loss-scale 1048576 --loss-scale-window 5"),
    "bf16 gpt": Case("--bf16"),
    "bf16 llama": Case(LLAMA + " --bf16", "llama"),
    "tp": Case(tp=2),
    "tp llama, sequence": Case(LLAMA, "llama", tp=2, theirs={"sequence_parallel": True}),
    "tp gpt, sequence, normed heads": Case(
        "--qk-layernorm --global-batch-size 8", tp=2, theirs={"sequence_parallel": True}
    ),
    "pp gpt": Case("--global-batch-size 12", pp=2),
    "pp llama, documents apart": Case(LLAMA + " " + PARTS + " --calculate-per-token-loss", "llama", pp=2),
    "dp": Case(PARTS + " --calculate-per-token-loss", dp=2),
}
PADDED = Case("--make-vocab-size-divisible-by 40")
EXACT = [name for name, case in CASES.items() if not case.half]


# layers, ranks of the pipeline, stages of each, layers of the first and last, what counts as a layer
ASSIGNMENTS = [
    (layers, pp, vp, first, last, embedding, head)
    for layers, pp, vp, (first, last, embedding, head) in product(
        (4, 6, 8, 9, 12, 14),
        (2, 3, 4),
        (1, 2),
        [
            *((first, last, False, False) for first, last in product((None, 0, 2, 4), (None, 2, 4))),
            *((None, None, embedding, head) for embedding, head in product((False, True), repeat=2)),
        ],
    )
]


def scores() -> tuple[Tensor, Tensor]:
    """Scores of tokens, far apart and close together, and targets of both halves of the vocabulary."""
    rng = torch.Generator().manual_seed(5)
    logits_TV = torch.randn(40, VOCAB, generator=rng) * torch.logspace(-2, 2, 40)[:, None]
    return logits_TV + torch.linspace(-500, 500, 40)[:, None], torch.randint(VOCAB, (40,), generator=rng)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, TrainingResult]:
    data = runs.corpus(folder)
    cases = CASES | {"padded": PADDED}
    results = {name: runs.train_case(case, data, folder / f"{name}.pt") for name, case in cases.items()}
    torch.save(scores(), folder / "losses.pt")
    torch.save(ASSIGNMENTS, folder / "assignments.pt")
    for ranks in (1, 2):
        names = [name for name, case in cases.items() if case.ranks == ranks]
        reference_process.run("tests.megatron_core.training:train", folder, ranks=ranks, cases=names)
        for name in names:
            files = [folder / f"{name}-{rank}.pt" for rank in range(ranks)]
            results[name].theirs = [torch.load(file, weights_only=False) for file in files]
    return results


@pytest.mark.parametrize("name", CASES)
def test_every_step_has_their_loss_norm_rate_and_scale(name: str, results: dict[str, TrainingResult]) -> None:
    ours, half = results[name], CASES[name].half
    for rank in ours.theirs:
        assert rank["losses"] == pytest.approx(ours.losses, rel=1e-3 if half else 1e-5) or not rank["losses"]
        assert rank["norms"] == pytest.approx(ours.norms, rel=1e-2 if half else 1e-5, nan_ok=True)
        assert rank["rates"] == pytest.approx(ours.rates, rel=1e-12)
        assert rank["scales"] == ours.scales
    assert any(rank["losses"] for rank in ours.theirs)
    assert ours.losses[-1] < 0.95 * ours.losses[0], "nothing was learnt, so that little was compared"


@pytest.mark.parametrize("name", [name for name in EXACT if CASES[name].dp == 1])
def test_the_first_gradient_of_every_parameter_is_theirs(
    name: str, results: dict[str, TrainingResult]
) -> None:
    largest = max(tensor.abs().max() for rank in results[name].gradients for tensor in rank.values())
    for ours, rank in zip(results[name].gradients, results[name].theirs, strict=True):
        assert ours.keys() == rank["gradients"].keys()
        for key, gradient in rank["gradients"].items():
            # those of keys' biases are nothing but rounding
            close = 1e-5 * max(gradient.abs().max(), 1e-2 * largest)
            assert (ours[key] - gradient).abs().max() <= close, key


@pytest.mark.parametrize("name", EXACT)
def test_the_weights_at_the_end_are_theirs(name: str, results: dict[str, TrainingResult]) -> None:
    for ours, rank in zip(results[name].weights, results[name].theirs, strict=True):
        assert ours.keys() == rank["weights"].keys()
        for key, weight in rank["weights"].items():
            assert (ours[key] - weight).abs().max() <= 1e-5, key


@pytest.mark.parametrize("name", [name for name in EXACT if CASES[name].family == "llama"])
def test_as_many_elements_of_gradients_are_zero_as_theirs(
    name: str, results: dict[str, TrainingResult]
) -> None:
    for rank in results[name].theirs:
        assert rank["zeros"] == results[name].zeros
    assert any(results[name].zeros)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_bfloat16_is_no_further_from_float32_than_theirs(
    name: str, results: dict[str, TrainingResult]
) -> None:
    half, exact = results[f"bf16 {name}"], results[name]

    def far(gradients: Mapping[str, Tensor]) -> float:
        apart = [
            (gradients[key].float() - tensor).square().sum() for key, tensor in exact.gradients[0].items()
        ]
        return float(sum(apart)) ** 0.5

    assert 0 < far(half.gradients[0]) < 1.2 * far(half.theirs[0]["gradients"])
    assert half.losses == pytest.approx(exact.losses, rel=1e-3)


@pytest.mark.parametrize("name", EXACT)
def test_every_parameter_begins_as_theirs(name: str, results: dict[str, TrainingResult]) -> None:
    """Constants are the same; what is drawn has the same mean, spread and shape, as far as samples tell."""
    for ours, rank in zip(results[name].initial, results[name].theirs, strict=True):
        for key, drawn in rank["initial"].items():
            values = ours[key]
            assert values.shape == drawn.shape
            if drawn.std() == 0:
                assert torch.equal(values, drawn), key
                continue
            error = 5 * (2 / drawn.numel()) ** 0.5  # five standard errors of the difference, and more
            assert abs(values.mean() - drawn.mean()) < error * drawn.std(), key
            assert values.std() / drawn.std() == pytest.approx(1, abs=error), key
            flat, its = ((x - x.mean()) / x.std() for x in (values, drawn))
            assert flat.abs().mean() == pytest.approx(float(its.abs().mean()), abs=error), key


def test_cross_entropy_over_a_cut_vocabulary_is_theirs(
    results: dict[str, TrainingResult], folder: Path
) -> None:
    """Their fused kernel rounds the gradient to bfloat16, whatever the scores are in; ours does not."""
    gradient_TV, target_T = scores()
    loss_T = cross_entropy(gradient_TV, target_T, Mesh.join(Layout(), World()).tp, 1.0)
    for kernel, rounding in ((0, 1e-5), (1, 2**-8)):
        shares = [torch.load(folder / f"losses-{rank}.pt")[kernel] for rank in range(2)]
        for their_T, _ in shares:
            torch.testing.assert_close(their_T, loss_T, rtol=1e-5, atol=1e-5)
        their_TV = torch.cat([gradient for _, gradient in shares], -1)
        torch.testing.assert_close(their_TV, gradient_TV, rtol=rounding, atol=1e-6)


def test_padding_of_the_vocabulary_raises_their_loss_alone(results: dict[str, TrainingResult]) -> None:
    ours, (rank,) = results["padded"].losses, results["padded"].theirs
    assert ours == results["gpt"].losses
    assert 0.1 < rank["losses"][0] - ours[0] < math.log(120 / VOCAB)


def test_layers_are_assigned_to_stages_as_theirs(results: dict[str, TrainingResult], folder: Path) -> None:
    answered = 0
    for assignment, answer in zip(ASSIGNMENTS, torch.load(folder / "assignments-0.pt"), strict=True):
        layers, pp, vp, first, last, embedding, head = assignment
        least = 0 if embedding or head else 1
        if answer is None or min(count for _, count in answer) < least:
            continue  # of a stage with nothing in it, or less, which ours refuses
        sizes = split_layers(layers, pp=pp, vp=vp, first=first, last=last, embedding=embedding, head=head)
        assert answer == [*zip([0, *accumulate(sizes)][:-1], sizes, strict=True)], assignment
        answered += 1
    assert answered > 100
