"""Suggest the right flag for a file that is not a vocabulary of the tokenizer's type."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

_BERT = frozenset({"[UNK]", "[CLS]", "[SEP]"})
_MOST = 4  # files that a hint names
_NONE_FOUND = "take the files that the model was trained with"


def hint_of_content(path: Path, text: str, asked: str = "") -> str:
    """Return a hint with the flags that take this vocabulary file.

    Args:
        asked: the requested tokenizer type, which the content is not.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict) and "model" in values:
        return f"a tokenizer.json: --tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}"
    if isinstance(values, list):
        return f"a list, as tiktoken has: --tokenizer-type TikTokenizer --tokenizer-model {path}"
    if isinstance(values, dict) and asked == "GPT2BPETokenizer":
        return "not GPT-2's? --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json"
    if isinstance(values, dict) and {*map(type, values.values())} == {int}:
        return f"--tokenizer-type GPT2BPETokenizer --vocab-file {path} --merge-file merges.txt"
    if text.startswith("#version"):
        return f"the merges: --merge-file {path}"
    if asked != "BertWordPiece" and set(text.split("\n")) >= _BERT:
        return f"--tokenizer-type BertWordPieceLowerCase, or BertWordPieceCase, --vocab-file {path}"
    return _NONE_FOUND


def hint_of_path(path: Path) -> str:
    """Return a hint of similar files for one that cannot be read."""
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return f"there is no folder {folder}"
    if close := get_close_matches(path.name, names, 1, 0.5):
        return f"did you mean {folder / close[0]}?"
    files = [name for name in names if name.endswith((".json", ".txt", ".model"))]
    return f"in {folder}: {', '.join(files[:_MOST])}" if files else f"no vocabulary is in {folder}"
