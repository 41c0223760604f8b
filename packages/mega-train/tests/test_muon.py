"""SGD and Muon: updates against references, and resumed state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_schema.params import ONES, Param
from mega_schema.sharding import Split
from mega_train.distributed.bucket_layout import ShardRange
from mega_train.optim.base import STATE_NAMESPACES, Optimizer
from mega_train.optim.muon import Muon, matrix_shards, orthogonalize
from mega_train.optim.sgd import SGD

ROWS = (
    Param("embed.weight", (6, 4), "first", ONES),
    Param("layers.0.qkv.weight", (12, 4), 0, ONES, Split("tp", 0, (8, 2, 2), unit=2, repeats=(1, 2))),
    Param("layers.0.norm.weight", (4,), 0, ONES, decay=False),
    Param("layers.0.down.weight", (4, 10), 0, ONES, Split("tp", 1)),
)


def _whole_shards() -> list[ShardRange]:
    return [ShardRange(row, 0, row.size) for row in ROWS]


def _values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(row.size, generator=generator) for row in ROWS]


def _sgd(main: list[Tensor]) -> Optimizer:
    return SGD(_whole_shards(), main, momentum=0.9)


def _muon(main: list[Tensor], dtype: torch.dtype = torch.float32) -> Optimizer:
    axis = Axis("one")
    return Muon(
        _whole_shards(),
        main,
        momentum=0.95,
        betas=(0.9, 0.95),
        eps=1e-8,
        tp=axis,
        replicas=axis,
        is_sharded=False,
        dtype=dtype,
    )


@pytest.mark.parametrize("shape", [(5, 5), (3, 11), (16, 4), (1, 7)])
def test_singular_values_go_through_the_quintic_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    wanted = (u * values) @ v
    torch.testing.assert_close(orthogonalize(matrix).double(), wanted, atol=1e-4, rtol=1e-4)
    assert ((values > 0.5) & (values < 1.5)).all(), "near 1"


def test_sgd_is_torchs() -> None:
    main, theirs = _values(1), [tensor.clone().requires_grad_() for tensor in _values(1)]
    groups = [
        {"params": [p for p, row in zip(theirs, ROWS, strict=True) if row.decay is decays], "weight_decay": w}
        for decays, w in ((True, 0.2), (False, 0.0))
    ]
    torchs, ours = torch.optim.SGD(groups, momentum=0.9), _sgd(main)
    for step, rate in enumerate((0.1, 0.05, 0.2)):
        gradients = _values(10 + step)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        for group in torchs.param_groups:
            group["lr"] = rate
        torchs.step()
        ours.step(gradients, rate, 0.2)
    torch.testing.assert_close(main, [tensor.detach() for tensor in theirs])
    assert ours.steps == 3


def test_muon_is_torchs_on_each_run_of_a_matrix_and_adamw_elsewhere() -> None:
    """torch computes the iteration in bfloat16, and so does ours here."""
    main, start = _values(1), _values(1)
    runs = [
        start[1].view(12, 4)[rows].clone().requires_grad_()
        for rows in (slice(8), slice(8, 10), slice(10, 12))
    ]
    runs.append(start[3].view(4, 10).clone().requires_grad_())
    rest = [start[0].requires_grad_(), start[2].requires_grad_()]
    muon = torch.optim.Muon(runs, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(
        [{"params": rest[:1], "weight_decay": 0.2}, {"params": rest[1:], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    ours = _muon(main, torch.bfloat16)
    for step, rate in enumerate((0.1, 0.05, 0.2)):
        gradients = _values(10 + step)
        qkv = gradients[1].view(12, 4)
        parts = [qkv[:8], qkv[8:10], qkv[10:], gradients[3].view(4, 10)]
        for parameter, gradient in zip(runs + rest, [*parts, gradients[0], gradients[2]], strict=True):
            parameter.grad = gradient.clone()
        for group in muon.param_groups + adam.param_groups:
            group["lr"] = rate
        muon.step()
        adam.step()
        ours.step(gradients, rate, 0.2)
    torch.testing.assert_close([main[0], main[2]], [tensor.detach() for tensor in rest])
    # a bfloat16 has 8 bits: five rounds of products of those, times a rate of 0.35 in all
    updates = [*main[1].view(12, 4).split([8, 2, 2]), main[3].view(4, 10)]
    for update, theirs in zip(updates, runs, strict=True):
        torch.testing.assert_close(update, theirs.detach(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("make", [_sgd, _muon])
def test_loaded_state_resumes_bitwise(make: Callable[[list[Tensor]], Optimizer]) -> None:
    main = _values(1)
    saved_optimizer = make(main)
    for step in range(3):
        saved_optimizer.step(_values(step), 0.1, 0.1)
    state = {
        (space, shard.row.name): values.clone() for space, shard, values in saved_optimizer.state_shards()
    }
    assert {space for space, _ in state} == STATE_NAMESPACES["sgd" if make is _sgd else "muon"]
    copies = [tensor.clone() for tensor in main]
    resumed = make(copies)
    resumed.load_state(
        lambda space, shard, values: values.copy_(state[space, shard.row.name]),
        steps=saved_optimizer.steps,
    )
    for optimizer in (saved_optimizer, resumed):
        optimizer.step(_values(7), 0.1, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(main, copies, strict=True))
    assert resumed.steps == saved_optimizer.steps == 4


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_element_of_a_matrix_is_brought_once_and_held_by_all_who_need_it(
    tp: int, replicas: int
) -> None:
    rows = [ROWS[1], Param("layers.0.up.weight", (8, 6), 0, ONES, Split("tp", 0, (4, 4)))]
    sizes = [row.local_shape(tp)[0] * row.shape[1] for row in rows]
    brought = [torch.zeros(shape) for shape in ((8, 4), (2, 4), (2, 4), (4, 6), (4, 6))]
    for rank in range(tp):
        for place in range(replicas):
            ends = [(size * place // replicas, size * (place + 1) // replicas) for size in sizes]
            stored = [ShardRange(row, *end) for row, end in zip(rows, ends, strict=True)]
            shards = [torch.ones(shard.size) for shard in stored]
            for matrix, whole in zip(matrix_shards(stored, Axis("tp", tp, rank)), brought, strict=True):
                sum_of_others = whole.clone()
                whole.zero_()
                matrix.copy_to_full(shards[matrix.index], whole)
                whole += sum_of_others
                matrix.copy_from_full(torch.full(matrix.shape, 5.0), shards[matrix.index])
            assert all((values == 5).all() for values in shards)
    assert all((whole == 1).all() for whole in brought)
