"""Megatron Core loads our BERT's `torch_dist` folders strictly, and we read its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.encoder import Encoder
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.spec import ModelSpec, bert
from tests.megatron_core import reference_process
from tests.megatron_core.small_model import LENGTH, OURS, THEIRS, WORDS, save_random
from tests.selection import requested_values

RELATIVE = 1e-5  # float32 over sums of at most 64 terms, four layers deep
LAYOUTS = ((1, 1), (2, 1), (1, 2))  # sizes of tp and pp; what they leave of two ranks is dp


@dataclass(frozen=True)
class Case:
    """A model in our words and in theirs."""

    spec: ModelSpec
    flags: dict[str, Any]


CASES = {
    "bert": Case(bert(**OURS), THEIRS | {"bert_binary_head": True}),
    "without-binary-head": Case(
        bert(**OURS, token_types=None, pooler=False, binary_head=False), THEIRS | {"bert_binary_head": False}
    ),
    "erf-groups": Case(
        bert(**OURS, activation="gelu_erf", kv_heads=2, norm_eps=0.01),
        THEIRS
        | {"bert_binary_head": True, "bias_gelu_fusion": False, "norm_epsilon": 0.01}
        | {"group_query_attention": True, "num_query_groups": 2}
        # which their BERT does not look at
        | {"qk_layernorm": True, "openai_gelu": True, "apply_residual_connection_post_layernorm": True},
    ),
}


NAMES = [*("bert", "without-binary-head"), pytest.param("erf-groups", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases asked for, written by us, loaded by Megatron Core in every layout and saved by it."""
    folder = tmp_path_factory.mktemp("berts")
    rng = np.random.default_rng(2)
    real = np.ones((2, LENGTH), np.int64)
    real[1, LENGTH // 2 :] = 0
    token, token_type = rng.integers(0, WORDS, (2, LENGTH)), rng.integers(0, 2, (2, LENGTH))
    np.savez(folder / "batch.npz", token=token, type=token_type, real=real)
    asked = requested_values(request, "name")
    for seed, (name, case) in enumerate(CASES.items()):
        save_random(folder / name, case.spec, seed=seed)
        convert(folder / name, folder / f"{name}-dist", "mega", "torch_dist")
    body = "tests.megatron_core.bert_checkpoints:load_and_save"
    flags = {name: case.flags for name, case in CASES.items() if name in asked}
    reference_process.run(body, folder, ranks=2, layouts=LAYOUTS, cases=flags)
    return folder


def _logits(checkpoint: Checkpoint, folder: Path) -> dict[str, torch.Tensor]:
    """Those of the tokens that are not padding, and of the pairs."""
    batch = {name: torch.from_numpy(values) for name, values in np.load(folder / "batch.npz").items()}
    model = load_model(checkpoint.spec, checkpoint.model_slab)
    assert isinstance(model, Encoder)
    attend = PackedAttention(2, LENGTH, batch["real"], causal=False)
    types = batch["type"].flatten() if checkpoint.spec.token_types else None
    with torch.no_grad():
        x_TD = model.hidden_states(
            batch["token"].flatten(), torch.arange(LENGTH).repeat(2), attend, token_type_T=types
        )
        logits = {"words": model.logits(x_TD)[batch["real"].bool().flatten(), :WORDS]}
        if checkpoint.spec.binary_head:
            logits["binary"] = model.binary_logits(x_TD, torch.tensor([0, LENGTH]))
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_megatron_core_loads_ours_strictly_and_computes_our_logits(folder: Path, name: str) -> None:
    wanted = _logits(Checkpoint.open(folder / name), folder)
    is_real = np.load(folder / "batch.npz")["real"].astype(bool)
    for tp, pp in LAYOUTS:
        theirs = dict(np.load(folder / f"{name}-{tp}{pp}.npz"))
        theirs["words"] = theirs["words"][is_real][:, :WORDS]
        assert theirs.keys() == wanted.keys()
        for head, scores in wanted.items():
            apart = ((torch.from_numpy(theirs[head]) - scores).abs().max() / scores.abs().max()).item()
            assert scores.std() > 0.01
            assert apart <= RELATIVE, f"{head} {tp}{pp}: {apart}"


@pytest.mark.parametrize("name", NAMES)
def test_what_megatron_core_saves_in_any_layout_is_our_model_bit_for_bit(
    folder: Path, tmp_path: Path, name: str
) -> None:
    ours = Checkpoint.open(folder / name)
    for tp, pp in LAYOUTS:
        load, back = folder / f"{name}-theirs-{tp}{pp}", tmp_path / f"{tp}{pp}"
        convert(load, back, "torch_dist", "mega", reading=ReadOptions(vocab=WORDS))
        checkpoint = Checkpoint.open(back)
        assert checkpoint.spec == ours.spec
        assert checkpoint.iteration == 5
        assert checkpoint.tensors[MODEL].keys() == ours.tensors[MODEL].keys()
        for key, tensor in ours.tensors[MODEL].items():
            whole = whole_slab(tensor.shape)
            values = checkpoint.read_raw(MODEL, key, whole).tobytes()
            assert values == ours.read_raw(MODEL, key, whole).tobytes(), f"{load.name}: {key}"
