"""The parameter table of each model family."""

from __future__ import annotations

from mega_schema.arch import gpt, llama
from mega_schema.params import Param
from mega_schema.spec import ModelSpec


def table(spec: ModelSpec) -> tuple[Param, ...]:
    """Return the row of every parameter of the model, in the order of the forward pass."""
    family = {"gpt": gpt.rows, "llama": llama.rows}[spec.family]
    return tuple(family(spec))
