"""Choose the attention backend over pages: by name, or by what the machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch

from mega_model.kernels.numba import has_numba, load_kernels
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_serve.execution.paged_attention import KeyValuePages, NumbaPages, TorchPages

AttentionName = Literal["auto", "numba", "torch", "triton", "flash", "flex"]
BackendName = Literal["numba", "torch", "triton", "flash", "flex"]

_PAGE_TOKENS = 16
_FLASH_PAGE_TOKENS = 256  # flash_attn: "page_block_size must be a multiple of 256"
_FLEX_PAGE_TOKENS = 128  # the widest block of keys of FlexAttention's kernels
_FLASH_HEAD_DIM = 256
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def default_page_size(name: AttentionName) -> int:
    """Return the tokens of a page for a backend."""
    return {"flash": _FLASH_PAGE_TOKENS, "flex": _FLEX_PAGE_TOKENS}.get(name, _PAGE_TOKENS)


def can_capture(name: AttentionName) -> bool:
    """Whether a CUDA graph can hold the decode step of a backend on a GPU.

    torch's would attend over sequences of full length, and FlexAttention is compiled as it runs.
    """
    return name in ("triton", "flash") or (name == "auto" and _is_installed("triton"))


def choose_attention(
    name: AttentionName,
    device: torch.device,
    *,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> BackendName:
    """Return the backend that `name` asks for; for "auto" the best one of this machine.

    That is numba on a CPU and Triton on a GPU where they are installed, else torch. flash-attn and
    FlexAttention are taken by name only: their pages are longer, so that fewer prompts share them.

    Raises:
        ConfigError: the backend is not installed, or does not run on this device or with this dtype.
    """
    is_cuda = device.type == "cuda"
    chosen: BackendName = "torch"
    if name != "auto":
        chosen = name
        _check_backend(chosen, device, page_size=page_size, head_dim=head_dim, dtype=dtype)
    elif is_cuda and _is_installed("triton"):
        chosen = "triton"
    elif not is_cuda and has_numba() and page_size % 16 == 0:
        chosen = "numba"
    if batch_invariant and chosen != "numba":
        raise ConfigError(
            "--batch-invariant", "needs the numba kernels, on a CPU", hint=install_hint("mega-serve", "cpu")
        )
    return chosen


def build_pages(
    name: BackendName,
    layers: Sequence[int],
    *,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KeyValuePages:
    """Return an empty pool of pages with its backend; see `TorchPages` for the arguments."""
    if name == "numba":
        build: Callable[..., KeyValuePages] = partial(NumbaPages, kernels=load_kernels().attention)
    else:
        build = partial(pages_class(name), device=device)
    return build(
        layers,
        num_pages=num_pages,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )


def pages_class(name: BackendName) -> type[TorchPages]:
    """Import a backend: each needs a library that others do without."""
    if name == "triton":
        from mega_serve.execution.triton_pages import TritonPages

        return TritonPages
    if name == "flash":
        from mega_serve.execution.flash_pages import FlashPages

        return FlashPages
    if name == "flex":  # imports torch._dynamo, 140 MB
        from mega_serve.execution.flex_pages import FlexPages

        return FlexPages
    return TorchPages


def _check_backend(
    name: BackendName, device: torch.device, *, page_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    where = f"--attention {name}"
    is_cuda = device.type == "cuda"
    if name == "numba":
        if is_cuda:
            wanted = "auto | triton | flash | flex | torch"
            raise ConfigError("--attention", "numba kernels run on a CPU", found=device.type, wanted=wanted)
        return
    if name == "torch":
        return
    is_interpreting = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not is_cuda and not is_interpreting:
        raise ConfigError(where, "needs a GPU", found=device.type, wanted="cuda", hint="--attention auto")
    package, command = {"flash": ("flash_attn", "pip install flash-attn --no-build-isolation")}.get(
        name, ("triton", "pip install triton")
    )
    if not _is_installed(package):
        raise ConfigError(where, f"{package} is not installed", hint=f"{command}; or --attention auto")
    if name == "flash":
        if dtype not in _FLASH_DTYPES:
            raise ConfigError(where, "computes in half precision", found=str(dtype), hint="--dtype bfloat16")
        if head_dim > _FLASH_HEAD_DIM:
            wanted = f"at most {_FLASH_HEAD_DIM}"
            raise ConfigError(
                where, "width of a head", found=head_dim, wanted=wanted, hint="--attention triton"
            )
    multiple = {"flash": _FLASH_PAGE_TOKENS, "flex": _FLEX_PAGE_TOKENS}.get(name, 1)
    if page_size % multiple:
        raise ConfigError(where, "tokens of a page", found=page_size, wanted=f"a multiple of {multiple}")


def _is_installed(module: str) -> bool:
    return find_spec(module) is not None
