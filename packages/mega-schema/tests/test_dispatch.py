"""The choice of kernels, and the check that detects wrong ones."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.kernels import REFERENCE, Kernels, cpp, cpu_attention, dispatch, third_party
from mega_model.kernels.dispatch import PACKAGES, choose_kernels
from mega_model.kernels.verify import check_kernels
from mega_schema.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """A stand-in for a package's module, and for those it lies in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__spec__ = ModuleSpec(path, None)
            monkeypatch.setitem(sys.modules, path, module)
        if depth > 1:
            monkeypatch.setattr(
                sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path], raising=False
            )
    for member, value in members.items():
        monkeypatch.setattr(sys.modules[name], member, value, raising=False)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    _module(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=lambda x, w, b, shape, eps: F.layer_norm(x, shape, w, b, eps),
        fused_rms_norm_affine=lambda x, w, shape, eps: F.rms_norm(x, shape, w, eps),
    )


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Rows, tokens, heads, width, as that package has them; the shapes it was called with."""
    called: list[torch.Size] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, deterministic: bool) -> Tensor:
        assert not deterministic
        called.append(q.shape)
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).to(torch.bfloat16)

    _module(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
    return called


def test_a_cpu_without_products_of_bfloat16_takes_attention_in_blocks_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "has_native", lambda half: False)
    kernels = choose_kernels("auto", CPU)
    assert kernels.kernels == replace(REFERENCE, attention=cpu_attention.attention_in_float32)
    assert kernels.summary == "reference, blocked (attention)"
    assert kernels.reasons["attention"] == "in float32: this CPU has no products of bfloat16"
    assert kernels.reasons["swiglu"] == "the CPU kernels"
    for dtype in (torch.float32, torch.bfloat16):
        assert [result for result in check_kernels(kernels.kernels, CPU, dtype) if not result.ok] == []


def test_a_cpu_with_products_of_bfloat16_takes_attention_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def part() -> third_party.KernelOverrides:
        raise cpp.CompileError("no compiler")

    monkeypatch.setattr(dispatch, "has_native", lambda half: half == torch.bfloat16)
    monkeypatch.setattr(cpp, "build_overrides", part)
    kernels = choose_kernels("auto", CPU)
    assert kernels.kernels == replace(REFERENCE, attention=cpu_attention.attention)
    assert kernels.reasons["attention"] == "this CPU has products of bfloat16"
    assert kernels.reasons["add_product"] == "no compiler"
    for dtype in (torch.float32, torch.bfloat16):
        assert [result for result in check_kernels(kernels.kernels, CPU, dtype) if not result.ok] == []


def test_a_cpu_with_products_of_bfloat16_takes_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_native", lambda half: half == torch.bfloat16)
    monkeypatch.setattr(cpp, "build_overrides", lambda: {"bias_gelu": cpp.bias_gelu})
    kernels = choose_kernels("auto", CPU)
    assert kernels.summary == "reference, c++ (bias_gelu), blocked (attention)"
    assert kernels.kernels == replace(REFERENCE, attention=cpu_attention.attention, bias_gelu=cpp.bias_gelu)


def test_a_gpu_takes_triton_and_torchs_attention() -> None:
    kernels = choose_kernels("auto", GPU)
    assert kernels.summary == "triton, reference (angles, attention, linear, add_product)"
    assert kernels.kernels.attention is REFERENCE.attention
    own_kernels = {field.name for field in fields(Kernels)} - {
        "angles", "attention", "linear", "add_product",
    }  # fmt: skip
    assert not [name for name in own_kernels if getattr(kernels.kernels, name) is getattr(REFERENCE, name)]


def test_a_gpu_without_triton_computes_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    kernels = choose_kernels("auto", GPU)
    assert kernels.summary == "reference"
    assert kernels.reasons["swiglu"] == "triton is not installed"


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_definitions_can_be_asked_for(device: torch.device) -> None:
    assert choose_kernels("reference", device).kernels is REFERENCE


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_not_installed_is_refused_with_the_way_to_get_it(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda module: None)
    with pytest.raises(
        ConfigError, match=rf"^--kernels: {name} is not installed; hint: .*{PACKAGES[name][1][:12]}"
    ):
        choose_kernels(name, GPU, where="--kernels")


def test_what_needs_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="^--kernels: needs a GPU: found triton on cpu, wanted cuda"):
        choose_kernels("triton", CPU, where="--kernels")


@pytest.mark.usefixtures("apex")
def test_a_package_gives_what_it_has_and_triton_the_rest() -> None:
    kernels = choose_kernels("apex", GPU)
    norms = "rms_norm, layer_norm, add_rms_norm, add_layer_norm"
    assert kernels.summary == f"triton, apex ({norms}), reference (angles, attention, linear, add_product)"
    assert kernels.reasons["rms_norm"] == "requested"


@pytest.mark.usefixtures("flash_attn")
def test_flash_attention_is_taken_where_it_is_installed() -> None:
    assert choose_kernels("auto", GPU).sources["attention"] == "flash-attn"
    assert choose_kernels("auto", CPU).sources["attention"] != "flash-attn"


@pytest.mark.usefixtures("apex")
def test_the_adapter_of_apex_passes_on_what_its_functions_expect() -> None:
    fields_: dict[str, Any] = dict(third_party.apex())
    for result in check_kernels(replace(REFERENCE, **fields_), CPU, torch.float32):
        assert result.ok, result


def test_flash_attention_is_given_tokens_before_heads_and_half_precision_alone(
    flash_attn: list[torch.Size],
) -> None:
    attention = third_party.flash_attn()["attention"]
    q, k, v = (torch.randn(2, n, 8, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    low = [x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(attention(*low, "before"), REFERENCE.attention(*low, "before"))
    assert flash_attn == [torch.Size([2, 8, 4, 16])]
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(*low, mask), REFERENCE.attention(*low, mask))
    torch.testing.assert_close(attention(q, k, v, None), REFERENCE.attention(q, k, v, None))
    assert len(flash_attn) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_definitions_pass_the_check(dtype: torch.dtype) -> None:
    results = list(check_kernels(REFERENCE, CPU, dtype))
    assert [result.name for result in results] == [field.name for field in fields(Kernels)]
    assert [result for result in results if not result.ok] == []


# torch.compile looks at the gradient of what it is given, which tensors that have none warn of
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_torch_compile_leaves_every_kernel_its_definition() -> None:
    kernels = choose_kernels("compile", CPU, backend="aot_eager")
    assert (
        kernels.summary
        == "compile, reference (angles, attention, cross_entropy, dropout_add, linear, add_product)"
    )
    assert [result for result in check_kernels(kernels.kernels, CPU, torch.float32) if not result.ok] == []


def test_the_check_finds_a_kernel_that_is_wrong_and_one_that_fails() -> None:
    def forgets_its_gradient(x: Tensor) -> Tensor:
        return REFERENCE.swiglu(x) + 0.1 * (x - x.detach())[:, : x.shape[1] // 2]

    def fails(*arguments: object) -> Tensor:
        raise RuntimeError("no such instruction")

    wrong = replace(REFERENCE, swiglu=forgets_its_gradient, rms_norm=fails)
    failures = {result.name: result for result in check_kernels(wrong, CPU, torch.float32) if not result.ok}
    assert set(failures) == {"swiglu", "rms_norm"}
    assert failures["rms_norm"].failure == "RuntimeError: no such instruction"
    assert failures["swiglu"].error > 100
