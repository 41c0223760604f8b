"""Megatron Core's optimizers resume from our `torch_dist` folders, and we read theirs."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.formats.megatron.names import chunk_tensors, core_names
from mega_ckpt.operations.convert import convert
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, bert, gpt, llama
from tests.megatron_core import reference_process
from tests.megatron_core.small_model import LLAMA, OURS, THEIRS, WORDS, save_random
from tests.selection import every_nth, requested_values

# 0.16 shifts what stands behind a bucket that is no multiple of 128 numbers: those of the embedding are
WHOLE_BUCKETS = {"vocab_multiple": 8}
SAID = THEIRS | {"make_vocab_size_divisible_by": 8}
SPECS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "gpt": (gpt(**OURS | WHOLE_BUCKETS), SAID),
    "shifted": (gpt(**OURS), THEIRS),
    "llama": (llama(**OURS | WHOLE_BUCKETS, ffn=40, kv_heads=2), SAID | LLAMA),
    "bert": (bert(**OURS | WHOLE_BUCKETS), SAID | {"is_bert": True, "bert_binary_head": True}),
}
SHARDED = {"use_distributed_optimizer": True}
# what holds the state, in which type weights are, and how a distributed optimizer saves it
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "float32": ("F32", {}, None),
    "bfloat16": ("BF16", {"bf16": True}, None),
    "distributed-float32": ("F32", SHARDED, "fully_reshardable"),
    "distributed": ("BF16", {"bf16": True, **SHARDED}, "fully_reshardable"),
    "bucketed-float32": ("F32", SHARDED, "dp_reshardable"),
    "bucketed": ("BF16", {"bf16": True, **SHARDED, "bucket": 5000}, "dp_reshardable"),
}
CASES = [*(f"gpt-{optimizer}" for optimizer in OPTIMIZERS if "bucketed-" not in optimizer)]
CASES += ["llama-bucketed-float32"]
BERT_CASES = ["bert-bucketed", "bert-bfloat16"]
# the heads of a BERT's pairs of sentences are in a bucket of their own over a pipeline
SHIFTED = ["shifted-distributed-float32", "bert-distributed"]
SHORT_AND_LONG = [
    *every_nth(3, CASES),
    *(pytest.param(case, marks=pytest.mark.long) for case in BERT_CASES),
]
RANKS = 2
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1)]  # sizes of tp, pp and vp; what they leave of the ranks is dp


def _parts(case: str) -> tuple[ModelSpec, dict[str, Any], str, dict[str, Any], str | None]:
    model, _, optimizer = case.partition("-")
    return *SPECS[model], *OPTIMIZERS[optimizer]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases asked for, written by us, taken up by Megatron Core and saved by it."""
    folder = tmp_path_factory.mktemp("optimizers")
    wanted = {}
    asked = requested_values(request, "case")
    for seed, case in enumerate(case for case in [*CASES, *BERT_CASES, *SHIFTED] if case in asked):
        spec, flags, dtype, optimizer, sharding = _parts(case)
        save_random(folder / case, spec, seed=seed, dtype=dtype, optimizer=True)
        convert(folder / case, folder / f"{case}-dist", "mega", "torch_dist")
        wanted[case] = {"flags": flags, "optimizer": optimizer, "sharding": sharding}
    body, layouts = "tests.megatron_core.optimizers:load_and_save", [(layout, wanted) for layout in LAYOUTS]
    reference_process.run(body, folder, ranks=RANKS, wanted=layouts)
    return folder


def _read_tensor(checkpoint: Checkpoint, space: str, name: str) -> np.ndarray:
    shape = checkpoint.tensors[space][name].shape
    zero = (0,) * len(shape)
    return checkpoint.read_raw(space, name, Slab(zero, shape, zero))


@pytest.mark.parametrize("case", [*SHORT_AND_LONG, pytest.param("bert-distributed", marks=pytest.mark.long)])
def test_megatron_core_takes_up_every_number_of_our_optimizers_state(folder: Path, case: str) -> None:
    spec, _, dtype, optimizer, _ = _parts(case)
    ours = Checkpoint.open(folder / case)
    names, _ = core_names(spec)
    spaces = dict(zip(("param", "exp_avg", "exp_avg_sq"), OPTIMIZER, strict=True))
    spaces |= {"param": MODEL} if dtype == "F32" else {}
    for tp, pp, vp in LAYOUTS:
        layout = Layout(tp=tp, pp=pp)
        for rank in range(RANKS):
            state_of_rank = torch.load(folder / f"{case}-ours-{tp}{pp}{vp}-{rank}.pt")
            coordinates = rank % tp, rank // (RANKS // pp)
            foreign = {
                tensor.name: tensor
                for tensor in chunk_tensors(spec, names, layout, tp=coordinates[0], pp=coordinates[1])
            }
            if "use_distributed_optimizer" not in optimizer:
                assert state_of_rank["state"].keys() == {f"0.{name}" for name in foreign}
            for name, state in state_of_rank["state"].items():
                foreign_tensor, begin = foreign[name.removeprefix("0.")], state["begin"]
                assert state["step"] == 4
                filled = sum(box.shape[0] for box in foreign_tensor.boxes) * math.prod(
                    foreign_tensor.shape[1:]
                )  # not padding
                for kind, space in spaces.items():
                    whole = foreign_tensor.assemble(
                        np.dtype("f4"), partial(ours.read_raw, space, foreign_tensor.ours)
                    ).reshape(-1)
                    theirs = state[kind].numpy()[: max(0, filled - begin)]
                    assert theirs.tobytes() == whole[begin : begin + len(theirs)].tobytes(), f"{name} {kind}"
            for group in state_of_rank["groups"]:
                assert group["betas"] == (0.8, 0.999)
                assert group["weight_decay"] == 0.25 * group["wd_mult"]
                assert group["lr"] == 2e-3
            assert [group["wd_mult"] for group in state_of_rank["groups"]] == [1.0, 0.0]


@pytest.mark.parametrize("case", SHORT_AND_LONG)
def test_what_megatron_cores_optimizer_saves_is_our_state_bit_for_bit(
    folder: Path, tmp_path: Path, case: str
) -> None:
    ours, (spec, *_, sharding) = Checkpoint.open(folder / case), _parts(case)
    formats = [("", "torch_dist"), ("core-", "megatron-core")][: 2 if spec.causal else 1]
    for number, (tp, pp, vp) in enumerate(LAYOUTS):
        for kind, format_name in formats:
            load, back = folder / f"{case}-theirs-{kind}{tp}{pp}{vp}", tmp_path / f"{kind}{number}"
            result = convert(load, back, format_name, "mega", reading=ReadOptions(vocab=WORDS))
            assert not [left for left in result.dropped if "optimizer" in left]
            checkpoint = Checkpoint.open(back)
            assert checkpoint.tensors.keys() == ours.tensors.keys()
            beside = (
                format_name == "torch_dist" and sharding == "dp_reshardable"
            )  # steps are not in the buckets
            assert checkpoint.trainer["optimizer_steps"] == (5 if beside else 4)
            for space, tensors in ours.tensors.items():
                for name in tensors:
                    values = _read_tensor(checkpoint, space, name).tobytes()
                    assert values == _read_tensor(ours, space, name).tobytes(), f"{load.name}: {space} {name}"


@pytest.mark.parametrize("case", SHIFTED)
def test_a_state_that_megatron_core_shifted_is_left_behind(folder: Path, tmp_path: Path, case: str) -> None:
    for layout, whole in (("211", True), ("121", False)):  # over a pipeline its embedding has two buckets
        load, back = folder / f"{case}-theirs-{layout}", tmp_path / layout
        left = convert(load, back, "torch_dist", "mega", reading=ReadOptions(vocab=WORDS)).dropped
        assert ("the optimizer's state, whose main weights do not match the model's" not in left) == whole
        assert (Checkpoint.open(back).tensors.keys() == {MODEL}) == (not whole)
