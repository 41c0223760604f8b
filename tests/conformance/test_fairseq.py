"""A small checkpoint in megatron_11b's eight files, against fairseq's equations in float64."""

from __future__ import annotations

import math
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.operations.convert import convert
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import Checkpoint

PARTS, LAYERS, WIDTH, HEADS, FFN, CONTEXT = 8, 2, 32, 8, 48, 20
GPT2, ROWS = 21, 64  # ids that dict.txt has words for, and rows of the embedding
ARGS = {
    "arch": "transformer_lm_megatron",
    "decoder_layers": LAYERS,
    "decoder_embed_dim": WIDTH,
    "decoder_input_dim": WIDTH,
    "decoder_output_dim": WIDTH,
    "decoder_ffn_embed_dim": FFN,
    "decoder_attention_heads": HEADS,
    "tokens_per_sample": CONTEXT,
    "activation_fn": "gelu",
    "decoder_normalize_before": True,
    "share_decoder_input_output_embed": True,
    "no_scale_embedding": False,
    "adaptive_softmax_cutoff": None,
    "model_parallel_size": PARTS,
}
Whole = dict[str, np.ndarray]


def _whole_tensors() -> Whole:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (ROWS, WIDTH)}
    for i in range(LAYERS):
        prefix = f"layers.{i}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{prefix}self_attn.{part}.weight"] = (WIDTH, WIDTH)
            shapes[f"{prefix}self_attn.{part}.bias"] = (WIDTH,)
        shapes |= {prefix + "fc1.weight": (FFN, WIDTH), prefix + "fc1.bias": (FFN,)}
        shapes |= {prefix + "fc2.weight": (WIDTH, FFN), prefix + "fc2.bias": (WIDTH,)}
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{prefix}{norm}.weight": (WIDTH,), f"{prefix}{norm}.bias": (WIDTH,)}
    shapes |= {"layer_norm.weight": (WIDTH,), "layer_norm.bias": (WIDTH,)}
    return {n: rng.normal(0.1, 0.2, s).astype(np.float32) for n, s in shapes.items()}


def _cut(name: str) -> int | None:
    """The dim along which fairseq's modules cut a tensor."""
    if name.endswith(("out_proj.weight", "fc2.weight")):
        return 1
    return (
        0
        if "embed" in name or "fc1" in name or name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        else None
    )


def _save(whole: Whole, folder: Path) -> list[int]:
    """Write the files; give the id of every GPT-2 id."""
    folder.mkdir()
    for rank in range(PARTS):
        model = {}
        for name, array in whole.items():
            dim, tensor = _cut(name), torch.from_numpy(array)
            model["decoder." + name] = tensor if dim is None else tensor.chunk(PARTS, dim)[rank].clone()
        model["decoder.embed_positions._float_tensor"] = torch.zeros(1)
        model["decoder.version"] = torch.tensor([3.0])
        state = {
            "args": Namespace(**ARGS),
            "model": model,
            "optimizer_history": [{"num_updates": 9, "optimizer_name": "FusedAdam"}],
            "extra_state": {"epoch": 1, "train_iterator": {"epoch": 1}},
            "last_optimizer_state": {
                "state": {0: {"step": 9, "exp_avg": torch.zeros(3)}},
                "param_groups": [],
            },
            "task_state": {},
        }
        torch.save(state, folder / f"model-model_part-{rank}.pt")
    ids = list(range(GPT2))
    random.Random(3).shuffle(ids)
    words = [*map(str, ids[:9]), "madeupword0000", *map(str, ids[9:]), "madeupword0001"]
    (folder / "dict.txt").write_text("".join(f"{word} {900 - i}\n" for i, word in enumerate(words)), "utf-8")
    return [4 + words.index(str(i)) for i in range(GPT2)]


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def _norm(x: np.ndarray, whole: Whole, name: str) -> np.ndarray:
    middle = x - x.mean(-1, keepdims=True)
    return (
        middle / np.sqrt((middle**2).mean(-1, keepdims=True) + 1e-5) * whole[name + ".weight"]
        + whole[name + ".bias"]
    )


def _forward(whole: Whole, ids: np.ndarray) -> np.ndarray:
    """Scores of a sequence of fairseq's ids: pre-norm decoder with sinusoids from position padding + 1 on."""

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ whole[name + ".weight"].T + whole[name + ".bias"]

    length, padding, half = len(ids), 1, WIDTH // 2
    rate = np.exp(np.arange(half) * -(math.log(10000) / (half - 1)))
    angle = (padding + 1 + np.arange(length))[:, None] * rate
    x = whole["embed_tokens.weight"][ids] * math.sqrt(WIDTH)
    x = x + np.concatenate((np.sin(angle), np.cos(angle)), 1)
    for i in range(LAYERS):
        prefix = f"layers.{i}."
        h = _norm(x, whole, prefix + "self_attn_layer_norm")
        q, k, v = (linear(h, f"{prefix}self_attn.{part}_proj").reshape(length, HEADS, -1) for part in "qkv")
        scores = np.einsum("shw,thw->hst", q * (WIDTH // HEADS) ** -0.5, k)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hst,thw->shw", weights, v).reshape(length, WIDTH)
        x = x + linear(mixed, prefix + "self_attn.out_proj")
        h = linear(_norm(x, whole, prefix + "final_layer_norm"), prefix + "fc1")
        x = x + linear(h * 0.5 * (1 + _erf(h / math.sqrt(2))), prefix + "fc2")
    return _norm(x, whole, "layer_norm") @ whole["embed_tokens.weight"].T


def _mega_logits(run: Path, ids: np.ndarray) -> Any:
    checkpoint = Checkpoint.open(run)
    model = build_model(Runtime.single_process(checkpoint.spec))
    fill_weights(model, checkpoint.model_slab)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids), torch.arange(len(ids)), PackedAttention(1, len(ids)))
    return logits[:, : checkpoint.spec.vocab].numpy()


@pytest.mark.parametrize("load", ["model", "model/model.pt"])
def test_logits_are_fairseqs_with_gpt2s_ids_in_their_places(load: str, tmp_path: Path) -> None:
    whole = _whole_tensors()
    theirs_of = _save(whole, tmp_path / "model")
    result = convert(tmp_path / load, tmp_path / "run", "fairseq", "mega")
    assert result.dropped == ("the optimizer's state", "the schedule")
    # the last of GPT-2's ids ends a document, as </s> (2) does there; what is no id of GPT-2's follows
    theirs_of, unused = [*theirs_of[:-1], 2], theirs_of[-1]
    theirs_of += [0, 1, unused, 3, *(i for i in range(4, ROWS) if i not in {*theirs_of, unused})]
    assert sorted(theirs_of) == list(range(ROWS))
    ids = np.random.default_rng(1).integers(0, GPT2, CONTEXT)
    wanted = _forward({n: a.astype(np.float64) for n, a in whole.items()}, np.array(theirs_of)[ids])
    assert wanted.std() > 0.1
    np.testing.assert_allclose(
        _mega_logits(tmp_path / "run", ids), wanted[:, theirs_of], atol=2e-5, rtol=1e-5
    )
