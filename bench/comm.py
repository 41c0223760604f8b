"""Count bytes and calls of all collectives in a training step, and compare them with the papers' formulas.

    python bench/comm.py [--json FILE]

Small models on gloo ranks of this machine; every collective and message of one optimizer step is counted as torch
dispatches it, on every rank, and compared with `formulas`: equal to the byte, or the command fails. Bytes of a call
are those of the whole tensor: what an all-reduce sums, an all-gather makes, a reduce-scatter is given, a message
carries. On a ring of n ranks each of them sends 2(n-1)/n of an all-reduce's and (n-1)/n of the other two's.

tensor      4 all-reduces of tokens x hidden per layer and micro-batch (arXiv:1909.08053 §3)
sequence    each of them a reduce-scatter and an all-gather, the same bytes on a ring (arXiv:2205.05198 §4.2.2);
            and what backward gathers again since only a share of it was kept: 2 per layer
pipeline    tokens x hidden per micro-batch, direction and stage boundary (arXiv:2104.04473 §3.2)
context     keys and values of all tokens gathered, their gradients scattered (arXiv:2407.21783 §3.3.2)
replicas    the gradients once per step; cut, they are scattered and the weights gathered (arXiv:1910.02054 §7)
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import RunConfig
from mega_train.distributed.bucket_layout import assign_buckets
from mega_train.engine.trainer import Trainer
from mega_train.resolve import resolve

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "allreduce": "all-reduce",
        "allgather_base": "all-gather",
        "reduce_scatter_base": "reduce-scatter",
        "recv": "receive",
    }
)
Count = dict[str, tuple[int, int]]  # "axis operation" -> calls, bytes

FLOAT = 4
VOCAB = 101
COMMON = (
    f"model.vocab_size={VOCAB}", "model.make_vocab_size_divisible_by=8",
    "model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=8",
    "batch.seq_length=16", "batch.global_batch_size=4", "train.train_iters=10", "optimizer.lr=0.01",
    "evaluation.eval_iters=0",
)  # fmt: skip
TP2, TP4, PP2, CP2 = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.tensor_model_parallel_size=4",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.context_parallel_size=2",
)
SEQUENCE, KEYS_2, BF16 = "parallel.sequence_parallel=true", "model.num_query_groups=2", "train.bf16=true"
LAYOUTS: Mapping[int, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        2: (
            (TP2,),
            (TP2, SEQUENCE),
            (PP2,),
            (PP2, "parallel.num_virtual_stages_per_pipeline_rank=2"),
            (PP2, "parallel.pipeline_schedule=zero-bubble"),
            (CP2,),
            (),
            ("parallel.zero_stage=1", BF16),
            ("parallel.zero_stage=2",),
        ),
        4: (
            (TP4,),
            (TP4, SEQUENCE, BF16),
            (TP4, SEQUENCE, KEYS_2),
            (TP2, PP2, SEQUENCE),
            (TP2, CP2, KEYS_2),
            (TP2,),
            ("parallel.pipeline_model_parallel_size=4",),
        ),
    }
)


class CallCounter(TorchDispatchMode):
    """Counts the communication of each axis while it is enabled."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        axes = (mesh.cp, mesh.tp, mesh.dp, mesh.pp, mesh.replicas)
        self.names = {axis.group.group_name: axis.name for axis in axes if axis.group is not None}
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            box = next(a for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
            # a pipeline's lines are groups of their own
            key = f"{self.names.get(dist.ProcessGroup.unbox(box).group_name, 'pp')} {NAMES.get(name, name)}"
            self.calls[key] += 1
            self.bytes[key] += max(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Count:
        return {key: (self.calls[key], self.bytes[key]) for key in self.calls}


def _is_group(box: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(box._type())


def formulas(run: Trainer) -> Count:
    """Compute the communication of this rank's step by the papers, and that of loss and optimizer."""
    plan, mesh, counter = run.config, run.mesh, CallCounter(run.mesh)
    t, spec, micros = mesh.tp.size, plan.spec, plan.accumulation_steps
    stages = [model.stage for model in run.sharding.models]
    layers = sum(len(stage.layers) for stage in stages)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    activation = 2 if plan.run.train.bf16 else FLOAT
    tokens = plan.micro_batch_size * plan.seq_length // mesh.cp.size
    stream = tokens * spec.hidden * activation  # of one micro-batch, whole

    def add(key: str, calls: int, size: int) -> None:
        if calls:
            counter.calls[key] += calls
            counter.bytes[key] += calls * size

    if t > 1:
        if mesh.tp.sequence:
            add("tp all-gather", micros * (4 * layers + first + last), stream)
            add("tp reduce-scatter", micros * (4 * layers + first + last), stream)
            add("tp all-gather", micros * 2 * layers, stream)  # of what was kept in shares
            whole = sum(row.size for row, _ in run.params if row.split is None)
            add("tp all-reduce", 1, FLOAT * whole)  # gradients of norms and biases, over the shares
        else:
            add("tp all-reduce", micros * (4 * layers + first + last), stream)
        if last:  # the loss: a maximum and two sums per token
            add("tp all-reduce", micros, FLOAT * tokens)
            add("tp all-reduce", micros, FLOAT * 2 * tokens)
        if spec.kv_heads < t:  # gradients of heads that several ranks hold
            rows = 2 * spec.kv_heads * spec.head_dim
            add("tp all-reduce", layers, FLOAT * rows * spec.hidden)
            add("tp all-reduce", layers * spec.qkv_bias, FLOAT * rows)
        add("tp all-reduce", 1, FLOAT)  # the gradient's norm
    if mesh.pp.size > 1:
        passed = stream // (t if mesh.tp.sequence else 1)
        ends = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
        add("pp send", micros * ends, passed)
        add("pp receive", micros * ends, passed)
        if spec.tied and (first or last):
            head = FLOAT * spec.hidden * run.rt.table["embed.weight"].local_shape(t)[0]
            add("pp send", 1, head)
            add("pp receive", 1, head)
        add("pp all-reduce", 2, FLOAT)  # the loss, the gradient's norm
    if mesh.cp.size > 1:
        keys = 2 * max(spec.kv_rows // t, spec.head_dim) * tokens * mesh.cp.size * activation
        add("cp all-gather", micros * layers, keys)
        add("cp reduce-scatter", micros * layers, keys)
    if mesh.replicas.size > 1:
        _add_replicas(add, run, activation)
    return counter.counts


def _add_replicas(add: Callable[[str, int, int], None], run: Trainer, weight: int) -> None:
    """Add ZeRO's communication, with the padding of its buckets (one bucket for small models)."""
    plan, axis = run.config, run.mesh.replicas
    stage = plan.sharding_config.stage
    sizes = [w.numel() for _, w in run.params]
    buckets = assign_buckets(
        sizes, max_elements=plan.sharding_config.bucket_elements, replicas=axis.size if stage else 1
    )
    elements = sum(bucket.length for bucket in buckets)
    add(f"{axis.name} all-reduce", 1, FLOAT)  # the loss
    if stage == 0:
        add(f"{axis.name} all-reduce", len(buckets), FLOAT * elements // len(buckets))
    else:
        times = plan.accumulation_steps if stage == 2 else 1  # of 2, after every micro-batch
        add(f"{axis.name} reduce-scatter", times * len(buckets), FLOAT * elements // len(buckets))
        add(f"{axis.name} all-gather", len(buckets), weight * elements // len(buckets))
        add(f"{axis.name} all-reduce", 1, FLOAT)  # the gradient's norm


def _rank(rank: int, ranks: int, cases: Sequence[tuple[str, ...]], folder: Path) -> None:
    torch.set_num_threads(1)
    corpus = IndexedDataset(folder / "data")
    assert corpus.info is not None
    counts = []
    for number, values in enumerate(cases):
        run = load_config(RunConfig, None, {}, [*COMMON, f"data.data_path={folder / 'data'}", *values])
        plan = resolve(run, "gpt", ranks, corpus=corpus.info.tokenizer, loaded_spec=None, cuda=False)
        meet = f"file://{folder / f'meet{ranks}-{number}'}"
        mesh = Mesh.join(
            plan.layout, World(ranks, rank, rank), sequence=run.parallel.sequence, init_method=meet
        )
        trainer = Trainer(plan, mesh, corpus)
        with CallCounter(mesh) as counted:
            trainer.step(0.01)
        counts.append({"counted": counted.counts, "formula": formulas(trainer)})
        mesh.destroy()
    (folder / f"{rank}.json").write_text(json.dumps(counts))


def _measure(ranks: int, cases: Sequence[tuple[str, ...]]) -> list[list[dict[str, Count]]]:
    """Return counted and computed values for every case and rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        identity = open_tokenizer("NullTokenizer", vocab_size=VOCAB - 1).identity
        rng = np.random.default_rng(1)
        with IndexedWriter(folder / "data", np.dtype("uint16"), DatasetInfo(identity)) as out:
            for _ in range(100):
                out.add(rng.integers(0, VOCAB, 50))
                out.end_document()
        torch.multiprocessing.start_processes(
            _rank, (ranks, cases, folder), nprocs=ranks, start_method="spawn"
        )
        by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        return [[counts[number] for counts in by_rank] for number in range(len(cases))]


def _name(ranks: int, values: Sequence[str]) -> str:
    return f"{ranks}: " + (" ".join(value.partition(".")[2] for value in values) or "dp=2")


def _show(name: str, rank_counts: Sequence[dict[str, Count]]) -> int:
    """Print a row for every axis and operation; equal ranks are shown once.

    Returns:
        the number of counts, over all ranks, that differ from the formula.
    """
    wrong, seen = 0, set()
    for rank, counts in enumerate(rank_counts):
        rows = []
        for key in sorted(counts["counted"] | counts["formula"]):
            (calls, size), (wanted, bytes_) = (counts[k].get(key, (0, 0)) for k in ("counted", "formula"))
            wrong += (calls, size) != (wanted, bytes_)
            rows.append(f"{key} | {calls} | {wanted} | {size:,} | {bytes_:,} |")
        if (text := "\n".join(rows)) not in seen:
            seen.add(text)
            for row in rows:
                print(f"| {name} | {rank} | {row}")
    return wrong


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, wrong = [], 0
    print("| layout | rank | axis and operation | calls | by the formula | bytes | by the formula |")
    print("|---|---|---|---|---|---|---|")
    for ranks, cases in LAYOUTS.items():
        for values, rank_counts in zip(cases, _measure(ranks, cases), strict=True):
            wrong += _show(_name(ranks, values), rank_counts)
            results.append({"ranks": ranks, "values": values, "each": rank_counts})
    print(f"\n{wrong} of the counts differ from the formulas")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
