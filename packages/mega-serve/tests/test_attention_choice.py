"""The choice of the attention backend by name, device and what is installed."""

from __future__ import annotations

import pytest
import torch

from mega_schema.errors import ConfigError
from mega_serve.execution import attention_choice
from mega_serve.execution.attention_choice import (
    AttentionName,
    can_capture,
    choose_attention,
    default_page_size,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def choose(
    name: AttentionName,
    device: torch.device,
    *,
    page_size: int | None = None,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    invariant: bool = False,
) -> str:
    return choose_attention(
        name,
        device,
        page_size=default_page_size(name) if page_size is None else page_size,
        head_dim=head_dim,
        dtype=dtype,
        batch_invariant=invariant,
    )


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be installed; a test removes some."""
    names = {"triton", "flash_attn", "numba"}
    monkeypatch.setattr(attention_choice, "_is_installed", lambda module: module in names)
    monkeypatch.setattr(attention_choice, "has_numba", lambda: "numba" in names)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return names


def test_auto_takes_triton_on_a_gpu_and_numba_on_a_cpu(packages: set[str]) -> None:
    assert (choose("auto", GPU), choose("auto", CPU)) == ("triton", "numba")
    assert choose("auto", CPU, page_size=24) == "torch"
    packages.clear()
    assert (choose("auto", GPU), choose("auto", CPU)) == ("torch", "torch")


@pytest.mark.parametrize("name", ["torch", "triton", "flash", "flex"])
def test_a_backend_for_gpus_is_taken_by_name(name: AttentionName, packages: set[str]) -> None:
    assert choose(name, GPU) == name


def test_graphs_hold_the_kernels_that_read_pages_in_place(packages: set[str]) -> None:
    assert [can_capture(name) for name in ("auto", "triton", "flash", "flex", "torch")] == [True] * 3 + [
        False
    ] * 2
    packages.remove("triton")
    assert not can_capture("auto")


def test_triton_runs_on_a_cpu_if_it_interprets(packages: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", CPU) == "triton"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("triton", {"device": CPU}, "--attention triton: needs a GPU: found cpu, wanted cuda"),
        ("flash", {"device": CPU}, "--attention flash: needs a GPU: found cpu, wanted cuda"),
        ("flex", {"device": CPU}, "--attention flex: needs a GPU: found cpu, wanted cuda"),
        ("numba", {}, "--attention: numba kernels run on a CPU: found cuda"),
        (
            "flash",
            {"dtype": torch.float32},
            "--attention flash: computes in half precision: found torch.float32",
        ),
        ("flash", {"head_dim": 288}, "--attention flash: width of a head: found 288, wanted at most 256"),
        (
            "flash",
            {"page_size": 16},
            "--attention flash: tokens of a page: found 16, wanted a multiple of 256",
        ),
        ("flex", {"page_size": 64}, "--attention flex: tokens of a page: found 64, wanted a multiple of 128"),
        ("triton", {"invariant": True}, "--batch-invariant: needs the numba kernels, on a CPU"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(
    name: AttentionName, settings: dict[str, object], message: str, packages: set[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        choose(name, **{"device": GPU, **settings})  # type: ignore[arg-type]
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "package"), [("triton", "triton"), ("flex", "triton"), ("flash", "flash_attn")]
)
def test_a_backend_that_is_not_installed_says_how_to_install_it(
    name: AttentionName, package: str, packages: set[str]
) -> None:
    packages.remove(package)
    with pytest.raises(ConfigError, match=rf"{package} is not installed.*pip install"):
        choose(name, GPU)
