"""The files of the web page, as they are sent."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mega_serve.web.page_routes import CONTENT_SECURITY_POLICY, build_router, load_static_files


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI(openapi_url=None)
    app.include_router(build_router())
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_the_page_comes_with_its_policy(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_policy_allows_this_origin_alone() -> None:
    directives = dict(part.split(" ", 1) for part in CONTENT_SECURITY_POLICY.split("; "))
    assert directives["default-src"] == "'self'"
    assert not re.search(r"unsafe|https?:|data:|\*", CONTENT_SECURITY_POLICY)


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_a_static_file_has_its_type_and_is_revalidated(
    client: TestClient, name: str, content_type: str
) -> None:
    response = client.get(f"/static/{name}")
    assert (response.status_code, response.headers["content-type"]) == (200, content_type)
    assert response.headers["cache-control"] == "no-cache"
    etag = response.headers["etag"]
    for header in (etag, f'"other", W/{etag}', "*"):
        unchanged = client.get(f"/static/{name}", headers={"If-None-Match": header})
        assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    assert client.get(f"/static/{name}", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "absent.js",
        "index.html",
        "../page_routes.py",
        "..%2fpage_routes.py",
        "%2e%2e/page_routes.py",
        "a/app.js",
        "",
    ],
)
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/static/{path}").status_code == 404


def test_every_file_is_used_and_every_reference_exists() -> None:
    files = load_static_files()
    used = {"index.html"}
    for file in files.values():
        text = file.content.decode()
        used |= set(re.findall(r'(?:src|href)="static/([^"]+)"', text))
        used |= set(re.findall(r'from "\./([^"]+)"', text))
    assert used == set(files)


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    files = load_static_files()
    html = files["index.html"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)|javascript:", html)
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for file in files.values():
        text = file.content.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "://" not in text
        assert not re.search(unsafe, text)
