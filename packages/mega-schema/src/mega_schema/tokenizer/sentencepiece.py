"""SentencePiece models, with the special tokens that Megatron adds to them for each of its type names.

SentencePieceTokenizer      <CLS> <SEP> <EOD> <MASK>, pad, bos, eos and `<extra_id_i>`; missing ones are added
after
                            the model's last piece; eod is <EOD>
GPTSentencePieceTokenizer   the model's own bos, eos and pad; eod is its eos
Llama2Tokenizer             the same; `mega-data preprocess` begins each sequence with its bos, like Megatron
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError, RequestError
from mega_schema.tokenizer.identity import TokenizerIdentity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODEL: Final = "tokenizer.model"
_ADDED: Final = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePiece:
    """A SentencePiece model; can be pickled.

    Attributes:
        model: the bytes of its file.
    """

    def __init__(self, model: bytes, identity: TokenizerIdentity) -> None:
        self.model = model
        self.identity = identity

    def __reduce__(self) -> tuple[object, ...]:
        return SentencePiece, (self.model, self.identity)

    @cached_property
    def _library(self) -> Any:
        return _open_library(self.model, MODEL)

    @cached_property
    def _special_words(self) -> dict[int, str]:
        """Special tokens by id, including the model's own."""
        return {i: word for word, i in _special(self._library, self.identity.type, 0).items()} | {
            i: f"<extra_id_{i - first}>"
            for first in [_first_extra_id(self._library, self.identity.type)]
            for i in range(first, self.identity.vocab_size)
        }

    def encode(self, text: str) -> list[int]:
        return list(map(int, self.encode_arrays([text])[0]))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text, on this thread.

        Raises:
            RequestError: a text cannot be encoded as UTF-8.
        """
        import numpy as np  # imported late: other tokenizers do not need it, and open faster than it imports

        try:
            return [
                np.asarray(ids, np.int32)
                for ids in self._library.encode(list(texts), out_type="numpy", num_threads=1)
            ]
        except (UnicodeEncodeError, TypeError):
            wanted = "text that UTF-8 can hold"
            raise RequestError("text", "half of a surrogate pair", wanted=wanted) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens as text, without a space before the first word."""
        parts, run = list[str](), list[int]()
        for i in [*map(int, ids), -1]:
            if 0 <= i < len(self._library) and i not in self._special_words:
                run.append(i)
                continue
            parts += [self._library.decode(run)] if run else []
            parts += [self._special_words[i]] if i in self._special_words else []
            run = []
        return "".join(parts)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._piece(int(i)) for i in ids]

    def save(self, folder: Path) -> None:
        from mega_schema.tokenizer.tokenizer import save_folder

        save_folder(folder, self.identity, {MODEL: self.model})

    def _piece(self, i: int) -> str:
        if i in self._special_words:
            return self._special_words[i]
        if not 0 <= i < len(self._library):
            return ""
        piece = str(self._library.id_to_piece(i))
        if self._library.is_byte(i):
            return bytes([int(piece[3:5], 16)]).decode("utf-8", "replace")
        return piece.replace("▁", " ")


def open_model(path: Path, type: str, *, extra_ids: int = 0) -> SentencePiece:
    """Open a model's file, as one of Megatron's three types.

    Args:
        extra_ids: sentinels to add to a SentencePieceTokenizer.

    Raises:
        ConfigError: the sentencepiece library is not installed.
        FormatError: the file is not a model.
    """
    try:
        model = path.read_bytes()
    except OSError as error:
        raise FormatError(
            path, "not readable", found=error.strerror, wanted="a SentencePiece model"
        ) from None
    library = _open_library(model, path)
    sha256 = content_sha256(model)
    special = _special(library, type, extra_ids)
    eod, bos, pad = (None if i < 0 else i for i in (library.eos_id(), library.bos_id(), library.pad_id()))
    if type == "SentencePieceTokenizer":
        eod = special["<EOD>"]
        bos = special.get("<BOS>", bos)
        pad = special.get("<PAD>", pad)
    size = 1 + max([len(library) - 1, *special.values()])
    return SentencePiece(model, TokenizerIdentity(type, size, eod, bos, pad, sha256))


def content_sha256(model: bytes) -> str:
    """Return the hash of the content that determines the ids: the model's file."""
    return hashlib.sha256(model).hexdigest()


def _open_library(model: bytes, where: object) -> Any:
    try:
        import sentencepiece
    except ImportError:
        hint = install_hint("mega-schema", "sentencepiece")
        raise ConfigError(
            where, "needs a library that is not installed", wanted="sentencepiece", hint=hint
        ) from None
    library = sentencepiece.SentencePieceProcessor()
    try:
        library.LoadFromSerializedProto(model)
    except (RuntimeError, OSError) as error:
        found = " ".join(str(error).split())
        raise FormatError(where, "not a SentencePiece model", found=found) from None
    return library


def _special(library: Any, type: str, extra_ids: int) -> dict[str, int]:
    """Return special tokens and their ids; missing ones follow the model's last piece."""
    control_tokens = {str(library.id_to_piece(i)): i for i in range(len(library)) if library.is_control(i)}
    if type != "SentencePieceTokenizer":
        return control_tokens
    ids = (library.pad_id(), library.bos_id(), library.eos_id())
    default_names = ("<PAD>", "<BOS>", "<EOS>")
    names = [
        str(library.id_to_piece(i)) if i >= 0 else name for i, name in zip(ids, default_names, strict=True)
    ]
    special = dict[str, int]()
    next_id = len(library)
    for name in (*_ADDED, *names, *(f"<extra_id_{i}>" for i in range(extra_ids))):
        piece_id = int(library.piece_to_id(name))
        is_known = str(library.id_to_piece(piece_id)) == name
        if name not in special:
            special[name] = piece_id if is_known else next_id
            next_id += not is_known
    return control_tokens | special


def _first_extra_id(library: Any, type: str) -> int:
    """Return the id of the first `<extra_id_i>`."""
    return 1 + max([len(library) - 1, *_special(library, type, 0).values()])
