"""The parameters of a Llama style model: RMSNorm, rotary positions, a gated feed-forward, and no biases.

Only queries, keys and values have biases, if `qkv_bias` is set (Qwen 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mega_schema.arch.common import attention, embedding, head, matrix, norm
from mega_schema.errors import ConfigError
from mega_schema.params import Param
from mega_schema.sharding import Split
from mega_schema.spec import ModelSpec

_FIXED: Mapping[str, object] = MappingProxyType(
    {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "bias": False,
        "post_norm_residual": False,
        "parallel_residual": False,
        "scale_embedding": False,
        "embed_norm": False,
    }
)


def rows(m: ModelSpec) -> Iterator[Param]:
    """Yield the row of every parameter, in the order of the forward pass.

    Raises:
        ConfigError: the spec asks for something this family does not have.
    """
    for name, only in _FIXED.items():
        if getattr(m, name) != only:
            raise ConfigError(
                f"model.{name}",
                "the llama family has one choice",
                found=getattr(m, name),
                wanted=only,
                hint="mega-train gpt has the others",
            )
    d, f = m.hidden, m.ffn
    yield embedding(m)
    for i in range(m.layers):
        prefix = f"layers.{i}."
        yield from attention(m, i)
        yield from norm(m, prefix + "ffn_norm", i)
        yield matrix(m, prefix + "gate_up.weight", (2 * f, d), i, Split("tp", 0, (f, f)))
        yield matrix(m, prefix + "down.weight", (d, f), i, Split("tp", 1), residual=True)
    yield from norm(m, "final_norm", "last")
    yield head(m)
