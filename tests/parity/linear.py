"""Test bodies: tensor-parallel products on several ranks against torch's on one, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.checkpoint import checkpoint

from mega_model import fp8
from mega_model.distributed.mesh import Axis, Mesh, World
from mega_model.tensor_parallel_ops import column_linear, row_linear, vocab_embedding
from mega_model.weight_gradients import WeightGradients
from mega_schema.fp8_recipe import Fp8Recipe
from mega_schema.parallel_layout import Layout

TOKENS, INNER, OUTER, ROWS = 8, 6, 12, 12


def products(world: World, meet: str, folder: Path) -> None:
    """Column, row and vocabulary layers: values, and every gradient, with tokens shared and not."""
    mesh = Mesh.join(Layout(tp=world.size), world, init_method=meet)
    for sequence in (False, True):
        _compare(replace(mesh.tp, sequence=sequence))
    mesh.destroy()


def fused_products(world: World, meet: str, folder: Path) -> None:
    """A fused axis calls torch's operations over symmetric memory; these stand in for them on a CPU."""
    calls: list[str] = []

    def all_gather_matmul(
        x: Tensor, others: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        calls.append("gather")
        group = _resolve_process_group(group_name)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        whole = torch.cat(parts, gather_dim)
        return whole if return_A else None, [whole @ matrix for matrix in others]

    def matmul_reduce_scatter(
        x: Tensor, matrix: Tensor, reduce_op: str, scatter_dim: int, group_name: str
    ) -> Tensor:
        calls.append("scatter")
        assert reduce_op == "sum"
        group = _resolve_process_group(group_name)
        whole = x @ matrix
        dist.all_reduce(whole, group=group)
        return whole.chunk(group.size(), scatter_dim)[group.rank()].contiguous()

    mesh = Mesh.join(Layout(tp=world.size), world, init_method=meet, sequence=True, fused=True)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", matmul_reduce_scatter, "CPU")
    try:
        _compare(mesh.tp)
    finally:
        library._destroy()
    # a column's forward and a row's backward gather, a row's forward scatters; the second of two passes is
    # computed again in backward
    assert calls.count("gather") == 5
    assert calls.count("scatter") == 3
    mesh.destroy()


def fp8_products(world: World, meet: str, folder: Path) -> None:
    """A column and a row layer in FP8, against the same in one process: its scales, and so its numbers."""
    mesh = Mesh.join(Layout(tp=world.size), world, init_method=meet)
    for sequence in (False, True):
        for recipe in (Fp8Recipe("hybrid"), Fp8Recipe("e4m3", weight_gradients=False)):
            _same_in_fp8(replace(mesh.tp, sequence=sequence), recipe)
    mesh.destroy()


def _same_in_fp8(tp: Axis, recipe: Fp8Recipe) -> None:
    random = torch.Generator().manual_seed(4)
    # the largest number of everything that is cut lies on one rank
    x, up, down, grad = (
        torch.randn(shape, generator=random).cumsum(0) for shape in ((16, 32), (64, 32), (32, 64), (16, 32))
    )

    def gradients_of(tp: Axis) -> tuple[Tensor, ...]:
        def own(whole: Tensor) -> Tensor:
            return whole.chunk(tp.size)[tp.rank] if tp.sequence else whole

        w_up = nn.Parameter(up.chunk(tp.size)[tp.rank].clone())
        w_down = nn.Parameter(down.chunk(tp.size, 1)[tp.rank].contiguous())
        main_up, main_down, gradients = torch.zeros_like(w_up), torch.zeros_like(w_down), WeightGradients()
        gradients.register_main_grad(w_up, lambda: main_up)
        gradients.register_main_grad(w_down, lambda: main_down)
        own_input = own(x).clone().requires_grad_()
        inner = fp8.column_linear(own_input, w_up, tp, gradients, recipe)
        y = fp8.row_linear(inner.relu(), w_down, tp, gradients, recipe)
        y.backward(own(grad).clone())
        assert own_input.grad is not None
        return y.detach(), own_input.grad, main_up, main_down

    y, grad_x, grad_up, grad_down = gradients_of(Axis("tp"))
    tokens = slice(None)
    if tp.sequence:
        rows = len(x) // tp.size
        tokens = slice(tp.rank * rows, (tp.rank + 1) * rows)
    wanted = (
        y[tokens],
        grad_x[tokens],
        grad_up.chunk(tp.size)[tp.rank],
        grad_down.chunk(tp.size, 1)[tp.rank],
    )
    for actual, want in zip(gradients_of(tp), wanted, strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def _compare(tp: Axis) -> None:
    random = torch.Generator().manual_seed(4)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()

    x, up, bias, down, table, grad = (
        leaf(*shape)
        for shape in (
            (TOKENS, INNER),
            (OUTER, INNER),
            (OUTER,),
            (INNER, OUTER),
            (ROWS, INNER),
            (TOKENS, INNER),
        )
    )
    token = torch.tensor([3, 9, 0, 3, 5, 4, 9, 1])
    (F.linear(F.linear(x, up, bias).tanh(), down) + F.embedding(token, table)).backward(grad.detach())

    gradients = WeightGradients()
    share = x.detach().chunk(tp.size)[tp.rank] if tp.sequence else x.detach()
    own_input = share.clone().requires_grad_()
    w_up, w_bias, w_table = (nn.Parameter(w.detach().chunk(tp.size)[tp.rank]) for w in (up, bias, table))
    w_down = nn.Parameter(down.detach().chunk(tp.size, 1)[tp.rank])
    local = token - tp.rank * len(w_table)
    in_shard = (local >= 0) & (local < len(w_table))

    def layers(own_input: Tensor) -> Tensor:
        inner = column_linear(own_input, w_up, w_bias, tp, gradients).tanh()
        return row_linear(inner, w_down, tp, gradients)

    def own(whole: Tensor) -> Tensor:
        return whole.chunk(tp.size)[tp.rank] if tp.sequence else whole

    rows = vocab_embedding(local.clamp(0, len(w_table) - 1), in_shard, w_table, tp, gradients)
    for is_repeated in (False, True):
        own_input.grad = w_up.grad = w_bias.grad = w_down.grad = w_table.grad = None
        out = checkpoint(layers, own_input, use_reentrant=False) if is_repeated else layers(own_input)
        (out + rows).backward(own(grad.detach()), retain_graph=True)
        leaf_gradients = (own_input.grad, w_up.grad, w_bias.grad, w_down.grad, w_table.grad)
        assert x.grad is not None
        assert down.grad is not None
        wanted = (own(x.grad), *(w.grad.chunk(tp.size)[tp.rank] for w in (up, bias)))  # type: ignore[union-attr]
        wanted += (down.grad.chunk(tp.size, 1)[tp.rank], table.grad.chunk(tp.size)[tp.rank])  # type: ignore[union-attr]
        for actual, want in zip(leaf_gradients, wanted, strict=True):
            torch.testing.assert_close(actual, want, rtol=1e-12, atol=1e-12)
    whole = F.linear(F.linear(x, up, bias).tanh(), down) + F.embedding(token, table)
    torch.testing.assert_close(out + rows, own(whole), rtol=1e-12, atol=1e-12)
