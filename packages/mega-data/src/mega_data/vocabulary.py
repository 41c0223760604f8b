"""Training a byte-level BPE tokenizer: GPT-2's, on any text (Sennrich et al. 2016, Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from mega_schema.errors import ConfigError
from mega_schema.tokenizer import Tokenizer, open_tokenizer

EOD = "<|endoftext|>"
SMALLEST = 1 + 256  # the end of a document, and every byte, so that any text has ids


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` ids, the same for the same texts; `<|endoftext|>` is id 0.

    It has fewer ids where the texts have too few pairs to merge.

    Raises:
        ConfigError: `vocab_size` leaves no room for every byte.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        wanted = f"{SMALLEST} or more: every byte, and {EOD}"
        raise ConfigError("--vocab-size", "too small for byte-level BPE", found=vocab_size, wanted=wanted)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(library.to_str(), "utf-8")
        return open_tokenizer("HuggingFaceTokenizer", model=path)
