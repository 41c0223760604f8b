"""Devices by name, on machines with and without a GPU."""

from __future__ import annotations

import pytest
import torch

from mega_model.devices import resolve_device
from mega_schema.errors import ConfigError


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_a_gpu_if_the_machine_has_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device("auto") == torch.device(device)


def test_a_device_of_the_machine_is_taken_by_its_name() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["abacus", "cuda:99", "", "cpu:x"])
def test_a_device_the_machine_lacks_is_an_error_with_the_cpu_as_hint(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_device(name, where="--device")
    message = str(caught.value)
    gpus = torch.cuda.device_count()
    more = f" | cuda | cuda:0 to cuda:{gpus - 1}" if gpus else ": this machine has no GPU that torch can use"
    assert message.startswith("--device: not a device of this machine: found ")
    assert message.endswith(f", wanted auto | cpu{more}; hint: --device cpu")


def test_torch_without_cuda_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ConfigError, match="model.device: not a device of this machine: found cuda"):
        resolve_device("cuda", where="model.device")
