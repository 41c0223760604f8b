"""Weights of linear layers in the form that a CPU multiplies fastest.

After loading, each linear layer's `linear` becomes a `PackedLinear` or an `Int8Linear`, which holds the
weight in its packed form; the module's own weight is released. F.linear is the definition of each form.

Legend: T tokens; I, O widths of a layer; J, P the same rounded up to multiples of 64.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mega_model.decoder import Decoder
from mega_model.kernels.numba import NumbaKernels, as_array, run_kernel
from mega_model.kernels.ordered_linear import PackedOrderedLinear
from mega_model.layers import ColumnLinear, LMHead, RowLinear
from mega_model.matmul_precision import has_int8_products, has_native
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

Array = np.ndarray[Any, Any]
WeightDtype = Literal["float32", "bfloat16", "int8"]
LinearLayer = ColumnLinear | RowLinear | LMHead

_PANEL = 64  # outputs of a panel of oneDNN's layout
# inputs that lie side by side in a panel
_GROUPS = MappingProxyType({torch.float32: 1, torch.bfloat16: 2, torch.int8: 4})
_QUANTIZED_ELEMENTS = 1 << 16  # at a time: they stay in a core's cache
_ZERO_POINT = 128  # of 8-bit inputs, which oneDNN takes as unsigned integers


class PackedLinear:
    """A float32 or bfloat16 weight in oneDNN's layout.

    On a CPU without instructions for bfloat16, which oneDNN has no packed products for, the kernels pack the
    weight and compute all products; they widen it as they read it.

    Args:
        kernels: if given, and if the layout is the one they read, they compute products of a few rows from
            the same memory. oneDNN's order of additions depends on the number of rows for some shapes.

    Attributes:
        panels: the packed memory, if the kernels read it; bfloat16 as uint16.
        max_rows: rows up to which the kernels compute a product.
    """

    def __init__(self, weight_OI: Tensor, kernels: NumbaKernels | None = None) -> None:
        self._outputs, self._inputs = weight_OI.shape
        self._dtype = weight_OI.dtype
        self._kernels = kernels
        if weight_OI.dtype == torch.bfloat16 and not has_native(torch.bfloat16):
            assert kernels is not None
            self._panels: Array | None = _pack_panels(weight_OI, kernels).view(np.uint16)
            self.max_rows: int = sys.maxsize
        else:
            self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
            self._panels = None if kernels is None else self._view_panels(weight_OI)
            self.max_rows = 0 if kernels is None or self._panels is None else kernels.linear.MAX_ROWS
        self.panels = None if self._has_half_pair else self._panels

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b, (T, O); `weight_OI`, the released weight, is not read."""
        if len(x_TI) > self.max_rows:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, bias_O, "none", [], "")
            return y_TO
        return self._multiply(x_TI.contiguous(), bias_O)

    @property
    def _has_half_pair(self) -> bool:
        """Whether the last input is half of a pair, which the kernels of whole layers do not expect."""
        return self._dtype == torch.bfloat16 and self._inputs % 2 == 1

    def _multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        assert self._kernels is not None
        assert self._panels is not None
        assert x_TI.shape[1] == self._inputs, f"inputs of width {x_TI.shape[1]} for {self._inputs}"
        assert x_TI.dtype == self._dtype, f"inputs of {x_TI.dtype} for {self._dtype}"
        assert bias_O is None or bias_O.shape == (self._outputs,), "a bias per output"
        y_TO = x_TI.new_empty(len(x_TI), self._outputs)
        if self._has_half_pair:
            x_TI = torch.nn.functional.pad(x_TI, (0, 1))
        x, y, bias = (as_array(t) for t in (x_TI, y_TO, y_TO[0, :0] if bias_O is None else bias_O))
        name = "float"
        if self._dtype == torch.bfloat16:
            name, x = "bf16", x.view(np.uint32)
        run_kernel(self._kernels.linear, name, x, self._panels, bias, y, _PANEL * _round_up(self._inputs))
        return y_TO

    def _view_panels(self, weight_OI: Tensor) -> Array | None:
        """Return oneDNN's memory, if it holds the layout that `kernels.numba.linear` describes."""
        if self._has_half_pair:
            return None
        mkldnn = torch.ops.mkldnn
        element = np.dtype(np.uint16 if self._dtype == torch.bfloat16 else np.float32)
        count = mkldnn._nbytes(self._weight) // element.itemsize
        rows, width = _round_up(self._outputs), _round_up(self._inputs)
        if count != rows * width:
            return None
        panels = _view_memory(self._weight, count, element)
        return panels if _holds_panels(panels, as_array(weight_OI), _GROUPS[self._dtype]) else None


def _pack_panels(weight_OI: Tensor, kernels: NumbaKernels) -> Array:
    """Return a bfloat16 or int8 weight in the layout of `kernels.numba.linear`; each group is a uint32."""
    group = _GROUPS[weight_OI.dtype]
    rows, width = map(_round_up, weight_OI.shape)
    panels = np.zeros((rows // _PANEL, width // group, _PANEL), np.uint32)
    if missing := -weight_OI.shape[1] % group:
        weight_OI = torch.nn.functional.pad(weight_OI, (0, missing))
    run_kernel(kernels.ordered, "pack", as_array(weight_OI.contiguous()).view(np.uint32), panels)
    return panels.reshape(-1)


def _view_memory(packed: Tensor | None, count: int, element: np.dtype[Any]) -> Array:
    """Return the first `count` elements of the memory of a weight that oneDNN packed."""
    address = torch.ops.mkldnn.data_ptr(packed)
    memory = (ctypes.c_uint8 * (count * element.itemsize)).from_address(address)
    return np.frombuffer(memory, element)  # type: ignore[call-overload,no-any-return]


def _holds_panels(panels: Array, weight: Array, group: int) -> bool:
    """Whether memory holds the weight in panels of 64 outputs, with `group` inputs side by side."""
    width = _round_up(weight.shape[1])
    blocks = panels.reshape(-1, width // group, _PANEL, group)
    for panel in {0, len(blocks) - 1}:  # the layout of one weight is the same in all its panels
        expected = weight[panel * _PANEL : (panel + 1) * _PANEL]
        actual = blocks[panel].transpose(1, 0, 2).reshape(_PANEL, width)
        if not np.array_equal(actual[: len(expected), : weight.shape[1]], expected):
            return False
    return True


class Int8Linear:
    """A weight in 8-bit integers with a scale per output, multiplied by 8-bit inputs with a scale per token.

    The sums are exact integers, so that a row of the result does not depend on the other rows.

    Args:
        kernels: if given, they round bfloat16 inputs and outputs in one pass each, and compute products of a
            few rows from oneDNN's memory, if it has the layout they read. The results have equal bits.
            On a CPU whose products overflow in oneDNN the kernels pack the weight and compute all products.

    Attributes:
        panels: the packed memory as int8, if the kernels read it.
        max_rows: rows up to which the kernels compute a product.
        scale_O: of each output, float32.
        zero_O: 128 times the sum of each output's integers, int32: the product of the zero point of the
            inputs.
    """

    def __init__(self, weight_OI: Tensor, kernels: NumbaKernels | None = None) -> None:
        self._inputs = weight_OI.shape[1]
        integers_OI, self.scale_O, sum_O = _quantize(weight_OI)
        self.zero_O = sum_O * _ZERO_POINT
        self._no_zeros_O = torch.zeros(len(sum_O), dtype=torch.int64)
        self._kernels = kernels
        if has_int8_products():
            self._weight = torch.ops.onednn.qlinear_prepack(integers_OI, None)
            self.panels = None if kernels is None else self._view_panels(integers_OI.numpy())
            self.max_rows: int = 0 if kernels is None else kernels.linear.MAX_ROWS
        else:
            assert kernels is not None
            self.panels = _pack_panels(integers_OI, kernels).view(np.int8)
            self.max_rows = sys.maxsize

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x Wᵀ + b, (T, O) in the dtype of x; `weight_OI`, the released weight, is not read."""
        if self._kernels is not None and x_TI.dtype == torch.bfloat16:
            if self.panels is not None and len(x_TI) <= self.max_rows:
                return self._multiply_rows(self._kernels, self.panels, x_TI.contiguous(), bias_O)
            return self._multiply_bf16(self._kernels, x_TI.contiguous(), bias_O)
        values_TI = x_TI.float()
        scale_T = _scale(values_TI)
        integers_TI = (values_TI / scale_T[:, None]).round_().add_(_ZERO_POINT).to(torch.uint8)
        y_TO = self._multiply(integers_TI)
        y_TO *= scale_T[:, None]
        if bias_O is not None:
            y_TO += bias_O
        return y_TO.to(x_TI.dtype)

    def _multiply_rows(
        self, kernels: NumbaKernels, panels: Array, x_TI: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        """Compute a product from the panels."""
        outputs = len(self.scale_O)
        assert x_TI.shape[1] == self._inputs, f"inputs of width {x_TI.shape[1]} for {self._inputs}"
        assert bias_O is None or bias_O.shape == (outputs,), "a bias per output"
        module = kernels.projection
        layer = np.zeros(module.COLUMNS, np.intp)
        layer[0] = panels.ctypes.data
        layer[module.BIASES] = 0 if bias_O is None else bias_O.data_ptr()
        layer[module.SCALES] = self.scale_O.data_ptr()
        layer[module.SUMS] = self.zero_O.data_ptr()
        y_TO = x_TI.new_empty(len(x_TI), outputs)
        run_kernel(module, "rows", as_array(x_TI), panels[:0], layer, as_array(y_TO))
        return y_TO

    def _view_panels(self, integers: Array) -> Array | None:
        rows, width = map(_round_up, integers.shape)
        count = rows * width  # sums of the weights follow
        if torch.ops.mkldnn._nbytes(self._weight) < count:
            return None
        panels = _view_memory(self._weight, count, np.dtype(np.int8))
        return panels if _holds_panels(panels, integers, _GROUPS[torch.int8]) else None

    def _multiply_bf16(self, kernels: NumbaKernels, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        integers_TI = torch.empty(x_TI.shape, dtype=torch.uint8)
        scale_T = np.empty(len(x_TI), np.float32)
        kernels.linear.quantize_rows(as_array(x_TI), integers_TI.numpy(), scale_T)
        sums_TO = self._multiply(integers_TI)
        y_TO = x_TI.new_empty(sums_TO.shape)
        assert bias_O is None or bias_O.shape == sums_TO.shape[1:], "a bias per output"
        bias = as_array(y_TO[0, :0] if bias_O is None else bias_O)
        kernels.linear.rescale_rows(sums_TO.numpy(), scale_T, bias, as_array(y_TO))
        return y_TO

    def _multiply(self, integers_TI: Tensor) -> Tensor:
        """Return the products with the weight, in units of the scale of the inputs, float32."""
        y_TO: Tensor = torch.ops.onednn.qlinear_pointwise(
            integers_TI, 1.0, _ZERO_POINT, self._weight, self.scale_O, self._no_zeros_O,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y_TO


Packed = PackedLinear | Int8Linear | PackedOrderedLinear
Pack = Callable[[Tensor], Packed]


def choose_packing(
    dtype: WeightDtype, kernels: NumbaKernels | None = None, *, batch_invariant: bool = False
) -> Pack | None:
    """Return a function that packs weights for this CPU; None: weights stay as they are.

    Raises:
        ConfigError: the products do not run here.
    """
    if batch_invariant:
        if kernels is None:
            hint = install_hint("mega-serve", "cpu")
            raise ConfigError("--batch-invariant", "needs the numba kernels, on a CPU", hint=hint)
        if dtype == "int8":
            raise ConfigError(
                "--batch-invariant",
                "training has no products of 8-bit integers",
                found="--dtype int8",
                wanted="float32 | bfloat16",
            )
        return lambda weight_OI: PackedOrderedLinear(weight_OI, kernels)
    if dtype == "int8":
        if kernels is None and not has_int8_products():
            what = "int8 on this CPU needs the numba kernels"
            raise ConfigError("--dtype", what, found="int8", hint=install_hint("mega-serve", "cpu"))
        return lambda weight_OI: Int8Linear(weight_OI, kernels)
    is_native = has_mkldnn() and (dtype == "float32" or has_native(torch.bfloat16))
    if is_native or (dtype == "bfloat16" and kernels is not None):
        return lambda weight_OI: PackedLinear(weight_OI, kernels)
    return None


def has_mkldnn() -> bool:
    """Whether torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def linear_layers(model: Decoder) -> dict[str, LinearLayer]:
    """Return the model's linear layers, by the name of their weight."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, ColumnLinear | RowLinear | LMHead)
    }


def pack_layer(layer: LinearLayer, packed: Packed) -> None:
    """Make a layer compute with a packed weight, and release its own."""
    layer.linear = packed
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in int8, the scale of each output, float32, and the sum of its integers, int32."""
    outputs, inputs = weight_OI.shape
    assert inputs < 1 << 17, "float32 sums of so many integers are not exact"
    integers_OI = torch.empty(outputs, inputs, dtype=torch.int8)
    scale_O = torch.empty(outputs)
    sum_O = torch.empty(outputs, dtype=torch.int32)
    rows = max(1, _QUANTIZED_ELEMENTS // inputs)
    for first in range(0, outputs, rows):
        block = slice(first, first + rows)
        values_BI = weight_OI[block].float()
        scale_O[block] = _scale(values_BI)
        values_BI = values_BI.div_(scale_O[block, None]).round_()
        integers_OI[block] = values_BI
        sum_O[block] = values_BI.sum(1)  # torch sums float32 five times as fast as integers
    return integers_OI, scale_O, sum_O


def _scale(x_RI: Tensor) -> Tensor:
    """Return the scale of each row that maps its largest magnitude to 127; 1 for a row of zeros."""
    largest_R = x_RI.abs().amax(1)
    return torch.where(largest_R > 0, largest_R / 127, 1.0)


def _round_up(width: int) -> int:
    return -(-width // _PANEL) * _PANEL
