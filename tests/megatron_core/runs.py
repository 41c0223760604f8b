"""Training runs that Megatron Core repeats with the same weights, batches and options."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.formats.megatron.args import from_spec
from mega_ckpt.formats.megatron.names import CORE, chunk_tensors
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter, smallest_dtype
from mega_schema.parallel_layout import Layout
from mega_schema.spec import Family, ModelSpec
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.cli import app
from mega_train.config import RunConfig
from mega_train.engine.forward_step import split_batch
from mega_train.engine.train import prepare
from mega_train.engine.trainer import Trainer

VOCAB = 96  # of ids 0 to 95, the last of them ends a document; it needs no padding on two ranks
STEPS = 25
COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24 "
    f"--make-vocab-size-divisible-by 16 --micro-batch-size 4 --train-iters {STEPS} --lr 5e-3 --min-lr 5e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0.1 --clip-grad 0.7 --adam-beta2 0.95 "
    "--adam-eps 1e-4 --init-method-std 0.1 --split 100,0,0 --eval-iters 0 --seed 11 --log-num-zeros-in-grad"
)


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        words: of the command line, beside COMMON.
        theirs: arguments of theirs that no flag of ours says.
    """

    words: str = ""
    family: Family = "gpt"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    theirs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def half(self) -> bool:
        return "--bf16" in self.words or "--fp16" in self.words


@dataclass
class TrainingResult:
    """What came of a case here and there; tensors of ours as their ranks have them, by their names."""

    initial: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    terms: list[dict[str, float]] = field(default_factory=list)  # of the losses, by Megatron's names
    norms: list[float] = field(default_factory=list)
    zeros: list[float | None] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    theirs: list[dict[str, Any]] = field(default_factory=list)


def corpus(folder: Path) -> Path:
    """Documents of any length, each id the one before plus one of a few numbers."""
    rng, prefix = np.random.default_rng(3), folder / "corpus"
    identity = open_tokenizer("NullTokenizer", vocab_size=VOCAB - 1).identity
    with IndexedWriter(prefix, smallest_dtype(VOCAB), info=DatasetInfo(tokenizer=identity)) as out:
        for _ in range(300):
            steps = rng.choice([1, 7, 7, 30], rng.integers(2, 60))
            out.add([*(steps.cumsum() % (VOCAB - 1)), VOCAB - 1])
            out.end_document()
    return prefix


def start_trainer(case: Case, data: Path) -> Trainer:
    """The run of these flags, as the command line makes it."""
    words = [*COMMON.split(), *case.words.split(), "--data-path", str(data)]
    context = app.commands[case.family].make_context(case.family, words)
    params = dict(context.params)
    ready = prepare(
        load_config(RunConfig, params.pop("config"), params, params.pop("sets")), case.family, World()
    )
    return Trainer(ready.config, Mesh.join(ready.config.layout, World()), ready.datasets)


def whole_tensors(run: Trainer, values_of: Any) -> dict[str, Tensor]:
    """The values of every parameter, in their shapes."""
    return {
        row.name: values.detach().view(row.local_shape(1)).float().clone()
        for (row, _), values in zip(run.params, values_of, strict=True)
    }


def rank_tensors(spec: ModelSpec, ours: Mapping[str, Tensor], case: Case) -> list[dict[str, Tensor]]:
    """Whole tensors of ours as the ranks of their model have them, by their names."""

    def tensor(foreign: ForeignTensor) -> Tensor:
        read = ours[foreign.ours].numpy()
        return torch.from_numpy(foreign.assemble(read.dtype, lambda slab: read[slab.in_global]))

    layout = Layout(tp=case.tp, pp=case.pp)
    return [
        {foreign.name: tensor(foreign) for foreign in chunk_tensors(spec, CORE, layout, tp=tp, pp=pp)}
        for pp in range(case.pp)
        for _ in range(case.dp)
        for tp in range(case.tp)
    ]


def micro_batches(run: Trainer) -> list[dict[str, Tensor]]:
    """Of the next step, as theirs takes them."""
    samples, batches = run.train, []
    for numbers in run.loader.samplers[samples].micro_batches(
        run.state.consumed_samples, run.config.num_micro_batches(run.state.global_batch_size)
    ):
        batch = torch.from_numpy(np.stack([samples[number] for number in numbers]))
        token_BS, target_BS, place_BS, document_BS = split_batch(batch, run.config.run.data, run.config.eod)
        hidden = torch.ones(token_BS.shape[1], token_BS.shape[1]).triu(1).bool()[None, None]
        if document_BS is not None:
            hidden = hidden | (document_BS[:, None, :, None] != document_BS[:, None, None, :])
        batches.append({"token": token_BS, "target": target_BS, "place": place_BS, "hidden": hidden})
    return batches


def options_of(run: Trainer, case: Case) -> dict[str, Any]:
    """The run's options as theirs take them."""
    train = run.config.run.train
    dtype = torch.bfloat16 if train.bf16 else torch.float16 if train.fp16 else torch.float32
    multiple = run.config.spec.vocab_multiple * case.tp
    args = from_spec(run.config.spec, "the model", core=True) | {
        "padded_vocab_size": -(-VOCAB // multiple) * multiple,
        "num_experts": None,
        "bf16": train.bf16,
        "fp16": train.fp16,
        "params_dtype": dtype,
        "sequence_parallel": False,
        "calculate_per_token_loss": train.per_token_loss,
        "layernorm_zero_centered_gamma": False,
    }
    return {"args": Namespace(**args | case.theirs), **optimizer_options(run, case)}


def optimizer_options(run: Trainer, case: Case) -> dict[str, Any]:
    """The options of the run's optimizer and of its schedules as theirs take them."""
    o, train, samples = run.config.run.optimizer, run.config.run.train, run.config.global_batch_size
    dtype = torch.bfloat16 if train.bf16 else torch.float16 if train.fp16 else torch.float32
    optimizer = {
        "optimizer": o.name, "lr": o.lr, "min_lr": o.min_lr, "decoupled_lr": o.decoupled_lr,
        "decoupled_min_lr": o.decoupled_min_lr, "weight_decay": o.weight_decay, "adam_beta1": o.beta1,
        "adam_beta2": o.beta2, "adam_eps": o.eps, "sgd_momentum": o.sgd_momentum, "clip_grad": o.clip,
        "bf16": train.bf16, "params_dtype": dtype, "log_num_zeros_in_grad": True, "fp16": train.fp16,
        "loss_scale_window": train.loss_scale_window, "initial_loss_scale": train.initial_loss_scale,
        "use_distributed_optimizer": case.dp > 1,
    }  # fmt: skip
    ends = (o.start_weight_decay, o.end_weight_decay)
    start, end = (o.weight_decay if decay is None else decay for decay in ends)
    schedule = {
        "init_lr": o.warmup_initial, "max_lr": o.lr, "min_lr": o.min_lr,
        "lr_warmup_steps": o.warmup_iterations * samples,
        "lr_decay_steps": (o.decay_iterations or STEPS) * samples,
        "lr_decay_style": o.decay_style, "start_wd": start, "end_wd": end, "wd_incr_steps": STEPS * samples,
        "wd_incr_style": o.weight_decay_style, "wsd_decay_steps": (o.wsd_iterations or 0) * samples,
        "lr_wsd_decay_style": o.wsd_style,
    }  # fmt: skip
    return {"optimizer": optimizer, "schedule": schedule}


def train_case(case: Case, data: Path, file: Path) -> TrainingResult:
    """Train a case, and leave in a file for theirs what they begin with and read."""
    run = start_trainer(case, data)
    clip, steps = run.config.run.optimizer.clip, list[Any]()

    def shares(values_of: Any, scale: float = 1.0) -> list[dict[str, Tensor]]:
        return rank_tensors(
            run.config.spec,
            {key: tensor * scale for key, tensor in whole_tensors(run, values_of).items()},
            case,
        )

    result = TrainingResult(initial=shares(run.sharding.main_params))
    for step in range(STEPS):
        steps.append(micro_batches(run))
        result.rates.append(run.state.lr)
        loss, norm = run.step(run.state.lr)
        if not step:  # what was clipped is undone
            result.gradients = shares(run.grad_sync.shards, max(1.0, (norm + 1e-6) / clip) if clip else 1.0)
        result.losses.append(loss)
        result.norms.append(norm if math.isfinite(norm) else math.nan)  # skipped
        result.zeros.append(run.optimizer_step.extra.get("num-zeros"))
        result.scales.append(run.loss_scaler.value)
    result.weights = shares(run.sharding.main_params)
    begin = {"tp": case.tp, "pp": case.pp, "weights": result.initial, "steps": steps}
    torch.save(options_of(run, case) | begin, file)
    return result
