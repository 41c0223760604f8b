"""Megatron Core loads our checkpoints strictly, and we read its checkpoints: equal logits and bits."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.formats.interface import ReadOptions, WriteOptions
from mega_ckpt.operations.convert import convert
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from tests.megatron_core import reference_process
from tests.megatron_core.small_model import LENGTH, LLAMA, OURS, THEIRS, WORDS, save_random

RELATIVE = 1e-5  # float32 over sums of at most 64 terms, four layers deep


@dataclass(frozen=True)
class Case:
    """A model in our words and in theirs."""

    spec: ModelSpec
    flags: dict[str, Any]


def _gpt(flags: dict[str, Any], **ours: Any) -> Case:
    return Case(gpt(**OURS, **ours), THEIRS | flags)


def _llama(flags: dict[str, Any], **ours: Any) -> Case:
    return Case(llama(**OURS, **{"ffn": 40, "kv_heads": 2, **ours}), THEIRS | LLAMA | flags)


NO_BIAS = {"add_bias_linear": False, "bias_gelu_fusion": False}
CASES = {
    "gpt": _gpt({}),
    "erf-untied": _gpt(
        {"bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True, "norm_epsilon": 0.01},
        activation="gelu_erf",
        tied=False,
        norm_eps=0.01,
    ),
    "no-bias": _gpt(
        NO_BIAS | {"position_embedding_type": "none"},
        activation="gelu_erf",
        bias=False,
        qkv_bias=False,
        positions="none",
    ),
    "asked-for-post-norm": _gpt({"apply_residual_connection_post_layernorm": True}),  # core does not look
    "head-norms": _gpt({"qk_layernorm": True}, qk_norm=True),
    "biased-swiglu": _gpt(
        {"swiglu": True, "bias_gelu_fusion": False, "ffn_hidden_size": 48}, activation="swiglu", ffn=48
    ),
    "part-rotary": _gpt(
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 500},
        positions="rope",
        rotary_fraction=0.5,
        rope_theta=500.0,
    ),
    "squared-relu": _gpt(
        NO_BIAS | {"squared_relu": True, "group_query_attention": True, "num_query_groups": 2},
        activation="squared_relu",
        bias=False,
        qkv_bias=False,
        kv_heads=2,
    ),
    "llama": _llama({}),
    "llama-tied-wide": _llama(
        {"untie_embeddings_and_output_weights": False, "kv_channels": 12}, tied=True, head_dim=12
    ),
    "llama31": _llama(
        {"use_rope_scaling": True, "rope_scaling_factor": 16.0, "rotary_base": 500000},
        rope_scaling=16.0,
        rope_theta=500000.0,
    ),
    "interpolated": _llama({"rotary_seq_len_interpolation_factor": 4}, rope_interpolation=4.0),
    "interleaved": _llama({"rotary_interleaved": True}, rope_interleaved=True),
    "mistral": _llama({"window_size": (4, 0)}, sliding_window=5),
    "qwen2": _llama({"add_qkv_bias": True, "norm_epsilon": 1e-6}, qkv_bias=True, norm_eps=1e-6),
    "qwen3": _llama({"qk_layernorm": True, "kv_channels": 16}, qk_norm=True, head_dim=16),
}

SOME = ("gpt", "erf-untied", "qwen3")
CUT = (*SOME, "biased-swiglu", "llama-tied-wide", "qwen2")
# processes, sizes of tp, pp and vp, and what goes through them
LAYOUTS: tuple[tuple[int, tuple[int, int, int], tuple[str, ...]], ...] = (
    (1, (1, 1, 1), tuple(CASES)),
    (2, (2, 1, 1), CUT),
    (2, (1, 2, 1), SOME[:1]),
    (2, (1, 2, 2), SOME),
)


def _layouts(name: str) -> list[tuple[int, int, int]]:
    return [layout for _, layout, cases in LAYOUTS if name in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, written by us for every layout, loaded by Megatron Core and saved by it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    np.save(folder / "tokens.npy", np.random.default_rng(2).integers(0, WORDS, (2, LENGTH)))
    for seed, (name, case) in enumerate(CASES.items()):
        save_random(folder / name, case.spec, seed=seed)
        convert(folder / name, folder / f"{name}-dist", "mega", "torch_dist")
        for tp, pp, vp in _layouts(name):
            target = WriteOptions(layout=Layout(tp=tp, pp=pp, vp=vp))
            to = folder / f"{name}-core-{tp}{pp}{vp}"
            convert(folder / name, to, "mega", "megatron-core", target=target)
    for ranks in (1, 2):
        wanted = [
            (layout, {name: CASES[name].flags for name in cases})
            for saved_by, layout, cases in LAYOUTS
            if saved_by == ranks
        ]
        reference_process.run(
            "tests.megatron_core.checkpoints:load_and_save", folder, ranks=ranks, wanted=wanted
        )
    return folder


def _logits(checkpoint: Checkpoint, token_BS: torch.Tensor) -> torch.Tensor:
    rows, length = token_BS.shape
    model = build_model(Runtime.single_process(checkpoint.spec))
    fill_weights(model, checkpoint.model_slab)
    with torch.no_grad():
        scores = model(token_BS.flatten(), torch.arange(length).repeat(rows), PackedAttention(rows, length))
    return scores[:, :WORDS].unflatten(0, (rows, length))


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_loads_ours_strictly_in_every_layout_and_computes_our_logits(
    folder: Path, name: str
) -> None:
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
    wanted = _logits(Checkpoint.open(folder / name), tokens)
    assert wanted.std() > 0.1
    for layout in _layouts(name):
        for kind in ("dist", "core"):
            file = folder / f"{name}-{kind}-{''.join(map(str, layout))}.npy"
            found = torch.from_numpy(np.load(file))[..., :WORDS]
            apart = ((found - wanted).abs().max() / wanted.abs().max()).item()
            assert apart <= RELATIVE, f"{file.name}: {apart}"


@pytest.mark.parametrize("name", CASES)
def test_what_megatron_core_saves_in_any_layout_is_our_model_bit_for_bit(
    folder: Path, tmp_path: Path, name: str
) -> None:
    ours = Checkpoint.open(folder / name)
    reading = ReadOptions(vocab=WORDS)
    for layout in _layouts(name):
        for kind, format_name in (("dist", "torch_dist"), ("core", "megatron-core")):
            load = folder / f"{name}-theirs-{kind}-{''.join(map(str, layout))}"
            convert(load, tmp_path / "back", format_name, "mega", reading=reading)
            back = Checkpoint.open(tmp_path / "back")
            assert back.spec == ours.spec
            assert back.iteration == 5
            assert back.tensors[MODEL].keys() == ours.tensors[MODEL].keys()
            for key, tensor in ours.tensors[MODEL].items():
                zero = (0,) * len(tensor.shape)
                whole = Slab(zero, tensor.shape, zero)
                values = back.read_raw(MODEL, key, whole).tobytes()
                assert values == ours.read_raw(MODEL, key, whole).tobytes(), f"{load.name}: {key}"
            shutil.rmtree(tmp_path / "back")
