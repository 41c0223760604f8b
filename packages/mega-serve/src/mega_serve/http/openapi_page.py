"""The page /docs: the OpenAPI schema as HTML without any script, so that nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mega_serve.http.openapi_fields import list_fields

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_METHODS = ("get", "put", "post", "delete", "patch")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    ":root{color-scheme:light dark}"
    "pre{overflow:auto;padding:.75rem;border:1px solid #8888}code,pre{font-size:.9rem}h2{margin-top:2.5rem}"
    "h2 code{font-size:1.3rem}"
    "div{overflow:auto}table{border-collapse:collapse;font-size:.9rem}"
    "td,th{border:1px solid #8888;padding:.2rem .5rem;text-align:left;vertical-align:top}"
)


def render_page(schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page of a schema and its Content-Security-Policy."""
    info = schema["info"]
    operations = [
        (methods, path, operation)
        for path, item in schema["paths"].items()
        for methods, operation in _group_methods(item)
    ]
    operations.sort(key=lambda operation: "Server" in operation[2].get("tags", ()))  # probes and metrics last
    links = [
        f'<li><a href="#{_anchor(methods, path)}"><code>{", ".join(methods)} {escape(path)}</code></a> '
        f"{escape(operation.get('summary', ''))}</li>"
        for methods, path, operation in operations
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><main><h1>{title}</h1>'
        f"<p>{escape(info.get('description', ''))} "
        f'The schema for programs is <a href="openapi.json">openapi.json</a>.</p>'
        f"<p>If the server has API keys, add <code>-H 'Authorization: Bearer KEY'</code> to the commands.</p>"
        f'<nav aria-label="Routes"><ul>{"".join(links)}</ul></nav>'
        f"{''.join(_render_operation(*operation) for operation in operations)}</main></html>"
    )
    # the style has no text of the schema in it
    return page, POLICY


def _group_methods(item: Mapping[str, Any]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Return the operations of a path; those that take the same request are one, with several methods."""
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    for method in _METHODS:
        operation = item.get(method)
        if operation is None:
            continue
        for methods, known in groups:
            if all(known.get(name) == operation.get(name) for name in ("summary", "requestBody")):
                methods.append(method.upper())
                break
        else:
            groups.append(([method.upper()], operation))
    return groups


def _anchor(methods: Sequence[str], path: str) -> str:
    return re.sub("[^a-z0-9]+", "-", f"{methods[0]}{path}".lower()).strip("-")


def _render_operation(methods: Sequence[str], path: str, operation: Mapping[str, Any]) -> str:
    heading = f"<code>{', '.join(methods)} {escape(path)}</code>"
    parts = [f'<h2 id="{_anchor(methods, path)}">{heading}</h2>']
    parts += [
        f"<p>{escape(operation[field])}</p>" for field in ("summary", "description") if operation.get(field)
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        for name, example in _examples(content).items():
            command = _curl(methods[0], path, media_type, example)
            parts.append(f"<h3>Example: {escape(name)}</h3><pre>{escape(command)}</pre>")
        rows = "".join(
            f"<tr><td><code>{escape(row.name)}</code><td>{escape(row.type)}<td>{escape(row.default)}"
            f"<td>{escape(row.description)}"
            for row in list_fields(content.get("schema", {}))
        )
        head = "<tr><th>field<th>type<th>default<th>description"
        parts.append(f"<h3>Fields</h3><div><table>{head}{rows}</table></div>" if rows else "")
    return "".join(parts)


def _curl(method: str, path: str, media_type: str, body: object) -> str:
    """Return the command that sends a body."""
    text = json.dumps(body, indent=2, ensure_ascii=False).replace("'", r"\u0027")
    option = "" if method == "POST" else f"-X {method} "
    return f"curl {option}HOST:PORT{path} -H 'Content-Type: {media_type}' -d '{text}'"


def _examples(content: Mapping[str, Any]) -> dict[str, Any]:
    if "example" in content:
        return {"Example": content["example"]}
    return {name: example.get("value") for name, example in content.get("examples", {}).items()}
