"""Hardware that the planner knows, as a few constants each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mega_schema.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """GPUs of one kind in nodes of `node`, joined by a network with a port per GPU.

    The first block of fields is from data sheets, the second has the fractions that software reaches.

    Attributes:
        peak: dense 16-bit FLOP/s of the tensor cores; utilisations are fractions of this.
        peak_fp8: dense 8-bit FLOP/s of the tensor cores; None where they have no such products.
        peak_float32: FLOP/s of a float32 matrix product as torch computes it by default, without TF32.
        memory: bytes available to a run: the card's, less 4 GiB for the driver, NCCL and the allocator's
            gaps.
        bandwidth: bytes/s of the GPU's own memory.
        nvlink: bytes/s one GPU sends to the others of its node.
        network: bytes/s one GPU sends to other nodes.
        node: GPUs of a node.
        gemm: fraction of `peak` that a compute-bound matrix product reaches. Fitted.
        attention: fraction of `peak` that fused attention reaches.
        flash_attention_2: fraction of `peak` that FlashAttention 2 reaches.
        stream: fraction of `bandwidth` that elementwise work reaches.
        link: fraction of `nvlink` and `network` that collectives reach.
    """

    name: str
    peak: float
    peak_fp8: float | None
    peak_float32: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    node: int = 8

    gemm: float
    attention: float
    flash_attention_2: float
    stream: float = 0.80
    link: float = 0.75

    def gemm_peak(self, factor: int) -> float:
        """Return the peak FLOP/s of a matrix product whose factors have 1, 2 or 4 bytes per element.

        Raises:
            ConfigError: these GPUs have no products in FP8.
        """
        if factor > 1:
            return self.peak if factor == 2 else self.peak_float32
        if self.peak_fp8 is None:
            supported_gpus = ", ".join(sorted(name for name, kind in HARDWARE.items() if kind.peak_fp8))
            raise ConfigError(
                "--fp8-format", "these GPUs have no FP8 products", found=self.name, wanted=supported_gpus
            )
        return self.peak_fp8

    def link_bandwidth(self, ranks: int, stride: int) -> float:
        """Return the bytes/s that each rank of a ring sends, with neighbours `stride` ranks apart.

        Inside a node that is NVLink. Between nodes, a ring with g ranks per node uses g network ports of each
        node: g rings use one port each.
        """
        together = max(1, min(ranks, self.node // stride))
        if together == ranks:
            return self.link * self.nvlink
        return self.link * min(self.nvlink, together * self.network)


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": Hardware(
            name="A100 80GB SXM",
            peak=312e12,
            peak_fp8=None,
            peak_float32=19.5e12,
            memory=76 * GIB,
            bandwidth=2.0e12,
            nvlink=300e9,
            network=25e9,  # 200 Gbit/s InfiniBand per GPU
            gemm=0.79,
            attention=0.55,  # arXiv:2307.08691 figures 4-6
            flash_attention_2=0.55,
        ),
        "h100": Hardware(
            name="H100 80GB SXM",
            peak=989e12,
            peak_fp8=1979e12,
            peak_float32=67e12,
            memory=76 * GIB,
            bandwidth=3.35e12,
            nvlink=450e9,
            network=50e9,  # 400 Gbit/s InfiniBand per GPU
            gemm=0.56,
            attention=0.45,  # between FlashAttention 2 and 3, arXiv:2407.08608 figures 5-6
            flash_attention_2=0.35,  # arXiv:2407.08608 abstract
        ),
        "h200": Hardware(
            name="H200 141GB SXM",
            peak=989e12,
            peak_fp8=1979e12,
            peak_float32=67e12,
            memory=127 * GIB,
            bandwidth=4.8e12,
            nvlink=450e9,
            network=50e9,
            gemm=0.56,
            attention=0.45,
            flash_attention_2=0.35,
        ),
    }
)


# torch's device names; PCIe and NVL cards have another peak and are not listed
_DEVICES = (
    (re.compile(r"A100"), "a100"),  # all variants have the same peak
    (re.compile(r"H100 80GB HBM3"), "h100"),
    (re.compile(r"H200(?! NVL)"), "h200"),
)


def peak_flops(device: str, *, half: bool) -> float | None:
    """Return the nominal FLOP/s of a device, the denominator of MFU; None if it is not known.

    Args:
        device: its name as torch.cuda.get_device_name gives it.
        half: in 16-bit arithmetic; else in float32.
    """
    kind = next((kind for names, kind in _DEVICES if names.search(device)), None)
    if kind is None:
        return None
    return HARDWARE[kind].peak if half else HARDWARE[kind].peak_float32
