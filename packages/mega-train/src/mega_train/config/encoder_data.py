"""Options of the samples of BERT and T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.app.config import option

EncoderFamily = Literal["bert", "t5"]
MaskType = Literal["words", "pieces", "tokens", "long-words", "geometric", "permutation"]
SampleRule = Literal["mcore", "legacy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDataConfig:
    """Options of the samples of BERT and T5, besides those of DataConfig."""

    mask_prob: float = option("--mask-prob", 0.15, "share of the tokens to mask")
    short_seq_prob: float = option("--short-seq-prob", 0.1, "share of the samples that are shorter")
    mask_type: MaskType = option(
        "--mask-type",
        "words",
        "what is masked together: 1 to 3 words; 1 to 3 word pieces; one token; 1 to 3 words, "
        "long n-grams more often; 1 to 10 words by a geometric distribution; or words, with as many other "
        "tokens permuted",
    )
    no_binary_head: bool = option(
        "--bert-no-binary-head",
        False,
        "one segment without token types, and no head that predicts the order of two segments",
    )
    unpad: bool = option(
        "--unpad-samples", False, "compute no padding of the samples; with --sample-rule legacy's mask"
    )
    sample_rule: SampleRule = option(
        "--sample-rule", "mcore", "padding masks of Megatron core 0.16, or those of Megatron and core 0.9"
    )

    decoder_length: int = option("--decoder-seq-length", 128, "tokens of a sample of T5's decoder")

    @property
    def has_pairs(self) -> bool:
        """Whether a sample of BERT has two segments."""
        return not self.no_binary_head
