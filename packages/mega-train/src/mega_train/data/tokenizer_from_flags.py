"""Open the tokenizer that the flags name, for data that does not record its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import Family
from mega_schema.tokenizer.files import TIKTOKEN_SPECIAL
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_schema.tokenizer.tokenizer import Tokenizer, check_same_tokenizer, open_tokenizer
from mega_train.config import RunConfig, TokenizerConfig


def open_tokenizer_from_flags(run: RunConfig, family: Family = "gpt") -> tuple[RunConfig, Tokenizer | None]:
    """Open the tokenizer of the flags, if any, and set the run's vocabulary size from it.

    --vocab-file and --merge-file without a type select GPT2BPETokenizer, the default type of Megatron's
    pretrain_gpt.py, which its scripts leave out; --vocab-file alone selects BertWordPieceLowerCase for BERT
    and T5, that of pretrain_bert.py and pretrain_t5.py. A NullTokenizer is built from Megatron's
    --vocab-size, which does not count its end-of-document token.

    Raises:
        ConfigError: the type is unknown, or a file that it requires is not given.
        FormatError: a file is missing or is not a tokenizer.
    """
    config = run.tokenizer
    if config == TokenizerConfig():
        return run, None
    kind = config.type or _default_type(config, family)
    if config.model is not None and config.name_or_path is not None:
        raise ConfigError(
            "--tokenizer-name-or-path", "excludes --tokenizer-model", found="both", wanted="one of them"
        )
    tokenizer = open_tokenizer(
        kind,
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
        model=config.model or config.name_or_path,
        vocab_size=run.model.vocab,
        vocab_extra_ids=config.extra_ids,
        tiktoken_pattern=config.tiktoken_pattern,
        tiktoken_num_special_tokens=config.tiktoken_specials,
        tiktoken_special_tokens=config.tiktoken_names or TIKTOKEN_SPECIAL,
    )
    if tokenizer.identity.type == "NullTokenizer":
        run = replace(run, model=replace(run.model, vocab=tokenizer.identity.vocab_size))
    return run, tokenizer


def _default_type(config: TokenizerConfig, family: Family) -> str:
    """Infer the type of a tokenizer from its files.

    Raises:
        ConfigError: the files are not those of the family's tokenizer.
    """
    is_word_piece = family in ("bert", "t5") and config.merge_file is None
    if is_word_piece and config.vocab_file is not None and config.model is None:
        return "BertWordPieceLowerCase"
    if config.vocab_file is not None and config.merge_file is not None and config.model is None:
        return "GPT2BPETokenizer"
    raise ConfigError(
        "--tokenizer-type",
        "missing, and only --vocab-file with --merge-file has a default, GPT2BPETokenizer",
        wanted="Megatron's name of the tokenizer",
        hint="--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER",
    )


def check_tokenizer_flag(flag_identity: TokenizerIdentity, data_identity: TokenizerIdentity) -> None:
    """Refuse a tokenizer that differs from the one recorded in the data.

    Raises:
        ConfigError: ids, vocabulary or end of document differ.
    """
    try:
        check_same_tokenizer(data_identity, flag_identity, "--tokenizer-type")
    except FormatError as error:
        raise ConfigError(
            "--tokenizer-type",
            "is not the tokenizer of the data",
            found=error.wanted,
            wanted=error.found,
            hint="leave it out: the data records its tokenizer",
        ) from None


@contextmanager
def tokenizer_folder(tokenizer: Path | Tokenizer | None) -> Iterator[Path | None]:
    """Yield a folder of the tokenizer's files: its own, or a temporary one."""
    if tokenizer is None or isinstance(tokenizer, Path):
        yield tokenizer
        return
    with tempfile.TemporaryDirectory(prefix="mega-tokenizer-") as name:
        tokenizer.save(Path(name) / "tokenizer")
        yield Path(name) / "tokenizer"
