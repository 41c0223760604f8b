"""Read held-out text from JSON lines, from plain text files or from an indexed dataset."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mega_eval.compressed_file import JSON_LINES, base_suffix, check_file, open_file, read_utf8
from mega_eval.json_text import parse_json
from mega_eval.windows import Tokens, as_tokens
from mega_schema.app.path_hints import suggest_dataset
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, TokenizerIdentity, check_same_tokenizer

_log = logging.getLogger("mega.eval")


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents as text and as tokens, in the same order; none is empty.

    Attributes:
        texts: the text of each document.
        tokens: the ids of each document, without the end-of-document token.
        empty: number of documents that were skipped because they have no tokens.
    """

    texts: list[str]
    tokens: list[Tokens]
    empty: int

    @property
    def bytes(self) -> int:
        """Length of all texts in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)

    def first(self, count: int | None) -> Documents:
        """Return the first `count` documents; None: all."""
        return Documents(self.texts[:count], self.tokens[:count], self.empty)


def read_text(path: Path) -> str:
    """Read a UTF-8 file, which may be compressed; its line ends are not converted.

    Raises:
        FormatError: the file is missing, damaged, empty or not UTF-8.
    """
    text = read_utf8(path, "utf-8-sig")
    if not text.strip():
        raise FormatError(path, "no text in the file")
    return text


def read_corpus(path: Path) -> str:
    """Read a word-level corpus, such as wiki.test.tokens; arguments and errors are those of `read_text`.

    Raises:
        FormatError: the file is JSON lines too: their keys and quotes would be words.
    """
    if base_suffix(path) in JSON_LINES:
        hint = f"mega-eval perplexity {path}"
        raise FormatError(
            path, "JSON lines, not a text of words", wanted="such as wiki.test.tokens", hint=hint
        )
    return read_text(path)


def read_json_lines(path: Path, key: str) -> list[tuple[int, str]]:
    """Read the line number and the string under `key` of every line; blank lines are skipped.

    Raises:
        FormatError: the file is missing, damaged or has no lines, or a line has no text under `key`.
    """
    texts = []
    with open_file(path) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # Windows programs write it
            if line.strip():
                texts.append((number, _parse_line(line, key, path, number)))
    if not texts:
        raise FormatError(path, "no lines in the file", wanted=f'lines like {{"{key}": "..."}}')
    return texts


def read_passages(path: Path, key: str) -> list[tuple[str, str]]:
    """Read one passage a line: the string under `key` of JSON lines, or the stripped line of a .txt file.

    Returns:
        For every line that is not blank, its place for error messages, and its text.

    Raises:
        FormatError: as `read_text` and `read_json_lines` do.
    """
    if base_suffix(path) == ".txt":
        lines = [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1)]
        return [(f"{path}:{number}", line) for number, line in lines if line]
    return [(f"{path}:{number}", text) for number, text in read_json_lines(path, key)]


def is_dataset(path: Path) -> bool:
    """Return whether the path is the prefix of an indexed dataset."""
    return not path.is_file() and sibling(path, ".idx").is_file()


def list_data_files(path: Path) -> list[Path]:
    """List the files of held-out text: one file of text, or the two of an indexed dataset.

    Raises:
        FormatError: the path is neither, or it is one file of a dataset instead of the prefix of both.
    """
    if is_dataset(path):
        return list_dataset_files(path)
    if path.suffix in (".bin", ".idx") and is_dataset(path.with_suffix("")):
        raise FormatError(path, "one file of an indexed dataset", hint=f"--data {path.with_suffix('')}")
    check_file(path)
    return [path]


def list_dataset_files(prefix: Path) -> list[Path]:
    """List the two files of an indexed dataset.

    Raises:
        FormatError: there is no such dataset.
    """
    if not is_dataset(prefix):
        hint = suggest_dataset(prefix, "--baseline-data") or "leave .bin and .idx off the path"
        raise FormatError(prefix, "no such indexed dataset", wanted=sibling(prefix, ".idx"), hint=hint)
    return [sibling(prefix, ".bin"), sibling(prefix, ".idx")]


def read_documents(paths: Sequence[Path], key: str, tokenizer: Tokenizer) -> Documents:
    """Read the documents of files and of indexed datasets, one source after the other.

    JSON lines (.jsonl, .ndjson, .json) have a document a line; any other file is one document.

    Raises:
        FormatError: a path is neither file nor dataset, no document has tokens, or another tokenizer made the
            dataset.
    """
    texts: list[str] = []
    tokens: list[Tokens] = []
    for path in paths:
        if is_dataset(path):
            added = list(_iter_documents(path, tokenizer.identity))
            texts += [tokenizer.decode(ids.tolist()) for ids in added]
        else:
            is_lines = base_suffix(path) in JSON_LINES
            new_texts = [text for _, text in read_json_lines(path, key)] if is_lines else [read_text(path)]
            texts += new_texts
            added = [as_tokens(ids) for ids in tokenizer.encode_batch(new_texts)]
        tokens += added
    nonempty = [(text, ids) for text, ids in zip(texts, tokens, strict=True) if len(ids)]
    if not nonempty:
        raise FormatError(", ".join(map(str, paths)), "no tokens in any document")
    return Documents([text for text, _ in nonempty], [ids for _, ids in nonempty], len(texts) - len(nonempty))


def read_token_stream(prefix: Path, identity: TokenizerIdentity) -> Tokens:
    """Read an indexed dataset as one stream of tokens, with the end-of-document token after each document.

    Raises:
        FormatError: there is no such dataset, another tokenizer made it, or it is too short to count.
    """
    list_dataset_files(prefix)
    stream = concatenate([ids for ids in _iter_documents(prefix, identity) if len(ids)], identity.eod)
    if len(stream) < 2:
        raise FormatError(prefix, "too short to count pairs in", found=f"{len(stream)} tokens", wanted="2")
    return stream


def concatenate(documents: Sequence[Tokens], eod: int | None) -> Tokens:
    """Concatenate documents, each followed by `eod` if the tokenizer has one."""
    end = [] if eod is None else [as_tokens([eod])]
    return np.concatenate([part for document in documents for part in (document, *end)] or [as_tokens([])])


def _iter_documents(prefix: Path, identity: TokenizerIdentity) -> Iterator[Tokens]:
    """Yield the tokens of each document without the end-of-document token."""
    data = IndexedDataset(prefix)
    if data.info is None:
        _log.warning(
            "%s: does not record its tokenizer (no %s.json); only its ids are checked", prefix, prefix.name
        )
    else:
        check_same_tokenizer(data.info.tokenizer, identity, prefix)
    for number, (first, last) in enumerate(zip(data.documents[:-1], data.documents[1:], strict=True)):
        sequences = [as_tokens(data[index]) for index in range(int(first), int(last))]
        tokens = np.concatenate([as_tokens([]), *sequences])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < identity.vocab_size:
            raise FormatError(
                prefix,
                f"ids of document {number} do not fit the checkpoint's tokenizer",
                found=f"{tokens.min()} to {tokens.max()}",
                wanted=f"0 to {identity.vocab_size - 1}",
            )
        yield tokens[:-1] if len(tokens) and tokens[-1] == identity.eod else tokens


def _parse_line(line: bytes, key: str, path: Path, number: int) -> str:
    """Return the string under `key` of a line of JSON."""
    value = parse_json(line, path, number)
    where = f"{path}:{number}"
    if not isinstance(value, dict):
        raise FormatError(
            where, "not a JSON object", found=type(value).__name__, wanted=f'{{"{key}": "..."}}'
        )
    if key not in value:
        raise FormatError(
            where, f"no key {key!r}", found=", ".join(sorted(value)) or "an empty object", wanted=key
        )
    if not isinstance(value[key], str):
        raise FormatError(f"{where} {key}", "not text", found=type(value[key]).__name__, wanted="a string")
    return str(value[key])
