"""Buckets of Megatron core's distributed optimizer: their content, and unknown layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mega_ckpt.formats.megatron.names import CORE, CORE_FUSED, Names, chunk_tensors
from mega_ckpt.formats.torch_dist.dcp_reader import DcpPiece, DcpTensor
from mega_ckpt.formats.torch_dist.distributed_optimizer import KINDS, UnknownLayoutError, optimizer_namespaces
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_schema.checkpoint.reader import OPTIMIZER
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import gpt

SPEC = gpt(layers=2, hidden=8, heads=2, vocab=16, max_seq_len=6, vocab_multiple=1)
KEY = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{}.{}"


def bucket(length: int, dtype: str = "F32") -> DcpTensor:
    """A vector that two ranks wrote."""
    half = length // 2
    parts = [(0, half), (half, length - half)]
    pieces = [
        DcpPiece((offset,), (n,), MappedTensor(Path("file"), dtype, (n,), 4 * offset)) for offset, n in parts
    ]
    return DcpTensor((length,), tuple(pieces))


def sizes(names: Names) -> list[tuple[str, int]]:
    """Of the last module first."""
    every = list(chunk_tensors(SPEC, names, WHOLE, tp=0, pp=0))[::-1]
    return [(foreign.name, math.prod(foreign.shape)) for foreign in every]


@pytest.mark.parametrize("names", [CORE, CORE_FUSED], ids=["local", "te"])
def test_every_parameter_is_at_the_next_multiple_of_64_behind_the_last(names: Names) -> None:
    begins, end = dict[str, int](), 0
    for name, size in sizes(names):
        begins[name] = -(-end // 64) * 64
        end = begins[name] + size
    namespaces = optimizer_namespaces(
        {KEY.format(0, kind): bucket(end) for kind in KINDS}, SPEC, names, WHOLE, 16
    )
    assert namespaces.keys() == set(OPTIMIZER)
    for space in OPTIMIZER:
        for name, size in sizes(names):
            runs = [(foreign, stored) for foreign, stored in namespaces[space] if foreign.name == name]
            assert runs[0][1].offset == 4 * begins[name]
            assert sum(math.prod(foreign.shape) for foreign, _ in runs) == size
            assert all(foreign.shape == stored.shape for foreign, stored in runs)


def test_a_norm_within_a_linear_is_behind_the_module_before_that_linear() -> None:
    layer = [part for part in CORE_FUSED if ".layers." in CORE_FUSED[part]]
    assert layer[:3] == ["out", "attn_norm", "qkv"]
    assert [part for part in CORE if ".layers." in CORE[part]][:3] == ["attn_norm", "out", "qkv"]


def test_what_is_not_of_these_parameters_is_not_known() -> None:
    end = 0
    for _, size in sizes(CORE):
        end = -(-end // 64) * 64 + size
    good = {KEY.format(0, kind): bucket(end) for kind in KINDS}
    optimizer_namespaces(good, SPEC, CORE, WHOLE, 16)
    wrong = [
        good | {KEY.format(0, "exp_avg"): bucket(end - 64)},
        good | {KEY.format(0, "exp_avg"): bucket(end + 128)},
        good | {KEY.format(0, "exp_avg"): bucket(end, "BF16")},
        good | {KEY.format(0, "momentum"): bucket(end)},
        good | {KEY.format(2, "exp_avg"): bucket(64)},
        good | {KEY.format(0, "exp_avg").replace("group_idx_0", "group_idx_1"): bucket(end)},
        {name.replace("bucket_idx_0", "bucket_idx_1"): whole for name, whole in good.items()},
        {},
    ]
    for tensors in wrong:
        with pytest.raises(UnknownLayoutError):
            optimizer_namespaces(tensors, SPEC, CORE, WHOLE, 16)
    with pytest.raises(UnknownLayoutError):
        optimizer_namespaces(good, replace(SPEC, layers=3), CORE, WHOLE, 16)
