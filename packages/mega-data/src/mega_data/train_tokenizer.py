"""Train tokenizers, and write the files that Megatron's flags and Hugging Face's libraries read.

bpe        byte-level, GPT-2's (Sennrich et al. 2016, Radford et al. 2019): lossless for any text
wordpiece  BERT's (Schuster and Nakajima 2012, Devlin et al. 2019): words split at spaces and punctuation
unigram    SentencePiece's (Kudo 2018) with byte fallback: lossless for any text
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mega_data.sentencepiece_model import model_proto
from mega_data.tokenizer_counts.counted_words import CountedWords
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.fast import CONTENT
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer, open_tokenizer, save_folder

if TYPE_CHECKING:
    import tokenizers

TYPES = ("bpe", "wordpiece", "unigram")
EOD = "<|endoftext|>"
MIN_BPE_SIZE = 1 + 256  # the eod, and every byte, so that any text can be encoded
WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNIGRAM_SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
_PRIVATE = 0xF0000  # the first code point of Unicode's plane 15
_SPACE = "\u2581"
# The `tokenizers` library searches special pieces in text too. With such a score, and their letters in the
# vocabulary, it never matches one: `<s>` in a text is three letters, as in SentencePiece.
_LOWEST_SCORE = -1000.0
_SPELLING = "".join(sorted({*"".join(UNIGRAM_SPECIALS), *"0123456789ABCDEFx"}))


def train(
    texts: Iterable[str], vocab_size: int, *, kind: str = "bpe", lowercase: bool = False
) -> FastTokenizer:
    """Train a tokenizer of at most `vocab_size` ids, the same for the same texts.

    It has fewer ids if the texts have too few pairs to merge. `<|endoftext|>` is id 0 of a bpe; the first ids
    of the others are WORDPIECE_SPECIALS and UNIGRAM_SPECIALS.

    Args:
        kind: one of TYPES.
        lowercase: fold case and accents before words are split; only for wordpiece.

    Raises:
        ConfigError: `vocab_size` is too small for the required tokens of the kind, or there is no text.
    """
    check_kind(kind, vocab_size, lowercase=lowercase)
    all_texts = iter(texts)
    first_text = next(all_texts, None)
    if first_text is None:
        raise ConfigError("--input", "contains no text", wanted="one document or more")
    texts = chain([first_text], all_texts)
    library = {"bpe": _bpe, "wordpiece": _wordpiece, "unigram": _unigram}[kind](texts, vocab_size, lowercase)
    return _open_library(library)


def check_kind(kind: str, vocab_size: int, *, lowercase: bool) -> None:
    """Refuse a kind of tokenizer, or options that it does not have.

    Raises:
        ConfigError: the kind is unknown, or an option does not fit it.
    """
    if kind not in TYPES:
        raise ConfigError("--type", "unknown", found=kind, wanted=" | ".join(TYPES))
    if lowercase and kind != "wordpiece":
        raise ConfigError("--lowercase", "is wordpiece's", found=f"--type {kind}", hint="--type wordpiece")
    if kind == "bpe" and vocab_size < MIN_BPE_SIZE:
        wanted = f"{MIN_BPE_SIZE} or more: every byte, and {EOD}"
        raise ConfigError("--vocab-size", "too small for byte-level BPE", found=vocab_size, wanted=wanted)


def train_on_counts(
    counts: Path,
    letters: Sequence[str],
    vocab_size: int,
    *,
    kind: str,
    lowercase: bool = False,
    min_frequency: int = 1,
) -> FastTokenizer:
    """Train the tokenizer that `train` gives for the counted texts.

    Args:
        counts: counts of their words, see `tokenizer_counts.word_counts`.
        letters: the letters inside of words in the order of their first occurrence; only for wordpiece.
        kind: bpe or wordpiece.
        min_frequency: leave out words that occur fewer times.

    Raises:
        ConfigError: `vocab_size` is too small.
    """
    words = CountedWords.read(counts, min_frequency)
    if kind == "bpe":
        tokens = [EOD, *_byte_letters()]
        return _open_library(_byte_level_library(*words.train(tokens, words.codes, vocab_size)))
    inside = words.inside_letters(letters)
    tokens = [*WORDPIECE_SPECIALS, *words.letters(inside, _PRIVATE)]
    vocab, _ = words.train(tokens, words.replace_inside(inside, _PRIVATE), vocab_size)
    return _open_library(_wordpiece_library(vocab, vocab_size, inside, lowercase))


def _open_library(library: tokenizers.Tokenizer) -> FastTokenizer:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(library.to_str(), "utf-8")
        trained = open_tokenizer("HuggingFaceTokenizer", model=path)
    assert isinstance(trained, FastTokenizer)
    return trained


def _byte_letters() -> list[str]:
    """Return the letters for the 256 bytes."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_level_library(
    vocab: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None
) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if vocab is not None:
        library.add_special_tokens([AddedToken(EOD, special=True)])
    return library


def _bpe(texts: Iterable[str], vocab_size: int, _: bool) -> tokenizers.Tokenizer:
    from tokenizers import trainers

    library = _byte_level_library()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=_byte_letters(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def _wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool) -> tokenizers.Tokenizer:
    """Train WordPiece with the pairs of byte-pair encoding, as Hugging Face's trainer, but deterministically.

    That trainer numbers the letters inside words in the order of a hash table, and so breaks ties at random.
    During training each such letter is mapped to a private use character of Unicode, which the normalizer
    removes from words.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inside: dict[str, str] = {}  # letter inside a word -> private use letter

    def words() -> Iterator[str]:
        for text in texts:
            plain_words = (word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)))
            yield " ".join(
                word[0] + "".join(inside.setdefault(c, chr(_PRIVATE + len(inside))) for c in word[1:])
                for word in plain_words
            )
        yield " ".join(inside)  # each may begin a word of another text

    trained = Library(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = list(WORDPIECE_SPECIALS)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    trained.train_from_iterator(words(), trainer)
    return _wordpiece_library(trained.get_vocab(), vocab_size, [*inside], lowercase)


def _wordpiece_library(
    trained: dict[str, int], vocab_size: int, inside: Sequence[str], lowercase: bool
) -> tokenizers.Tokenizer:
    """Build the tokenizer from the tokens of byte-pair encoding.

    Args:
        inside: the letters inside of words; private use letters stand for them in the tokens, in this order.

    Raises:
        ConfigError: `vocab_size` is less than the letters.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if (size := len(trained)) > vocab_size:
        wanted = f"{size} or more: each letter as a word's first and inside of words"
        raise ConfigError("--vocab-size", "too small for wordpiece", found=vocab_size, wanted=wanted)
    letters = {chr(_PRIVATE + number): letter for number, letter in enumerate(inside)}
    vocab = {}
    for token, number in sorted(trained.items(), key=itemgetter(1)):
        prefix = "##" if token[:1] in letters else ""
        vocab[prefix + "".join(letters.get(c, c) for c in token)] = number
    library = Library(models.WordPiece(vocab, unk_token="[UNK]"))
    library.add_special_tokens(list(WORDPIECE_SPECIALS))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    return library


def _unigram(texts: Iterable[str], vocab_size: int, _: bool) -> tokenizers.Tokenizer:
    """Train with SentencePiece and convert the model to a tokenizer.json with the same ids."""
    try:
        import sentencepiece
    except ImportError:
        hint = install_hint("mega-data", "sentencepiece")
        raise ConfigError("--type unigram", "needs sentencepiece", hint=hint) from None
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Library

    model = BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_split_long_lines(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            required_chars=_SPELLING,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        wanted = f"more: {len(UNIGRAM_SPECIALS)} special tokens, 256 bytes, and the letters of the text"
        reason = str(error).rpartition("] ")[2]
        raise ConfigError(
            "--vocab-size", "not one for a unigram", found=f"{vocab_size} ({reason})", wanted=wanted
        ) from None
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    special = [i < len(UNIGRAM_SPECIALS) or pieces.is_byte(i) for i in range(pieces.get_piece_size())]
    vocab = [
        (pieces.id_to_piece(i), _LOWEST_SCORE if s else pieces.get_score(i)) for i, s in enumerate(special)
    ]
    library = Library(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    library.add_special_tokens([AddedToken(name, special=True) for name in UNIGRAM_SPECIALS])
    library.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def _split_long_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines of at most 1,000 characters: SentencePiece skips those of more than 4,192 bytes."""
    for text in texts:
        for line in text.replace("\0", " ").split("\n"):
            for start in range(0, len(line), 1000):
                yield line[start : start + 1000]


def save(tokenizer: FastTokenizer, folder: Path) -> list[str]:
    """Write the tokenizer's folder with the files that Megatron and `transformers` read.

    bpe: vocab.json and merges.txt; wordpiece: vocab.txt; unigram: tokenizer.model. All: tokenizer.json and
    tokenizer_config.json. The folder is replaced atomically.

    Returns:
        Names of the files other than tokenizer.json and identity.json.
    """
    content = json.loads(tokenizer.source)
    files = _export_files(content)
    save_folder(folder, tokenizer.identity, {CONTENT: tokenizer.source.encode(), **files})
    return sorted(files)


def _export_files(content: dict[str, Any]) -> dict[str, bytes]:
    model = content["model"]
    special = [token["content"] for token in content["added_tokens"]]
    if model["type"] == "BPE":
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        vocab = json.dumps(model["vocab"], ensure_ascii=False).encode()
        lines = "\n".join(["#version: 0.2", *merges, ""]).encode()
        names = dict.fromkeys(("eos_token", "bos_token", "unk_token"), EOD)
        files = {"vocab.json": vocab, "merges.txt": lines}
    elif model["type"] == "WordPiece":
        ordered = sorted(model["vocab"], key=model["vocab"].__getitem__)
        files = {"vocab.txt": "".join(f"{token}\n" for token in ordered).encode()}
        kinds = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        names = dict(zip(kinds, special, strict=True))
    else:
        files = {"tokenizer.model": model_proto(model["vocab"], len(special))}
        names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    files["tokenizer_config.json"] = (json.dumps(config, indent=1) + "\n").encode()
    return files


def describe(tokenizer: Tokenizer) -> str:
    """Describe a tokenizer: its size, its eod and its hash."""
    identity = tokenizer.identity
    return f"{identity.vocab_size:,} ids, eod {identity.eod}, sha256 {identity.sha256[:12]}"
