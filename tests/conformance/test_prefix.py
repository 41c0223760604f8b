"""Prefix language models compute what transformers' models do with the same mask in four dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mega_model.distributed.mesh import Mesh
from mega_model.prefix_attention import PrefixAttention, find_prefix_spans
from mega_schema.app.config import load_config
from mega_schema.checkpoint.reader import Checkpoint
from mega_train.config import RunConfig
from mega_train.data.prefix_reader import PREFIX, PrefixRule
from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN
from mega_train.engine.prefix_forward_step import PrefixForwardStep
from mega_train.resolve import resolve
from tests.conformance.hf_models import CASES, build_for_inference, from_hugging_face, save

ROWS, LENGTH, EOD = 4, 20, 7
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def _batch(per_document: bool) -> torch.Tensor:
    rule = PrefixRule(
        3, EOD, per_document=per_document, resets_positions=per_document, targets_only=per_document
    )
    token_BS1 = np.random.default_rng(0).integers(0, 61, (ROWS, LENGTH + 1))
    token_BS1[:, [4, 11]] = EOD
    return torch.from_numpy(np.stack([rule.add_prefixes(row, i) for i, row in enumerate(token_BS1)]))


def _prefix_mask(batch: torch.Tensor) -> torch.Tensor:
    """(B, 1, S, S) bool: which keys a query sees."""
    document_BS, prefix_BS = batch[:, EXAMPLE, :-1], batch[:, PREFIX, :-1] == 1
    is_before = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    same = document_BS[:, :, None] == document_BS[:, None, :]
    return (same & (is_before | prefix_BS[:, None, :]))[:, None]


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("model", ["gpt2", "llama grouped"])
def test_logits_loss_and_gradients_are_those_of_transformers(
    tmp_path: Path, model: str, per_document: bool
) -> None:
    judge = save(CASES[model](), tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    checkpoint = Checkpoint.open(tmp_path / "run")
    ours = build_for_inference(checkpoint)
    batch = _batch(per_document)
    assert _prefix_mask(batch).triu(1).any(dim=(1, 2, 3)).sum() > 1, "a causal mask would not do"
    mask = torch.where(_prefix_mask(batch), 0.0, torch.finfo(torch.float32).min)
    wanted = judge(batch[:, TOKEN, :-1], attention_mask=mask, position_ids=batch[:, POSITION, :-1]).logits
    spans = find_prefix_spans(batch[:, EXAMPLE, :-1].numpy(), batch[:, PREFIX, :-1].numpy())
    with torch.no_grad():
        found = ours(
            batch[:, TOKEN, :-1].flatten(),
            batch[:, POSITION, :-1].flatten(),
            PrefixAttention(ROWS, LENGTH, spans),
        )[:, :61]
    torch.testing.assert_close(found, wanted.detach().flatten(0, 1), **TOLERANCE)
    words = [
        "train.train_iters=1",
        "optimizer.lr=1.0",
        "objective.prefix_lm=true",
        f"batch.seq_length={LENGTH}",
    ]
    words += [f"batch.micro_batch_size={ROWS}"]
    run = load_config(RunConfig, None, {}, words)
    spec = checkpoint.spec
    config = resolve(run, spec.family, 1, corpus=None, loaded_spec=spec, cuda=False)
    loss = PrefixForwardStep([ours], config, Mesh(), [batch.numpy()], 1.0, None).forward(0, 0, None)
    losses = F.cross_entropy(wanted.flatten(0, 1), batch[:, TOKEN, 1:].flatten(), reduction="none")
    learnt_T = batch[:, LEARNT, 1:].flatten()
    wanted_loss = (losses * learnt_T).sum() / learnt_T.sum()
    torch.testing.assert_close(loss, wanted_loss, **TOLERANCE)
    loss.backward()
    wanted_loss.backward()
    grad = ours.get_parameter("embed.weight").grad
    assert grad is not None
    torch.testing.assert_close(grad[:61], judge.get_input_embeddings().weight.grad, **TOLERANCE)
