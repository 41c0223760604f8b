"""The parameter table of a model."""

from __future__ import annotations

from mega_schema.arch import decoder, encoder, encoder_decoder
from mega_schema.params import Param
from mega_schema.spec import ModelSpec


def table(spec: ModelSpec) -> tuple[Param, ...]:
    """Return the row of every parameter of the model, in the order of the forward pass."""
    if spec.encoder_layers is not None:
        return tuple(encoder_decoder.rows(spec, spec.encoder_layers))
    return tuple((decoder if spec.causal else encoder).rows(spec))
