"""Check the options that --batch-invariant excludes."""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.errors import ConfigError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.row_segments import check_segments
from mega_schema.spec import ModelSpec
from mega_train.config import TrainConfig

_FLAG = "--batch-invariant"


def check_batch_invariant(train: TrainConfig, spec: ModelSpec, layout: Layout) -> Iterator[MegaError]:
    """Check that every product and sum of a forward pass has an order that the kernels can keep.

    Yields:
        an error if another option needs other kernels.

    Raises:
        LayoutError: tp cuts a segment of a product.
    """
    if not train.batch_invariant:
        return
    if train.fp16:
        yield ConfigError(_FLAG, "has no products of float16", found="--fp16", wanted="--bf16 or float32")
    if train.fp8:
        hint = "leave one of them out"
        yield ConfigError(_FLAG, "has no products in FP8", found=f"--fp8-format {train.fp8}", hint=hint)
    if train.kernels != "auto":
        found = f"--kernels {train.kernels}"
        yield ConfigError(_FLAG, "has kernels of its own", found=found, wanted="--kernels auto")
    if layout.cp > 1:
        yield ConfigError(
            _FLAG,
            "attention sums the keys of a sequence in order, on one rank",
            found=f"context parallelism over {layout.cp} ranks",
            wanted="1",
            hint="leave --context-parallel-size out",
        )
    check_segments(spec, layout.tp)
