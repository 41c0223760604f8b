"""Serve the web page: GET /, /index.html and /static/*.

The files are read once, when the router is built. A request can name only one of them; it never becomes a
path of the file system.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

# No inline script or style, no eval, no other origin. Trusted Types make the browser itself refuse to turn a
# string into HTML (innerHTML and alike), because the page shows the text of a model, which nobody checked.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

_CONTENT_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
_INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, as it is sent.

    Attributes:
        etag: quoted hash of the content.
    """

    content: bytes
    content_type: str
    etag: str


def load_static_files() -> dict[str, StaticFile]:
    """Read the files of the page: name -> file."""
    files = {}
    for entry in resources.files("mega_serve").joinpath("web/static").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _CONTENT_TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[entry.name] = StaticFile(content, _CONTENT_TYPES[suffix], etag)
    return files


def build_router() -> APIRouter:
    """Build the routes of the page: /, /index.html and /static/NAME, for GET and HEAD."""
    files = load_static_files()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    @router.api_route("/index.html", methods=["GET", "HEAD"])
    async def get_page(request: Request) -> Response:
        return _respond(files[_INDEX], request)

    @router.api_route("/static/{name}", methods=["GET", "HEAD"])
    async def get_static_file(name: str, request: Request) -> Response:
        if name not in files or name == _INDEX:
            raise HTTPException(404, "the page has no such file")
        return _respond(files[name], request)

    return router


def _respond(file: StaticFile, request: Request) -> Response:
    """Return the file, or status 304 if the browser has it. HEAD: uvicorn drops the content."""
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "ETag": file.etag,
        # names carry no version: ask each time, so that a new server never runs with an old script
        "Cache-Control": "no-cache",
    }
    if _matches(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.content_type, headers=headers)


def _matches(if_none_match: str, etag: str) -> bool:
    """Return whether the header lists the tag (weak comparison, RFC 9110 section 13.1.2)."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or "*" in tags
