"""Classic checkpoints with the tensor names of Megatron's core class and TransformerEngine's fused norms."""

from __future__ import annotations

from mega_ckpt.formats.megatron.format import CORE

FORMAT = CORE
