"""Gradients and updates: what adds up, what is cut back, what stays float32, what comes back from disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mega_model.mesh import Mesh
from mega_schema.params import ONES, Param
from mega_schema.shard import Slab
from mega_train.grads import Gradients
from mega_train.optim import AdamW

ROWS = [
    Param("matrix", (3, 4), 0, ONES),
    Param("norm", (4,), 0, ONES, decay=False),
]


def _held(dtype: torch.dtype, seed: int = 1) -> list[tuple[Param, nn.Parameter]]:
    rng = torch.Generator().manual_seed(seed)
    return [(row, nn.Parameter(torch.randn(row.shape, generator=rng).to(dtype))) for row in ROWS]


def _optimizer(
    dtype: torch.dtype = torch.float32, decay: float = 0.1
) -> tuple[list[tuple[Param, nn.Parameter]], Gradients, AdamW]:
    held = _held(dtype)
    gradients = Gradients(held, Mesh())
    return held, gradients, AdamW(held, gradients.of, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)


def _loss(held: list[tuple[Param, nn.Parameter]], x_BD: Tensor) -> Tensor:
    (_, matrix), (_, norm) = held
    return ((x_BD.to(matrix.dtype) * norm) @ matrix.T).float().square().mean(dim=1).sum()


def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch() -> None:
    x_BD = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    (one, whole, _), (many, parts, _) = _optimizer(), _optimizer()
    _loss(one, x_BD).backward()
    for part_BD in x_BD.split(3):
        _loss(many, part_BD).backward()
    torch.testing.assert_close(parts.flat, whole.flat)
    assert whole.flat.abs().sum() > 0
    assert all(weight.grad is None for _, weight in one + many), "a second copy of the gradient"


def test_gradients_of_bfloat16_weights_are_added_up_in_float32() -> None:
    held, gradients, _ = _optimizer(torch.bfloat16)
    ((_, matrix), _) = held
    for size in (256.0, 1.0, 1.0, 1.0, 1.0):  # in bfloat16 256 + 1 is 256
        (matrix[0, 0] * size).backward()
    assert gradients.of[0][0, 0] == 260.0
    assert gradients.flat.dtype == torch.float32


def test_zero_forgets_the_step_before() -> None:
    held, gradients, _ = _optimizer()
    _loss(held, torch.ones(1, 4)).backward()
    gradients.zero()
    assert gradients.flat.abs().sum() == 0
    assert all(not part.any() for part in gradients.of)


def test_the_norm_is_that_of_all_gradients_together_and_a_tied_one_counts_once() -> None:
    tied = Param("head", (2,), 0, ONES, tied_to="matrix")
    held = [*_held(torch.float32), (tied, nn.Parameter(torch.ones(2)))]
    gradients = Gradients(held, Mesh())
    gradients.of[0].fill_(1.0)
    gradients.of[1].fill_(2.0)
    gradients.of[2].fill_(100.0)
    assert gradients.norm() == pytest.approx((12 * 1 + 4 * 4) ** 0.5)


@pytest.mark.parametrize(("most", "expected"), [(2.0, 2.0), (10.0, 4.0), (0.0, 4.0)])
def test_clipping_cuts_the_norm_back_and_lets_a_smaller_one_be(most: float, expected: float) -> None:
    _, gradients, _ = _optimizer()
    gradients.of[0][0, 0] = -4.0
    gradients.clip(gradients.norm(), most)
    assert gradients.norm() == pytest.approx(expected, rel=1e-5)
    assert gradients.of[0][0, 0] < 0


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
    held, gradients, adam = _optimizer(decay=0.3)
    before = [weight.detach().double().numpy().copy() for _, weight in held]
    rng, rates = np.random.default_rng(3), [0.1, 0.05, 0.0, 0.2]
    given: list[list[np.ndarray]] = [[], []]
    for rate in rates:
        for place, gradient in enumerate(gradients.of):
            given[place].append(rng.normal(size=gradient.shape))
            gradient.copy_(torch.from_numpy(given[place][-1]))
        adam.step(rate)
    assert adam.steps == len(rates)
    for place, ((row, weight), decay) in enumerate(zip(held, (0.3, 0.0), strict=True)):
        expected = _adamw_by_hand(before[place], given[place], rates, decay)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5, err_msg=row.name)


def test_updates_smaller_than_a_bfloat16_step_are_not_lost() -> None:
    held, gradients, adam = _optimizer(torch.bfloat16, decay=0.0)
    ((_, matrix), _) = held
    with torch.no_grad():
        matrix.fill_(1.0)
    adam.main[0].fill_(1.0)
    rate = 2.0**-12  # a bfloat16 step below 1 is 2^-8
    seen = []
    for _ in range(32):
        gradients.flat.fill_(1.0)
        adam.step(rate)
        seen.append(float(matrix.detach()[0, 0]))
    assert seen[0] == 1.0, "one update rounds away in bfloat16"
    assert seen[-1] == pytest.approx(1.0 - 32 * rate, abs=2.0**-9)
    assert adam.main[0].dtype == torch.float32
    assert torch.equal(matrix.detach(), adam.main[0].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_took_up_a_state_goes_on_bitwise_as_the_one_that_wrote_it(
    dtype: torch.dtype,
) -> None:
    (held, gradients, adam), (held_b, gradients_b, other) = _optimizer(dtype), _optimizer(dtype)
    rng = torch.Generator().manual_seed(4)

    def step(*optimizers: tuple[Gradients, AdamW]) -> None:
        values = torch.randn(gradients.flat.shape, generator=rng)
        for flat, one in optimizers:
            flat.flat.copy_(values)
            one.step(0.01)

    for _ in range(3):
        step((gradients, adam))
    state = {(space, row.name): tensor.clone().numpy() for space, row, tensor in adam.tensors()}
    assert {space for space, _ in state} == {"optim.exp_avg", "optim.exp_avg_sq"} | (
        set() if dtype == torch.float32 else {"optim.main"}
    )

    def read(space: str, row: Param, slab: Slab) -> np.ndarray:
        return state[space, row.name][slab.in_global]

    if (
        dtype == torch.float32
    ):  # then the weights themselves are the main ones, and the model's load sets them
        for (_, weight), (_, copy) in zip(held, held_b, strict=True):
            copy.data.copy_(weight.data)
    other.load(read, lambda row: row.slabs(0, 1), steps=adam.steps)
    assert other.steps == 3
    for (_, weight), main in zip(held_b, other.main, strict=True):
        assert torch.equal(weight.detach(), main.to(dtype)), "the weights are the main ones at once"
    for _ in range(3):
        step((gradients, adam), (gradients_b, other))
    for (row, weight), (_, copy) in zip(held, held_b, strict=True):
        assert torch.equal(weight, copy), row.name
