"""The runtime of a model: mesh, dtype, kernels and parameter table that every module is built with."""

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
from mega_schema.sharding import block_lengths
from mega_schema.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Runtime:
    """The model, this rank's part of it, and the settings of its computation.

    Attributes:
        stage: the pipeline stage that a model built with this runtime holds.
        table: the model's parameters by name; modules take all shapes from here.
        weight_gradients: where backward accumulates the gradients of the weights.
        recompute: which layers backward recomputes.
        fp8: FP8 recipe of the linear layers; None computes them in `dtype`.
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
        """Return the runtime of this rank of the mesh, for its first stage.

        Args:
            fused_gradients: see `WeightGradients.fused`.
        """
        rows = {row.name: row for row in table(spec)}
        stage = mesh.stage(spec.layers)
        gradients = WeightGradients(fused=fused_gradients, product=kernels.add_product)
        return cls(spec, rows, stage, mesh.tp, dtype, mesh.device, kernels, gradients, recompute, fp8)

    @classmethod
    def single_process(
        cls, spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Self:
        """Return the runtime of one process that holds the whole model."""
        return cls.from_mesh(Mesh(WHOLE, 0, torch.device(device)), spec, dtype=dtype)

    def for_stage(self, stage: Stage) -> Self:
        """Return this runtime for another stage of this rank; everything else is shared."""
        return replace(self, stage=stage)

    def new_param(self, name: str) -> nn.Parameter:
        """Return an uninitialised tensor for this rank's shard of the parameter `name`."""
        shape = self.table[name].local_shape(self.tp.size)
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))

    def block_lengths(self, name: str) -> list[int]:
        """Return this rank's rows of each block of a fused parameter (such as its Q, K and V rows)."""
        row = self.table[name]
        assert row.split is not None
        return list(block_lengths(name, row.shape, row.split, self.tp.size))
