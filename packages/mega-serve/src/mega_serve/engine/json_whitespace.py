"""Which blanks a grammar allows between the tokens of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# without a bound a weak model fills its budget with blanks
_BLANKS: Final = r"\n?[ \t]{0,16}"


def without_blanks(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema whose texts have no blank between their tokens."""
    options = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **options}}


def json_options(schema: object) -> JsonCompileOptions:
    """Return llguidance's options of JSON beside those of the schema's own "x-guidance".

    A pattern of blanks would override the schema's `whitespace_flexible`.
    """
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    has_no_blanks = isinstance(own, dict) and own.get("whitespace_flexible") is False
    return {} if has_no_blanks else {"whitespace_pattern": _BLANKS}
