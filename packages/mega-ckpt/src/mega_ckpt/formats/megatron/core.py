"""Classic checkpoints under the names of Megatron's core class, with norms in TransformerEngine's linears."""

from __future__ import annotations

from mega_ckpt.formats.megatron.format import CORE

FORMAT = CORE
