"""What a module needs to know of the run it is built for, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import nn

from mega_model.distributed.mesh import Axis, Mesh
from mega_model.kernels import REFERENCE, Kernels
from mega_model.weight_gradients import WeightGradients
from mega_schema.arch import table
from mega_schema.fp8_recipe import Fp8Recipe
from mega_schema.parallel_layout import WHOLE, Stage
from mega_schema.params import Param
from mega_schema.recompute_policy import KEEP_ALL, RecomputePolicy
from mega_schema.sharding import run_lengths
from mega_schema.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Runtime:
    """The model, the part of it this rank holds, and how it computes.

    Attributes:
        stage: the pipeline stage that a model built for this holds.
        table: the model's parameters by name; a module takes its shapes from here and from nowhere else.
        weight_gradients: where the layers' backward passes leave the gradients of their weights.
        recompute: which layers are computed again in backward.
        fp8: how the layers' products are made in FP8; None makes them in `dtype`.
    """

    spec: ModelSpec
    table: dict[str, Param]
    stage: Stage
    tp: Axis
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    recompute: RecomputePolicy = KEEP_ALL
    fp8: Fp8Recipe | None = None

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh,
        spec: ModelSpec,
        *,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = REFERENCE,
        recompute: RecomputePolicy = KEEP_ALL,
        fp8: Fp8Recipe | None = None,
        fused_gradients: bool = True,
    ) -> Self:
        """The runtime of this rank of the mesh; the stage is its first.

        Args:
            fused_gradients: as `WeightGradients.fused`.
        """
        rows = {row.name: row for row in table(spec)}
        stage = mesh.stage(spec.layers)
        gradients = WeightGradients(fused=fused_gradients, product=kernels.add_product)
        return cls(spec, rows, stage, mesh.tp, dtype, mesh.device, kernels, gradients, recompute, fp8)

    @classmethod
    def single_process(
        cls, spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Self:
        """The runtime of one process that holds the whole model."""
        return cls.from_mesh(Mesh(WHOLE, 0, torch.device(device)), spec, dtype=dtype)

    def for_stage(self, stage: Stage) -> Self:
        """The same for another stage that this rank holds; all else is shared."""
        return replace(self, stage=stage)

    def new_param(self, name: str) -> nn.Parameter:
        """This rank's share of the parameter `name`, its values not yet set."""
        shape = self.table[name].local_shape(self.tp.size)
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))

    def run_lengths(self, name: str) -> list[int]:
        """How many rows of each run of a fused parameter this rank holds (its Q, K and V rows, say)."""
        row = self.table[name]
        assert row.split is not None
        return list(run_lengths(name, row.shape, row.split, self.tp.size))
