"""Check the probabilities of samples of BERT and T5."""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.errors import ConfigError
from mega_train.config.encoder_data import EncoderDataConfig


def check_probabilities(options: EncoderDataConfig) -> Iterator[ConfigError]:
    """Yield an error for each probability that is out of range."""
    if not 0 < options.mask_prob < 1:
        yield ConfigError("--mask-prob", "out of range", found=options.mask_prob, wanted="between 0 and 1")
    if not 0 <= options.short_seq_prob <= 1:
        yield ConfigError("--short-seq-prob", "out of range", found=options.short_seq_prob, wanted="0 to 1")
