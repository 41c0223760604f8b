"""Gradients and updates: accumulation, clipping, float32 main weights, resumed state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mega_model.distributed.mesh import Axis, Mesh
from mega_model.weight_gradients import WeightGradients
from mega_schema.params import ONES, Param
from mega_schema.sharding import Split
from mega_train.distributed.bucket_layout import ShardingConfig, ShardRange
from mega_train.distributed.data_parallel import GradientBuckets, WeightBuckets, build_buckets
from mega_train.distributed.grad_sync import GradientSync
from mega_train.optim.adamw import AdamW

ROWS = [
    Param("matrix", (3, 4), 0, ONES),
    Param("norm", (4,), 0, ONES, decay=False),
]


@dataclass
class Stand:
    """Two weights alone, with what trains them."""

    params: list[tuple[Param, nn.Parameter]]
    weights: WeightBuckets
    buckets: GradientBuckets
    gradients: GradientSync
    adam: AdamW
    decay: float

    @classmethod
    def build(
        cls, dtype: torch.dtype = torch.float32, *, decay: float = 0.1, more: tuple[Param, ...] = ()
    ) -> Stand:
        rng = torch.Generator().manual_seed(1)
        entries = [
            (row, nn.Parameter(torch.randn(row.shape, generator=rng).to(dtype))) for row in (*ROWS, *more)
        ]
        weights, buckets = build_buckets(entries, Axis("replicas"), WeightGradients(), ShardingConfig())
        adam = AdamW(weights.shard_ranges, weights.main_params, betas=(0.9, 0.95), eps=1e-8)
        sync = GradientSync(weights, buckets, Mesh(), [*ROWS, *more])
        return cls(entries, weights, buckets, sync, adam, decay)

    def backward(self, *parts_BD: Tensor) -> list[Tensor]:
        """The gradients of a step with these micro-batches."""
        (_, matrix), (_, norm) = self.params
        self.buckets.zero_grad(len(parts_BD))
        for x_BD in parts_BD:
            ((x_BD.to(matrix.dtype) * norm) @ matrix.T).float().square().mean(dim=1).sum().backward()
        self.gradients.reduce()
        return [gradient.clone() for gradient in self.gradients.shards]

    def step_with(self, *values: Tensor | float) -> None:
        """A step whose gradients are these."""
        self.buckets.zero_grad(1)
        self.gradients.reduce()
        for gradient, value in zip(self.gradients.shards, values, strict=True):
            gradient.copy_(torch.as_tensor(value))

    def update(self, rate: float) -> None:
        self.adam.step(self.gradients.shards, rate, self.decay)
        self.weights.copy_main_to_model_params()


def test_a_stage_of_an_embedding_alone_has_nothing_to_sum_over_the_tokens() -> None:
    row = Param("embed.weight", (4, 2), "first", ONES, Split("tp", 0))
    params = [(row, nn.Parameter(torch.zeros(4, 2)))]
    weights, buckets = build_buckets(params, Axis("replicas"), WeightGradients(), ShardingConfig())
    gradients = GradientSync(weights, buckets, Mesh(tp=Axis("tp", sequence=True)), [row])
    buckets.zero_grad(1)
    params[0][1].sum().backward()
    gradients.reduce()
    assert [gradient.tolist() for gradient in gradients.shards] == [[1.0] * 8]


def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch() -> None:
    x_BD = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    single, many = Stand.build(), Stand.build()
    whole = single.backward(x_BD)
    torch.testing.assert_close(many.backward(*x_BD.split(3)), whole)
    assert all(gradient.abs().sum() > 0 for gradient in whole)
    assert all(weight.grad is None for _, weight in single.params + many.params), (
        "a second copy of the gradient"
    )


def test_gradients_of_bfloat16_weights_are_added_up_in_float32() -> None:
    stand = Stand.build(torch.bfloat16)
    ((_, matrix), _) = stand.params
    stand.buckets.zero_grad(5)
    for size in (256.0, 1.0, 1.0, 1.0, 1.0):  # in bfloat16 256 + 1 is 256
        (matrix[0, 0] * size).backward()
    stand.gradients.reduce()
    assert stand.gradients.shards[0][0] == 260.0
    assert stand.gradients.shards[0].dtype == torch.float32


def test_a_step_forgets_the_one_before() -> None:
    stand, x_BD = Stand.build(), torch.ones(1, 4)
    once = stand.backward(x_BD)
    torch.testing.assert_close(stand.backward(x_BD), once, rtol=0, atol=0)


def test_gradients_of_a_scaled_loss_are_divided_by_the_scale() -> None:
    stand = Stand.build()
    whole = stand.backward(torch.ones(1, 4))
    stand.gradients.reduce(4.0)
    torch.testing.assert_close([4 * gradient for gradient in stand.gradients.shards], whole)


def test_a_micro_batch_that_was_not_announced_is_noticed() -> None:
    stand = Stand.build()
    stand.backward(torch.ones(1, 4))
    with pytest.raises(AssertionError, match="after its bucket had gone"):
        stand.params[0][1].sum().backward()


def test_the_norm_is_that_of_all_gradients_together_and_a_tied_one_counts_once() -> None:
    stand = Stand.build(more=(Param("head", (2,), 0, ONES, tied_to="matrix"),))
    stand.step_with(1.0, 2.0, 100.0)
    assert stand.gradients.norm() == pytest.approx((12 * 1 + 4 * 4) ** 0.5)


@pytest.mark.parametrize(("most", "expected"), [(2.0, 2.0), (10.0, 4.0), (0.0, 4.0)])
def test_clipping_cuts_the_norm_back_and_lets_a_smaller_one_be(most: float, expected: float) -> None:
    stand = Stand.build()
    stand.step_with(0.0, torch.tensor([-4.0, 0, 0, 0]))
    stand.gradients.clip(stand.gradients.norm(), most)
    assert stand.gradients.norm() == pytest.approx(expected, rel=1e-5)
    assert stand.gradients.shards[1][0] < 0


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((np.nan, 1.0), "matrix"),
        ((1.0, np.inf), "norm"),
        ((np.nan, np.inf), "norm"),
        ((1, 1), "no parameter"),
    ],
)
def test_the_first_that_is_not_finite_is_the_first_of_the_backward_pass(
    values: tuple[float, float], name: str
) -> None:
    stand = Stand.build()
    stand.step_with(*values)
    assert stand.gradients.first_non_finite() == (name if name == "no parameter" else f"{name}, on rank 0")


def _adamw_by_hand(
    weight: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float
) -> np.ndarray:
    """arXiv:1711.05101, algorithm 2, in float64."""
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        weight = weight - rate * decay * weight
        first = 0.9 * first + 0.1 * g
        second = 0.95 * second + 0.05 * g * g
        weight = weight - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
    return weight


def test_the_update_is_adamw_written_by_hand_and_norms_do_not_decay() -> None:
    stand = Stand.build(decay=0.3)
    before = [weight.detach().double().numpy().copy() for _, weight in stand.params]
    rng, rates = np.random.default_rng(3), [0.1, 0.05, 0.0, 0.2]
    gradients: list[list[np.ndarray]] = [[], []]
    for rate in rates:
        for place, (row, _) in enumerate(stand.params):
            gradients[place].append(rng.normal(size=row.shape))
        stand.step_with(*(torch.from_numpy(values[-1]).flatten() for values in gradients))
        stand.update(rate)
    assert stand.adam.steps == len(rates)
    for place, ((row, weight), decay) in enumerate(zip(stand.params, (0.3, 0.0), strict=True)):
        expected = _adamw_by_hand(before[place], gradients[place], rates, decay)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5, err_msg=row.name)


def test_updates_smaller_than_a_bfloat16_step_are_not_lost() -> None:
    stand = Stand.build(torch.bfloat16, decay=0.0)
    matrix, main = stand.params[0][1], stand.weights.main_params[0]
    main.fill_(1.0)
    rate = 2.0**-12  # a bfloat16 step below 1 is 2^-8
    seen = []
    for _ in range(32):
        stand.step_with(1.0, 1.0)
        stand.update(rate)
        seen.append(float(matrix.detach()[0, 0]))
    assert seen[0] == 1.0, "one update rounds away in bfloat16"
    assert seen[-1] == pytest.approx(1.0 - 32 * rate, abs=2.0**-9)
    assert main.dtype == torch.float32
    assert torch.equal(matrix.detach().flatten(), main.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_loaded_state_resumes_bitwise_like_the_one_that_saved_it(
    dtype: torch.dtype,
) -> None:
    first, second = Stand.build(dtype), Stand.build(dtype)
    rng = torch.Generator().manual_seed(4)

    def step(*stands: Stand) -> None:
        values = [torch.randn(main.shape, generator=rng) for main in first.weights.main_params]
        for stand in stands:
            stand.step_with(*values)
            stand.update(0.01)

    for _ in range(3):
        step(first)
    state = {(space, shard.row.name): values.clone() for space, shard, values in first.adam.state_shards()}
    assert {space for space, _ in state} == {"optim.exp_avg", "optim.exp_avg_sq"}

    def fill(space: str, shard: ShardRange, values: Tensor) -> None:
        values.copy_(state[space, shard.row.name])

    for main, theirs in zip(second.weights.main_params, first.weights.main_params, strict=True):
        main.copy_(theirs)
    second.weights.copy_main_to_model_params()
    second.adam.load_state(fill, steps=first.adam.steps)
    assert second.adam.steps == 3
    for _ in range(3):
        step(first, second)
    for (row, weight), (_, copy) in zip(first.params, second.params, strict=True):
        assert torch.equal(weight, copy), row.name
