"""Options of the samples of BERT and T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.app.config import option

EncoderFamily = Literal["bert", "t5"]
MaskType = Literal["words", "pieces", "long-words", "geometric", "permutation"]
SampleRule = Literal["mcore", "legacy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDataConfig:
    """Options of the samples of BERT and T5, besides those of DataConfig."""

    decoder_length: int = option("--decoder-seq-length", 128, "T5: tokens of the decoder's text")
    mask_prob: float = option("--mask-prob", 0.15, "share of the tokens to mask")
    short_seq_prob: float = option("--short-seq-prob", 0.1, "share of the samples that are shorter")
    mask_type: MaskType = option(
        "--mask-type",
        "words",
        "BERT: what is masked together: 1 to 3 words; 1 to 3 word pieces; 1 to 3 words, long n-grams more "
        "often; 1 to 10 words by a geometric distribution; or words, with as many other tokens permuted",
    )
    has_pairs: bool = option(
        "--bert-no-binary-head", True, "BERT: one segment, without prediction of the order of two"
    )
    sample_rule: SampleRule = option(
        "--sample-rule", "mcore", "padding masks of Megatron core 0.16, or those of Megatron and core 0.9"
    )
