"""Choose the kernels with which a decoder scores."""

from __future__ import annotations

import torch

from mega_model.kernels import REFERENCE
from mega_model.kernels.dispatch import choose_batch_invariant_kernels
from mega_model.kernels.interface import Kernels
from mega_model.kernels.numba import has_numba, load_kernels
from mega_model.kernels.row_functions import with_row_functions


def choose_decoder_kernels(device: torch.device, *, batch_invariant: bool) -> Kernels:
    """Return the kernels to build a decoder with that computes no gradients.

    Args:
        batch_invariant: those whose result for a token has the same bits in any batch.

    Raises:
        ConfigError: batch-invariant kernels do not run here.
    """
    if batch_invariant:
        return choose_batch_invariant_kernels(device, package="mega-eval").kernels
    if device.type == "cpu" and has_numba():
        return with_row_functions(REFERENCE, load_kernels(package="mega-eval"))
    return REFERENCE


def load_compiler(kernels: Kernels) -> None:
    """Make numba import its compiler, which takes most of a second, by a call of one CPU kernel."""
    kernels.bias_gelu(torch.zeros(1, 1), None, "tanh")
