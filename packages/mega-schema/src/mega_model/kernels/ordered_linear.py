"""Linear layers whose sums have one order, for any number of rows and any split over tp.

Legend: T tokens; I, O this rank's widths.
"""

from __future__ import annotations

from abc import abstractmethod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_model.distributed.mesh import Axis
from mega_model.kernels.interface import Linear, OrderedLinear
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel
from mega_model.kernels.products import linear
from mega_schema.row_segments import count_local_segments

_PANEL = 64  # outputs of a panel
_PAIRS = MappingProxyType({torch.float32: 1, torch.bfloat16: 2})  # inputs that lie side by side


class Panels:
    """A float32 or bfloat16 weight in the layout of `kernels.numba.ordered_product`."""

    def __init__(self, weight_OI: Tensor, kernels: NumbaKernels) -> None:
        assert weight_OI.dtype in _PAIRS, f"panels of {weight_OI.dtype}"
        self.outputs, self.inputs = weight_OI.shape
        self.dtype = weight_OI.dtype
        self._kernels = kernels.ordered
        pairs = _PAIRS[self.dtype]
        weight = weight_OI.detach().contiguous()
        if self.inputs % pairs:
            weight = torch.nn.functional.pad(weight, (0, 1))
        panels, length = -(-self.outputs // _PANEL), weight.shape[1] // pairs
        self._panel_size = _PANEL * length * pairs
        element = np.dtype(np.float32 if pairs == 1 else np.uint32)
        packed = np.zeros((panels, length, _PANEL), element)
        run_kernel(self._kernels, "pack", as_array(weight).view(element), packed)
        self._panels: np.ndarray[Any, Any] = packed.reshape(-1)
        if pairs == 2:
            self._panels = self._panels.view(np.uint16)

    def multiply(
        self, x_TI: Tensor, bias_O: Tensor | None, *, segments: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Compute x Wᵀ + b, (T, O).

        Args:
            segments: how many segments the inputs are summed in.
            dtype: of the result; None: that of x.
        """
        assert x_TI.shape[1] == self.inputs, f"inputs of width {x_TI.shape[1]} for {self.inputs}"
        assert x_TI.dtype == self.dtype, f"inputs of {x_TI.dtype} for {self.dtype}"
        assert bias_O is None or bias_O.shape == (self.outputs,), "a bias per output"
        y_TO = x_TI.new_empty((len(x_TI), self.outputs), dtype=dtype)
        is_bf16 = self.dtype == torch.bfloat16
        if self.inputs % _PAIRS[self.dtype]:
            x_TI = torch.nn.functional.pad(x_TI, (0, 1))
        x = as_array(x_TI.contiguous())
        bias = as_array(x_TI.new_empty(0) if bias_O is None else bias_O)
        if is_bf16:
            x = x.view(np.uint32)
        name = "bf16" if is_bf16 else "float"
        run_kernel(self._kernels, name, x, self._panels, bias, as_array(y_TO), self._panel_size, segments)
        return y_TO


class _PanelLinear(OrderedLinear):
    """A linear layer by panels."""

    @abstractmethod
    def panels(self, weight_OI: Tensor) -> Panels:
        """Return the weight's panels."""

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b, (T, O), each sum over all inputs in order."""
        return self.panels(weight_OI).multiply(x_TI, bias_O, segments=1)

    def reduce_product(self, x_TI: Tensor, weight_OI: Tensor, tp: Axis) -> Tensor:
        """Compute x Wᵀ summed over the ranks of tp, in the tree of `mega_schema.row_segments`."""
        panels = self.panels(weight_OI)
        segments = count_local_segments(panels.inputs, tp.size)
        if tp.group is None:
            return panels.multiply(x_TI, None, segments=segments)
        part_TO = panels.multiply(x_TI, None, segments=segments, dtype=torch.float32)
        gathered = part_TO.new_empty(tp.size * len(part_TO), panels.outputs)
        parts_RTO = tp.all_gather(gathered, part_TO).wait().view(tp.size, *part_TO.shape)
        if tp.sequence:
            parts_RTO = parts_RTO.chunk(tp.size, 1)[tp.rank]
        while len(parts_RTO) > 1:
            parts_RTO = parts_RTO[::2] + parts_RTO[1::2]
        return parts_RTO[0].to(x_TI.dtype)


class PackedOrderedLinear(_PanelLinear):
    """A linear layer whose weight is packed once, for a server."""

    def __init__(self, weight_OI: Tensor, kernels: NumbaKernels) -> None:
        self._panels = Panels(weight_OI, kernels)

    def panels(self, weight_OI: Tensor) -> Panels:
        """Return the panels; `weight_OI`, the released weight, is not read."""
        return self._panels


class TrainedOrderedLinear(_PanelLinear):
    """A linear layer whose weight is packed at every call, for training.

    Args:
        gradient: computes the input's gradient, a product with Wᵀ, in any order.
    """

    def __init__(self, kernels: NumbaKernels, gradient: Linear = linear) -> None:
        self._kernels = kernels
        self._gradient = gradient

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b, (T, O); with a transposed weight, an input gradient."""
        if weight_OI.stride(1) != 1 and weight_OI.shape[1] != 1:
            return self._gradient(x_TI, weight_OI, bias_O)
        return super().__call__(x_TI, weight_OI, bias_O)

    def panels(self, weight_OI: Tensor) -> Panels:
        """Return the panels of the weight as it is now."""
        return Panels(weight_OI, self._kernels)
