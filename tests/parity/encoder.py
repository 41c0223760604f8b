"""Test bodies: an encoder on several ranks against the whole model on one, with every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights, parameters
from mega_model.distributed.mesh import Mesh, World
from mega_model.encoder import Encoder
from mega_model.init import initial_values
from mega_model.loss import IGNORED
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import bert

ROWS, LENGTH = 2, 8
TOLERANCE = 1e-5
SMALL: dict[str, Any] = {
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "vocab": 19,
    "max_seq_len": 8,
    "vocab_multiple": 4,
    "init_std": 0.3,
}
SPECS = {
    "megatron": bert(**SMALL),
    "original": bert(**SMALL, post_norm_residual=True, activation="gelu_erf"),
    "untied without a binary head": bert(**SMALL, pooler=False, binary_head=False, tied=False),
    "modern": bert(
        **SMALL,
        positions="rope",
        activation="geglu",
        embed_norm=True,
        sliding_window=3,
        global_attention_every=2,
        token_types=None,
        **dict.fromkeys(("bias", "qkv_bias", "norm_bias", "first_attention_norm"), False),
        **dict.fromkeys(("pooler", "binary_head"), False),
    ),
}


def like_one_process(
    spec: str, tp: int, pp: int, sequence: bool, world: World, meet: str, folder: Path
) -> None:
    """Loss, binary logits and all gradients of this rank's shard are those of one process."""
    model = SPECS[spec]
    mesh = Mesh.join(Layout(tp=tp, pp=pp), world, init_method=meet, sequence=sequence)
    whole = _build(Runtime.single_process(model))
    rt = Runtime.from_mesh(mesh, model)
    stage = _build(rt)
    x, loss, binary = _forward(whole, None)
    loss.backward()
    incoming = _receive(mesh, rt, -1) if not rt.stage.is_first else None
    out, local_loss, local_binary = _forward(stage, incoming)
    if rt.stage.is_last:
        torch.testing.assert_close(local_loss, loss, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(local_binary, binary, atol=TOLERANCE, rtol=TOLERANCE)
        local_loss.backward()
    else:
        mesh.pp.exchange([(out.detach(), mesh.pp.rank + 1)], [])
        out.backward(_receive(mesh, rt, 1))
    if incoming is not None:
        assert incoming.grad is not None
        mesh.pp.exchange([(incoming.grad, mesh.pp.rank - 1)], [])
    _compare_gradients(whole, stage, rt, mesh)
    mesh.destroy()


def _build(rt: Runtime) -> Encoder:
    model = build_model(rt)
    assert isinstance(model, Encoder)
    values = initial_values(table(rt.spec), 5)
    bias = 1 / 8  # of zeros would hide a mistake; one of a row would too
    by_name = rt.table

    def read(name: str, slab: Slab) -> Tensor:
        x = values(name, slab)
        if by_name[name].decay:
            return x
        return x + bias * torch.arange(slab.start[0], slab.start[0] + slab.shape[0]).remainder(5)

    fill_weights(model, read, rt)
    return model


def _forward(model: Encoder, incoming: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states, and on the last stage the loss of both heads and the binary logits."""
    generator = torch.Generator().manual_seed(2)
    token_T = torch.randint(0, 19, (ROWS * LENGTH,), generator=generator)
    type_T = torch.randint(0, 2, (ROWS * LENGTH,), generator=generator)
    target_T = torch.where(torch.arange(ROWS * LENGTH) % 3 == 1, token_T.flip(0), IGNORED)
    padding_BS = torch.tensor([[0] * 8, [0] * 5 + [1] * 3])
    attend = PackedAttention(ROWS, LENGTH, padding_BS, causal=False)
    x = model.hidden_states(
        token_T if incoming is None else incoming,
        torch.arange(LENGTH).repeat(ROWS),
        attend,
        token_type_T=type_T,
    )
    if not model.stage.is_last:
        return x, x.sum(), x
    loss: Tensor = model.head(x, target_T)
    if not model.spec.binary_head:
        return x, loss, x.new_zeros(())
    binary_B2 = model.binary_logits(x, torch.tensor([0, LENGTH]))
    return x, loss + F.cross_entropy(binary_B2, torch.tensor([1, 0])), binary_B2


def _receive(mesh: Mesh, rt: Runtime, step: int) -> Tensor:
    tokens = ROWS * LENGTH // (mesh.tp.size if mesh.tp.sequence else 1)
    x = torch.empty(tokens, rt.spec.hidden)
    mesh.pp.exchange([], [(x, mesh.pp.rank + step)])
    return x.requires_grad_(step < 0)


def _compare_gradients(whole: Encoder, stage: Encoder, rt: Runtime, mesh: Mesh) -> None:
    wanted = dict(whole.named_parameters())
    for row, weight in parameters(stage, rt):
        grad = weight.grad
        assert grad is not None, row.name
        if mesh.tp.sequence and row.split is None:  # as the trainer does
            grad = mesh.tp.reduce(grad.clone())
        full = wanted[row.name if row.name in wanted else str(row.tied_to)].grad
        assert full is not None
        tied = rt.spec.tied and row.name in ("embed.weight", "head.weight")
        if tied and mesh.pp.size > 1:
            others = grad.clone()
            peer = 0 if rt.stage.is_last else mesh.pp.size - 1
            mesh.pp.exchange([(grad, peer)], [(others, peer)])
            grad = grad + others
        for slab in row.slabs(mesh.tp.rank, mesh.tp.size):
            torch.testing.assert_close(
                grad[slab.in_local],
                full[slab.in_global],
                atol=TOLERANCE,
                rtol=TOLERANCE,
                msg=lambda text, row=row: f"{row.name}: {text}",
            )
