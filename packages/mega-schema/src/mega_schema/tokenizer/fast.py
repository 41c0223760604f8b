"""A tokenizer.json, opened by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mega_schema.errors import FormatError, RequestError
from mega_schema.tokenizer.files import byte_alphabet
from mega_schema.tokenizer.identity import TokenizerIdentity, content_sha256

if TYPE_CHECKING:
    import tokenizers

CONTENT: Final = "tokenizer.json"


class FastTokenizer:
    """A tokenizer of the `tokenizers` library, from the text of its tokenizer.json.

    Attributes:
        companions: Hugging Face files that are copied with it; no id depends on them.
    """

    def __init__(
        self,
        source: str | Callable[[], str],
        identity: TokenizerIdentity,
        library: tokenizers.Tokenizer | LibraryOpening | None = None,
        companions: Mapping[str, bytes] = MappingProxyType({}),
        content: dict[str, Any] | None = None,
    ) -> None:
        """Create a tokenizer that the library may not have opened yet.

        Args:
            source: text of the tokenizer.json, or a function that produces it on first use.
            library: the opened source, or what opens it on first use; None opens `source` then: a process may
                hold this value and encode with another library.
            content: the parsed source, if known, for the first call of `content`.
        """
        self.identity = identity
        self.companions = dict(companions)
        self._source = source
        self._opening = library
        self._content = content

    @cached_property
    def source(self) -> str:
        """Text of the tokenizer.json, as `save` writes it."""
        # free the function, which may hold a vocabulary
        source = self._source
        self._source = ""
        return source if isinstance(source, str) else source()

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        if self._opening is None:
            return open_library(self.source, self.identity.type)
        if isinstance(self._opening, LibraryOpening):
            self._opening = self._opening.open()  # frees its text
        return self._opening

    def open(self) -> None:
        """Open the source with the library, and write it, if that has not happened yet.

        Raises:
            FormatError: the library cannot open it.
        """
        assert self._library is not None
        assert self.source

    def limit_cache(self, words: int) -> None:
        """Keep the ids of at most `words` words that were encoded, for a process that runs for months.

        The library keeps those of 10,000 words of up to 256 characters: hostile texts fill 67 MB with them.
        """
        resize = getattr(self._library.model, "_resize_cache", None)  # BPE and Unigram have a cache
        if resize is not None:
            resize(words)

    def content(self) -> dict[str, Any]:
        """Return the parsed source; the first call after `open_tokenizer` need not parse it.

        Its merges are lines or lists of tokens; the format allows both.
        """
        content = self._content
        self._content = None
        return json.loads(self.source) if content is None else content

    @cached_property
    def _bytes(self) -> dict[str, int] | None:
        decoder = json.loads(self._library.decoder.__getstate__()) if self._library.decoder else {}
        kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
        return byte_alphabet() if "ByteLevel" in kinds else None

    def __reduce__(self) -> tuple[object, ...]:
        opening = self._opening
        is_written = "source" in self.__dict__
        # do not write the source only to pickle it: the receiver would wait for it
        source = opening.text if isinstance(opening, LibraryOpening) and not is_written else self.source
        return FastTokenizer, (source, self.identity, None, self.companions)

    def encode(self, text: str) -> list[int]:
        _check_utf8(text)
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            _check_utf8(text)
        return [e.ids for e in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, and [begin, end) of the characters of each id."""
        for text in texts:
            _check_utf8(text)
        return [(e.ids, e.offsets) for e in self._library.encode_batch(list(texts), add_special_tokens=False)]

    def special_tokens_around(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor adds before and after those of `text`.

        Raises:
            FormatError: it adds ids between them.
        """
        whole = self._library.encode(text)
        mask = [*whole.special_tokens_mask]
        first = mask.index(0) if 0 in mask else len(mask)
        last = len(mask) - (mask[::-1].index(0) if 0 in mask else 0)
        if whole.ids[first:last] != self.encode(text):
            found = f"{whole.ids} of {text!r}"
            raise FormatError("post_processor", "adds ids inside a text", found=found)
        return whole.ids[:first], whole.ids[last:]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode([int(i) for i in ids], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._piece(self._library.id_to_token(int(i)) or "") for i in ids]

    def save(self, folder: Path) -> None:
        from mega_schema.tokenizer.tokenizer import save_folder

        save_folder(folder, self.identity, {**self.companions, CONTENT: self.source.encode()})

    def _piece(self, token: str) -> str:
        if self._bytes is None:
            return token.replace("▁", " ")
        if not set(token) <= self._bytes.keys():
            return token  # an added token, which is text already
        return bytes(self._bytes[char] for char in token).decode("utf-8", errors="replace")


def _check_utf8(text: str) -> None:
    """Refuse a text that UTF-8 cannot encode: the library's behaviour differs between versions.

    Raises:
        RequestError: the text holds half of a surrogate pair.
    """
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        raise RequestError("text", "half of a surrogate pair", wanted="text that UTF-8 can hold") from None


def open_library(source: str, where: object) -> tokenizers.Tokenizer:
    """Open the text of a tokenizer.json with the library.

    Raises:
        FormatError: the library refuses it.
    """
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(source)
    except BaseException as error:  # the library's panics are not subclasses of Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        hint = "copy the files of one tokenizer again"
        raise FormatError(where, "not a tokenizer.json", found=str(error), hint=hint) from None
    # a file may enable both; ids must not depend on the length of a text or of others in the batch
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


def dump_compact(content: Mapping[str, Any]) -> str:
    """Write the text of a tokenizer.json for the library, ten times as fast as `json`.

    Merges that are lines stay lines, which the library reads faster than lists.
    """
    try:
        import orjson

        return orjson.dumps(content).decode()
    except (ImportError, TypeError):  # not installed; a word that UTF-8 cannot encode, or an id above 64 bits
        return json.dumps(content, ensure_ascii=False)


class LibraryOpening:
    """A content that the library opens later: it holds Python's lock meanwhile, so a thread gains nothing.

    Attributes:
        text: of the tokenizer.json that it opens.
    """

    def __init__(self, text: str, where: object, source: Callable[[], str]) -> None:
        """Store what to open.

        Args:
            source: another text of the same content, whose lines and columns errors refer to.
        """
        self.text = text
        self._where = where
        self._source = source

    def open(self) -> tokenizers.Tokenizer:
        """Open the text.

        Raises:
            FormatError: the library refuses it.
        """
        try:
            return open_library(self.text, self._where)
        except FormatError:
            return open_library(self._source(), self._where)


def open_and_hash(source: str, where: object) -> tuple[tokenizers.Tokenizer, dict[str, Any], str]:
    """Open the text of a tokenizer.json; return the library's tokenizer, the parsed content, and its hash.

    Raises:
        FormatError: the library refuses the text.
    """
    library = open_library(source, where)
    content = json.loads(source)
    return library, content, content_sha256(content)
