"""Text of a model on a terminal."""

from __future__ import annotations

from mega_schema.errors import escape_controls


def for_terminal(text: str) -> str:
    """Escape control characters, which could set the clipboard; keep line feeds and tabs."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" else escape_controls(char) for char in text)
