"""apex's AdamW: its choice, and the arguments of its kernel, with a stand-in."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mega_model.distributed.mesh import Axis, Mesh
from mega_model.kernels.dispatch import choose_kernels
from mega_model.weight_gradients import WeightGradients
from mega_schema.params import ONES, Param
from mega_train.config import RunConfig
from mega_train.config.training import OptimizerConfig, TrainConfig
from mega_train.distributed.bucket_layout import ShardingConfig, ShardRange
from mega_train.distributed.data_parallel import build_buckets
from mega_train.engine.train import kernels_summary
from mega_train.optim import apex_adamw, factory
from mega_train.optim.adamw import AdamW
from mega_train.optim.apex_adamw import ApexAdamW
from mega_train.optim.factory import build_optimizer, check_adamw, choose_adamw
from mega_train.optim.muon import Muon

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS = (
    Param("matrix", (3, 4), 0, ONES),
    Param("norm", (4,), 0, ONES, decay=False),
    Param("head.weight", (2, 4), "last", ONES),
)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """The arguments of `multi_tensor_adam_cuda`, by its names and in its order; the update by definition."""
    assert type(chunk_size) is int
    assert noop_flag.dtype == torch.int32
    assert noop_flag.tolist() == [0]
    assert (mode, bias_correction, type(step)) == (1, 1, int)
    assert 0 < epsilon < 1e-4 < beta1 < beta2 < 1
    gradients, weights, first, second = tensor_lists
    for g, p, m, v in zip(gradients, weights, first, second, strict=True):
        assert g.numel() == p.numel() == m.numel() == v.numel() > 0
        assert {tensor.dtype for tensor in (g, p, m, v)} == {torch.float32}
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + epsilon) + weight_decay * p
        p.sub_(lr * update)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """apex with its CUDA extensions; the arguments of every call of its kernel, by name."""
    seen: list[dict[str, Any]] = []

    def applier(op: Callable[..., None], noop_flag: Tensor, lists: list[list[Tensor]], *rest: Any) -> None:
        call_arguments = (2048 * 32, noop_flag, lists, *rest)
        seen.append(dict(inspect.signature(multi_tensor_adam).bind(*call_arguments).arguments))
        op(*call_arguments)

    members = {
        "apex": {},
        "apex.multi_tensor_apply": {"multi_tensor_applier": applier},
        "amp_C": {"multi_tensor_adam": multi_tensor_adam},
    }
    for name, its in members.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(its)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def _build_both() -> tuple[AdamW, AdamW]:
    random = torch.Generator().manual_seed(1)
    start = [torch.randn(row.shape, generator=random).flatten() for row in ROWS]

    def build_adamw(kind: type[AdamW]) -> AdamW:
        shards = [ShardRange(row, 0, len(tensor)) for row, tensor in zip(ROWS, start, strict=True)]
        return kind(shards, [tensor.clone() for tensor in start], betas=(0.9, 0.95), eps=1e-8)

    return build_adamw(AdamW), build_adamw(ApexAdamW)


def _step(random: torch.Generator, *adams: AdamW, ends: float | None = None) -> None:
    gradients = [torch.randn(len(main), generator=random) for main in adams[0].main_params]
    for adam in adams:
        adam.step([g.clone() for g in gradients], 0.01, 0.1, ends)


def test_its_updates_are_torchs_with_decay_and_rate_of_each_group(calls: list[dict[str, Any]]) -> None:
    torchs, apexs = _build_both()
    random = torch.Generator().manual_seed(2)
    for _ in range(4):
        _step(random, torchs, apexs, ends=0.003)
    assert torchs.steps == apexs.steps == 4
    for (_, _, wanted), (space, shard, actual) in zip(
        torchs.state_shards(), apexs.state_shards(), strict=True
    ):
        torch.testing.assert_close(actual, wanted, msg=f"{space} {shard.row.name}")
    for first, second in zip(torchs.main_params, apexs.main_params, strict=True):
        torch.testing.assert_close(second, first)
    assert [call["step"] for call in calls] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert {(call["lr"], call["weight_decay"]) for call in calls} == {(0.01, 0.1), (0.01, 0.0), (0.003, 0.1)}
    assert {(call["beta1"], call["beta2"], call["epsilon"]) for call in calls} == {(0.9, 0.95, 1e-8)}


@pytest.mark.usefixtures("calls")
def test_an_optimizer_with_loaded_state_resumes_bitwise() -> None:
    _, first = _build_both()
    _, second = _build_both()
    random = torch.Generator().manual_seed(3)
    for _ in range(3):
        _step(random, first)
    state = {(space, shard.row.name): values.clone() for space, shard, values in first.state_shards()}
    second.load_state(
        lambda space, shard, values: values.copy_(state[space, shard.row.name]), steps=first.steps
    )
    for main, its in zip(second.main_params, first.main_params, strict=True):
        main.copy_(its)
    assert second.steps == 3
    _step(random, first, second)
    assert all(torch.equal(a, b) for a, b in zip(first.main_params, second.main_params, strict=True))


@pytest.mark.usefixtures("calls")
def test_stretches_that_other_replicas_own_are_not_handed_over() -> None:
    """The kernel's launcher does nothing with what it has gathered where the last tensor is empty."""
    mains = [torch.ones(4), torch.empty(0), torch.empty(0)]
    shards = [ShardRange(row, 0, len(main)) for row, main in zip(ROWS, mains, strict=True)]
    alone = ApexAdamW(shards, mains, betas=(0.9, 0.95), eps=1e-8)
    alone.step([torch.ones_like(main) for main in mains], 0.1, 0.0)
    torch.testing.assert_close(mains[0], torch.full((4,), 0.9))


def test_a_tensor_too_long_for_32_bits_is_handed_over_in_parts(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apex_adamw, "_MAX_ELEMENTS", 5)
    torchs, apexs = _build_both()
    _step(torch.Generator().manual_seed(2), torchs, apexs)
    assert sorted(len(part) for call in calls for part in call["tensor_lists"][0]) == [2, 3, 4, 5, 5, 5]
    for first, second in zip(torchs.main_params, apexs.main_params, strict=True):
        torch.testing.assert_close(second, first)


@pytest.mark.usefixtures("calls")
def test_it_is_taken_where_apex_is_asked_for_on_a_gpu_and_only_there() -> None:
    assert (choose_adamw("apex", GPU).optimizer_class, choose_adamw("apex", GPU).source) == (
        ApexAdamW,
        "apex",
    )
    assert choose_adamw("apex", CPU).optimizer_class is AdamW
    for kernels in ("auto", "triton", "liger", "reference"):
        assert choose_adamw(kernels, GPU).optimizer_class is AdamW  # type: ignore[arg-type]


def test_apex_without_its_extensions_leaves_torchs_and_says_why() -> None:
    choice = choose_adamw("apex", GPU)
    assert (choice.optimizer_class, choice.source) == (AdamW, "torch")
    assert choice.reason == "apex was built without its CUDA extensions"


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("name", ["adam", "muon"])
def test_a_run_that_asks_for_apex_updates_by_it(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []

    def on_a_gpu(kernels: Any, device: torch.device) -> factory.AdamWChoice:
        asked.append((kernels, device))
        return choose_adamw(kernels, GPU)

    monkeypatch.setattr(factory, "choose_adamw", on_a_gpu)
    run = RunConfig(train=TrainConfig(kernels="apex"), optimizer=OptimizerConfig(name=name))
    params = [(row, nn.Parameter(torch.zeros(row.shape))) for row in ROWS]
    weights, _ = build_buckets(params, Axis("replicas"), WeightGradients(), ShardingConfig())
    optimizer = build_optimizer(run, weights, Mesh())
    assert isinstance(optimizer._adamw if isinstance(optimizer, Muon) else optimizer, ApexAdamW)
    assert asked == [("apex", CPU)]


@pytest.mark.usefixtures("calls")
def test_the_doctors_check_passes_both_and_finds_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (AdamW, ApexAdamW):
        result = check_adamw(kind, CPU)
        assert result.ok, result

    def multi_tensor_adam_with_swapped_lists(
        size: int, flag: Tensor, lists: list[list[Tensor]], lr: float, *rest: Any
    ) -> None:
        multi_tensor_adam(size, flag, lists, 2 * lr, *rest)

    monkeypatch.setattr(sys.modules["amp_C"], "multi_tensor_adam", multi_tensor_adam_with_swapped_lists)
    assert not check_adamw(ApexAdamW, CPU).ok
    monkeypatch.delattr(sys.modules["amp_C"], "multi_tensor_adam")
    assert check_adamw(ApexAdamW, CPU).failure.startswith("ImportError: ")


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(("name", "wanted"), [("adam", "reference, apex (adamw)"), ("sgd", "reference")])
def test_the_record_of_a_run_says_whose_the_update_is(name: Any, wanted: str) -> None:
    run = RunConfig(train=TrainConfig(kernels="apex"), optimizer=OptimizerConfig(name=name))
    assert kernels_summary(run, choose_kernels("reference", CPU), GPU) == wanted
    assert kernels_summary(RunConfig(), choose_kernels("reference", CPU), GPU) == "reference"
