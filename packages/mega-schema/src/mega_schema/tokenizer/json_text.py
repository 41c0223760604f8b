"""Write the content of a tokenizer.json as `json.dumps` does, with the merges in a fraction of its time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_MERGES_PLACE: Final = "\x00merges"  # stands for the merges in the text of the other parts


def dump_content(content: Mapping[str, Any], *, ensure_ascii: bool = True, sort_keys: bool = False) -> str:
    """Return the `json.dumps` of a content, in which byte-pair merges that are lines are lists of tokens.

    Args:
        ensure_ascii, sort_keys: as of `json.dumps`.
    """
    model = content["model"]
    merges = model.get("merges")
    if model.get("type") != "BPE" or not merges or set(map(type, merges)) != {str}:
        return json.dumps(content, ensure_ascii=ensure_ascii, sort_keys=sort_keys)

    def dump(merges: object) -> str:
        whole = {**content, "model": {**model, "merges": merges}}
        return json.dumps(whole, ensure_ascii=ensure_ascii, sort_keys=sort_keys)

    parts = dump(_MERGES_PLACE).split(json.dumps(_MERGES_PLACE))
    if len(parts) != 2:  # a word is that string
        return dump([line.split(" ") for line in merges])
    return _dump_pairs(merges, ensure_ascii=ensure_ascii).join(parts)


def _dump_pairs(lines: Sequence[str], *, ensure_ascii: bool) -> str:
    """Return the `json.dumps` of the lines, each split at its spaces, without 50,000 lists.

    JSON escapes line breaks and keeps spaces: a line break in the text ends a line, a space ends a token.
    """
    text = json.dumps(lines, ensure_ascii=ensure_ascii, separators=("\n", ":"))
    return f"[{text}]".replace(" ", '", "').replace("\n", "], [")
