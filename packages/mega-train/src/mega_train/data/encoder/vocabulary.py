"""The special tokens and word pieces of a tokenizer, from which BERT and T5 samples are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

CONTINUATION = "##"  # begins a word piece that continues a word

BERT_HINT = "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"


@dataclass(frozen=True, slots=True)
class MaskingVocabulary:
    """Ids that masking refers to.

    Attributes:
        ids: (V,) every id that has a token, ascending.
        is_continuation: (size,) whether the id continues a word.
        cls, sep, mask, pad: special tokens.
        bos, eos: begin and end of a T5 target; None if the tokenizer has none.
        sentinels: ids of `<extra_id_0>` and so on.
    """

    ids: NDArray[np.int64]
    is_continuation: NDArray[np.bool_]
    cls: int
    sep: int
    mask: int
    pad: int
    bos: int | None
    eos: int | None
    sentinels: tuple[int, ...]

    def check_tokens(self, tokens: NDArray[np.int64], prefix: Path) -> None:
        """Check that the vocabulary contains the tokens of a sample.

        Args:
            prefix: the dataset.

        Raises:
            FormatError: a token is outside the vocabulary.
        """
        size = len(self.is_continuation)
        largest = int(tokens.max())
        if largest >= size:
            raise FormatError(
                prefix,
                "contains a token outside the tokenizer's vocabulary",
                found=largest,
                wanted=f"0 to {size - 1}",
                hint="the tokenizer that the dataset was made with",
            )

    def check_sentinels(self) -> None:
        """Check that the vocabulary has the special tokens of T5.

        Raises:
            ConfigError: it has no begin, no end or no sentinel.
        """
        if self.bos is None or self.eos is None or not self.sentinels:
            raise ConfigError(
                "--vocab-extra-ids",
                "the tokenizer has no sentinels for T5",
                found=len(self.sentinels),
                wanted="[BOS], [EOS], <extra_id_0> and so on",
                hint="mega-data preprocess --vocab-extra-ids 100",
            )

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> MaskingVocabulary:
        """Look up the special tokens of BERT's tokenizers, or of a SentencePieceTokenizer.

        Raises:
            ConfigError: a token is missing.
        """
        identity = tokenizer.identity
        return cls.from_pieces(tokenizer.pieces(range(identity.vocab_size)), identity.type)

    @classmethod
    def from_pieces(cls, pieces: Sequence[str], tokenizer_type: str) -> MaskingVocabulary:
        """Look up the special tokens among the pieces, where "" is an id without a token.

        Raises:
            ConfigError: a token is missing.
        """
        number_by_name = {piece: number for number, piece in enumerate(pieces) if piece}

        def find(word: str) -> int | None:
            names = (f"[{word}]", f"<{word}>", f"<{word.lower()}>")
            return next((number_by_name[name] for name in names if name in number_by_name), None)

        special = {word: find(word) for word in ("CLS", "SEP", "MASK", "PAD")}
        missing = [f"[{word}]" for word, number in special.items() if number is None]
        if missing:
            raise ConfigError(
                "--tokenizer-type",
                f"has no {' and no '.join(missing)}",
                found=tokenizer_type,
                wanted="a tokenizer of BERT",
                hint=BERT_HINT,
            )
        cls_id, sep, mask, pad = (number for number in special.values() if number is not None)
        sentinels = list[int]()
        while (name := f"<extra_id_{len(sentinels)}>") in number_by_name:
            sentinels.append(number_by_name[name])
        return cls(
            ids=np.array(sorted(number_by_name.values()), np.int64),
            is_continuation=np.array([piece.startswith(CONTINUATION) for piece in pieces], np.bool_),
            cls=cls_id,
            sep=sep,
            mask=mask,
            pad=pad,
            bos=find("BOS") if find("BOS") is not None else number_by_name.get("<s>"),
            eos=find("EOS") if find("EOS") is not None else number_by_name.get("</s>"),
            sentinels=tuple(sentinels),
        )
