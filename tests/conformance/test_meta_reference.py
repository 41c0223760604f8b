"""Meta's own Llama code loads the folders that mega-ckpt writes, with equal logits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.operations.convert import convert
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, llama
from tests.checkpoint_fixture import save_whole
from tests.conformance.hf_models import mega_logits
from tests.conformance.meta_model import logits

TWO = llama(layers=2, hidden=64, heads=8, kv_heads=8, ffn=96, vocab=64, max_seq_len=64, vocab_multiple=1)
THREE = replace(TWO, kv_heads=4, rope_theta=500000.0)
SCALED = {
    "rope_scaling": 8.0,
    "rope_scaling_low": 1.0,
    "rope_scaling_high": 4.0,
    "rope_scaling_context": 8192,
}
MODELS: dict[str, ModelSpec] = {
    "llama 2": TWO,
    "llama 2 of 70B": replace(TWO, kv_heads=2),
    "llama 3": THREE,
    "llama 3.1": replace(THREE, max_seq_len=16384, **SCALED),
    "an uneven feed-forward": replace(THREE, ffn=106, norm_eps=1e-6),
    "a tied head": replace(THREE, tied=True),
}
TOKENS = torch.randint(0, TWO.vocab, (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("parts", [1, 2])
def test_metas_own_llama_has_our_logits(parts: int, tmp_path: Path) -> None:
    for module in ("llama_models", "fairscale"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: the Makefile says how")
    folders = {}
    for number, (name, spec) in enumerate(MODELS.items()):
        rng = np.random.default_rng(number)
        weights = {
            row.name: (rng.standard_normal(row.shape) * 0.2 + 0.1).astype(np.float32)
            for row in table(spec)
            if row.tied_to is None
        }
        save_whole(tmp_path / name, spec, {MODEL: weights})
        folders[name] = tmp_path / f"{name} of Meta's"
        target = WriteOptions(layout=Layout(tp=parts))
        convert(tmp_path / name, folders[name], "mega", "meta", target=target)
    theirs = logits(list(folders.values()), parts, TOKENS, tmp_path / "meet")
    for name, wanted in zip(folders, theirs, strict=True):
        found = mega_logits(Checkpoint.open(tmp_path / name), TOKENS)
        assert wanted.std() > 0.1
        torch.testing.assert_close(
            found, wanted, atol=1e-5, rtol=1e-5, msg=lambda text, case=name: f"{case}: {text}"
        )
