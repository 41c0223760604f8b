"""Training of BERT equals Megatron Core's step by step, from the same weights and batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_ckpt.formats.megatron.names import CORE_BERT, chunk_tensors
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_train.data.encoder.bert_reader import LABEL, ORDER, REAL, TOKEN, TYPE
from mega_train.engine.trainer import Trainer
from tests.encoder_fixture import write_corpus
from tests.megatron_core import reference_process
from tests.megatron_core.runs import (
    STEPS,
    Case,
    TrainingResult,
    optimizer_options,
    start_trainer,
    whole_tensors,
)

SAMPLES = "--make-vocab-size-divisible-by 1 --mask-prob 0.3"
CASES: dict[str, Case] = {
    "bert": Case(SAMPLES, "bert"),
    "gelu by erf, two micro-batches": Case(f"{SAMPLES} --no-bias-gelu-fusion --global-batch-size 8", "bert"),
    "without a binary head": Case(f"{SAMPLES} --bert-no-binary-head", "bert"),
    "padding that is not computed": Case(f"{SAMPLES} --unpad-samples", "bert"),
    "tp": Case(SAMPLES, "bert", tp=2),
    "pp": Case(f"{SAMPLES} --global-batch-size 12", "bert", pp=2),
}


def _rank_tensors(spec: ModelSpec, ours: Mapping[str, Tensor], case: Case) -> list[dict[str, Tensor]]:
    """Whole tensors of ours as the ranks of their model have them, by their names."""
    layout = Layout(tp=case.tp, pp=case.pp)
    ranks = []
    for pp in range(case.pp):
        for tp in range(case.tp):
            tensors = {}
            for foreign in chunk_tensors(spec, CORE_BERT, layout, tp=tp, pp=pp):
                read = ours[foreign.ours].numpy()
                values = foreign.assemble(read.dtype, lambda slab, read=read: read[slab.in_global])
                tensors[foreign.name] = torch.from_numpy(values)
            ranks.append(tensors)
    return ranks


def _micro_batches(run: Trainer) -> list[dict[str, Tensor]]:
    count = run.config.num_micro_batches(run.state.global_batch_size)
    batches = run.loader.load(run.train, run.state.consumed_samples, count, None).batches
    rows = {"token": TOKEN, "label": LABEL, "real": REAL}
    if run.config.spec.token_types is not None:
        rows["type"] = TYPE
    return [
        {name: torch.from_numpy(batch[:, row]) for name, row in rows.items()}
        | {"order": torch.from_numpy(batch[:, ORDER, 0])}
        for batch in batches
    ]


def _train_ours(case: Case, data: Path, file: Path) -> TrainingResult:
    run = start_trainer(case, data)
    spec, clip = run.config.spec, run.config.run.optimizer.clip

    def shares(values_of: Any, scale: float = 1.0) -> list[dict[str, Tensor]]:
        tensors = {name: values * scale for name, values in whole_tensors(run, values_of).items()}
        return _rank_tensors(spec, tensors, case)

    result = TrainingResult(initial=shares(run.sharding.main_params))
    steps = list[Any]()
    for step in range(STEPS):
        steps.append(_micro_batches(run))
        loss, norm = run.step(run.state.lr)
        if not step:  # what was clipped is undone
            result.gradients = shares(run.grad_sync.shards, max(1.0, (norm + 1e-6) / clip))
        result.losses.append(loss)
        result.terms.append(dict(run.optimizer_step.loss_terms))
        result.norms.append(norm)
    result.weights = shares(run.sharding.main_params)
    config = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "ffn_hidden_size": spec.ffn,
        "layernorm_epsilon": spec.norm_eps,
        "bias_activation_fusion": spec.activation == "gelu_tanh",
    }
    inputs = {"config": config, "token_types": spec.token_types or 0, "vocab": spec.vocab}
    inputs |= {"length": spec.max_seq_len, "binary_head": spec.binary_head, "tp": case.tp, "pp": case.pp}
    inputs |= {"weights": result.initial, "steps": steps} | optimizer_options(run, case)
    torch.save(inputs, file)
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingResult]:
    folder = tmp_path_factory.mktemp("trained")
    data = write_corpus(folder / "sentences")
    results = {name: _train_ours(case, data, folder / f"{name}.pt") for name, case in CASES.items()}
    for ranks in (1, 2):
        names = [name for name, case in CASES.items() if case.ranks == ranks]
        reference_process.run("tests.megatron_core.bert_training:train", folder, ranks=ranks, cases=names)
        for name in names:
            files = [folder / f"{name}-{rank}.pt" for rank in range(ranks)]
            results[name].theirs = [torch.load(file, weights_only=False) for file in files]
    return results


@pytest.mark.parametrize("name", CASES)
def test_every_step_has_their_losses_and_norm(name: str, results: dict[str, TrainingResult]) -> None:
    ours = results[name]
    for rank in ours.theirs:
        assert rank["norms"] == pytest.approx(ours.norms, rel=1e-5)
        if rank["losses"]:  # of the last stage
            assert [sum(terms) for terms in rank["losses"]] == pytest.approx(ours.losses, rel=1e-5)
            for terms, wanted in zip(rank["losses"], ours.terms, strict=True):
                assert terms == pytest.approx(list(wanted.values()) or terms, rel=1e-5)
    assert any(rank["losses"] for rank in ours.theirs)
    moved = max((w - ours.initial[0][key]).abs().max() for key, w in ours.weights[0].items())
    assert moved > 0.02, "the weights did not change, so that little was compared"


@pytest.mark.parametrize("name", CASES)
def test_the_first_gradient_and_the_last_weights_are_theirs(
    name: str, results: dict[str, TrainingResult]
) -> None:
    ours = results[name]
    largest = max(tensor.abs().max() for rank in ours.gradients for tensor in rank.values())
    for gradients, weights, rank in zip(ours.gradients, ours.weights, ours.theirs, strict=True):
        assert gradients.keys() == rank["gradients"].keys()
        for key, gradient in rank["gradients"].items():
            # the terms of a bias of keys or of the binary head cancel out
            close = 1e-5 * max(gradient.abs().max(), 5e-2 * largest)
            assert (gradients[key] - gradient).abs().max() <= close, key
        for key, weight in rank["weights"].items():
            assert (weights[key] - weight).abs().max() <= 1e-5, key
