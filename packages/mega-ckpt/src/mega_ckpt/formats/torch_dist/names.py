"""File names and tensor names of Megatron core's `torch_dist` folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from mega_ckpt.formats.megatron.names import Names, aliases
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_schema.arch import table
from mega_schema.checkpoint.reader import OPTIMIZER
from mega_schema.spec import ModelSpec

COMMON = "common.pt"
BACKENDS = "metadata.json"
WRITTEN_BY: Mapping[str, object] = MappingProxyType(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
)
MAIN_KIND = "fp32_param"
UNSHARDED_KIND = "param"  # the distributed optimizer's names of parameters saved whole
STATE_KINDS: Mapping[str, str] = MappingProxyType(
    dict(zip((MAIN_KIND, "exp_avg", "exp_avg_sq"), OPTIMIZER, strict=True))
)
LAYER = re.compile(r"\.layers\.(\d+)\.")
STACKED = re.compile(r"\.layers\.(?!\d)")
EXTRA_STATE = "._extra_state"


def expected_tensors(spec: ModelSpec, names: Names, padded: int) -> Iterator[ForeignTensor]:
    """Yield every tensor of the model, unsharded, with `padded` vocabulary rows."""
    rows = {row.name: row for row in table(spec)}
    for alias in aliases(spec, names):
        whole = alias.unsharded_tensor(rows[alias.ours])
        row = rows[alias.ours]
        vocabulary = row.split is not None and row.split.pad > 0
        yield replace(whole, shape=(padded, *whole.shape[1:])) if vocabulary else whole
