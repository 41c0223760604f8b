"""The embeddings that the server computes are the last hidden states of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mega_serve.engine.requests import Pooling
from mega_serve.execution.engine_factory import build_engine
from tests.conformance.hf_models import CASES, byte_level, from_hugging_face, save
from tests.engine_fakes import new_request


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("case", ["gpt2", "llama grouped", "qwen 3 with a window", "bloom"])
def test_embeddings_are_the_last_hidden_states_of_transformers(
    tmp_path: Path, case: str, pooling: Pooling
) -> None:
    model = save(CASES[case](), tmp_path / "hf")
    byte_level(tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    options = {"load": str(tmp_path / "run"), "device": "cpu", "kv_cache_memory": 1 << 20}
    core = build_engine({**options, "max_num_batched_tokens": 7, "max_num_seqs": 4, "max_model_len": 20}).core
    prompts = {"a": [1, 2, 3], "b": [4, 1, 0, 7] * 5, "c": [4, 1, 0, 7] * 4 + [2]}
    for request_id, prompt in prompts.items():
        core.add(new_request(request_id, prompt, max_tokens=0, pooling=pooling))
    rows = {}
    while core.has_work:
        rows |= {output.request_id: output.embedding for output in core.step()}
    for request_id, prompt in prompts.items():
        with torch.inference_mode():
            x_TD = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        expected = x_TD[-1] if pooling == "last" else x_TD.mean(0)
        np.testing.assert_allclose(rows[request_id], expected.numpy(), rtol=0, atol=1e-5)
