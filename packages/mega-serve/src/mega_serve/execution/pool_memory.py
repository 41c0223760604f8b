"""The memory of the pool of pages: how much it takes, and how many pages it has room for."""

from __future__ import annotations

import os

import torch

from mega_model.distributed.mesh import Mesh
from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec
from mega_serve.execution.paged_attention import page_bytes

_CPU_MEMORY_FRACTION = 0.4  # of the memory that is available after loading
_GPU_MEMORY_FRACTION = 0.9


def cache_dtype(attention: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values in the pages of a backend, for activations of `dtype`.

    torch's attention for one query takes a fifth of the time in float32 on a CPU.
    """
    return torch.float32 if attention == "torch" and device.type == "cpu" else dtype


def count_pages(memory: int, page: int, *, least: int = 1) -> int:
    """Return the number of pages of `page` bytes in this memory.

    Raises:
        ConfigError: there are fewer than `least`.
    """
    pages = memory // page
    if pages < least:
        raise ConfigError(
            "--kv-cache-memory",
            "holds no page",
            found=f"{memory} bytes",
            wanted=f"at least {least * page}",
            hint=f"--kv-cache-memory {least * page}, or leave it out",
        )
    return pages


def choose_memory(spec: ModelSpec, mesh: Mesh, *, sequences: int, length: int, page_size: int) -> int:
    """Return the bytes of a rank's pool for `sequences` of `length` tokens, or what the device can spare."""
    layers, kv_heads = len(mesh.stage(spec.layers).layers), spec.kv_heads // mesh.tp.size
    page = page_bytes(spec, layers, kv_heads, page_size, torch.float32)  # float32 at most
    wanted = sequences * (-(-length // page_size) + 1) * page
    if mesh.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(mesh.device)
        spare = int(_GPU_MEMORY_FRACTION * free)
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        spare = int(_CPU_MEMORY_FRACTION * available / mesh.layout.world)
    return max(page, min(wanted, spare))
