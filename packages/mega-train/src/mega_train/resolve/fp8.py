"""Check the options and the matrix shapes of FP8."""

from __future__ import annotations

from mega_schema.arch import table
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.fp8_recipe import MULTIPLE, Fp8Recipe
from mega_schema.parallel_layout import Layout
from mega_schema.params import is_layer_matrix
from mega_schema.spec import ModelSpec
from mega_train.config import RunConfig

_FLAG = "--fp8-format"


def fp8_recipe(run: RunConfig, spec: ModelSpec, layout: Layout) -> Fp8Recipe | None:
    """Build the FP8 recipe; None if FP8 is not used.

    Raises:
        ConfigError: two flags disagree.
        LayoutError: a rank's shard of a weight has a shape that GPUs do not multiply in FP8.
    """
    train = run.train
    if train.fp8 is None:
        if not train.fp8_weight_gradients:
            raise ConfigError("--no-fp8-wgrad", "needs --fp8-format", wanted=_FLAG, hint=f"{_FLAG} hybrid")
        return None
    if not train.bf16:
        found = "--fp16" if train.fp16 else "float32"
        hint = f"--bf16 {_FLAG} {train.fp8}"
        raise ConfigError(_FLAG, "needs bfloat16", found=found, wanted="--bf16", hint=hint)
    if run.parallel.tp_overlap:
        raise ConfigError(
            _FLAG, "excludes --tp-comm-overlap, which multiplies in bfloat16", hint="leave one of them out"
        )
    for row in filter(is_layer_matrix, table(spec)):
        shape = row.local_shape(layout.tp)
        if any(size % MULTIPLE for size in shape):
            raise LayoutError(
                _FLAG,
                f"{row.name} cannot be multiplied in FP8",
                found=f"{' x '.join(map(str, shape))} on a rank, tp={layout.tp}",
                wanted=f"multiples of {MULTIPLE}",
                hint="other widths, another --tensor-model-parallel-size, or --bf16 without --fp8-format",
            )
    return Fp8Recipe(train.fp8, train.fp8_weight_gradients)
