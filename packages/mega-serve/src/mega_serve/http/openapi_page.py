"""The page /docs: the OpenAPI schema as HTML without any script, so that nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_METHODS = ("get", "put", "post", "delete", "patch")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    ":root{color-scheme:light dark}"
    "pre{overflow:auto;padding:.75rem;border:1px solid #8888}code,pre{font-size:.9rem}h2{margin-top:2.5rem}"
)


def render_page(schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page of a schema and its Content-Security-Policy."""
    info = schema["info"]
    sections = [
        _render_operation(path, method, operations[method])
        for path, operations in schema["paths"].items()
        for method in _METHODS
        if method in operations
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><main><h1>{title}</h1>'
        f"<p>{escape(info.get('description', ''))} "
        f'The schema for programs is <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(sections)}</main></html>"
    )
    # the style has no text of the schema in it
    return page, POLICY


def _render_operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<h2><code>{method.upper()} {escape(path)}</code></h2>"]
    parts += [
        f"<p>{escape(operation[field])}</p>" for field in ("summary", "description") if operation.get(field)
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        for name, example in _examples(content).items():
            text = json.dumps(example, indent=2, ensure_ascii=False)
            parts.append(f"<h3>{escape(name)} ({escape(media_type)})</h3><pre>{escape(text)}</pre>")
    return "".join(parts)


def _examples(content: Mapping[str, Any]) -> dict[str, Any]:
    if "example" in content:
        return {"Example": content["example"]}
    return {name: example.get("value") for name, example in content.get("examples", {}).items()}
