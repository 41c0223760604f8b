"""Checks of the kind of a model, for programs that run one kind only."""

from __future__ import annotations

from pathlib import Path

from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec


def require_decoder(spec: ModelSpec, where: Path) -> None:
    """Refuse an encoder, with or without a decoder.

    Args:
        where: the checkpoint of the model.

    Raises:
        ConfigError: the model has an encoder.
    """
    if spec.encoder_layers is not None:
        raise ConfigError(
            f"{where}: model.encoder_layers",
            "is of an encoder with a decoder, which cannot be run yet",
            found=spec.encoder_layers,
            wanted="a decoder, as in models of the families gpt and llama",
            hint="mega-train t5 trains and validates it",
        )
    if not spec.causal:
        export = (
            f"mega-ckpt convert --from mega --to hf --load {where} --save FOLDER lets transformers run it"
        )
        raise ConfigError(
            f"{where}: model.causal",
            "is of an encoder, which predicts no next token",
            found="false",
            wanted="true, as in models of the families gpt and llama",
            hint=export,
        )
