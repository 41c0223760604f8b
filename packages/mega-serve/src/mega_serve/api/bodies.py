"""Read and check the JSON body of a request against a pydantic model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from mega_schema.errors import RequestError, escape_controls
from mega_serve.api.body_errors import describe_error
from mega_serve.api.field_descriptions import describe_fields
from mega_serve.http.errors import HttpError

_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "none", "dict", "any"})


class Body(BaseModel):
    """The fields of a request, or of an object in it.

    No value is converted: "1" is no number, 1.0 no integer.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())
    # names that other APIs have for a field: other name -> field, for the hint of an error
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({})


B = TypeVar("B", bound=Body)


async def read_body(model: type[B], http_request: Request, *, lenient: bool) -> B:
    """Read the body of a request.

    Args:
        lenient: ignore unknown fields.

    Raises:
        HttpError: 415 the content type is not JSON; 400 the body is not JSON, a field is unknown, missing or
            out of range.
    """
    check_content_type(http_request)
    content = await http_request.body()
    try:
        return model.model_validate_json(content, extra="ignore" if lenient else "forbid")
    except ValidationError as error:
        raise refuse_body(error, model) from None


def check_content_type(http_request: Request) -> None:
    """Refuse a body that does not say that it is JSON: a web page could send it without the user's consent.

    A compressed body is refused too: its length says nothing about the memory that it takes.

    Raises:
        HttpError: 415.
    """
    content_type = http_request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json_suffix = content_type.startswith("application/") and content_type.endswith("+json")
    if content_type != "application/json" and not is_json_suffix:
        raise HttpError(415, f"Content-Type must be application/json, not {content_type or 'absent'}")
    encoding = http_request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HttpError(
            415,
            f"Content-Encoding must be absent, not {encoding}: the server accepts no compressed bodies",
            headers={"Accept-Encoding": "identity"},
        )


def openapi_body(model: type[Body], **examples: Mapping[str, object]) -> dict[str, Any]:
    """Return the request body of an operation for the OpenAPI schema.

    Args:
        examples: bodies by name.
    """
    schema = _json_schema(model)
    root = {name: value for name, value in schema.items() if name != "$defs"}
    content = {
        "schema": _inline(root, schema.get("$defs", {})),
        "examples": {name: {"value": value} for name, value in examples.items()},
    }
    operation: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": content}}}
    if "stream" in model.model_fields:
        operation["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return operation


def unknown_field_message(
    name: str, known: Iterator[str] | list[str], other_names: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the message for a field that does not exist, with the most similar name that does.

    Args:
        other_names: names of other APIs, with the fields that they mean.
    """
    similar = [other_names[name]] if name in other_names else get_close_matches(name, list(known), 1, 0.6)
    return f"{printable(name)}: unknown field" + (f"; hint: did you mean {similar[0]}?" if similar else "")


def printable(name: str) -> str:
    """Return the name of a field as a message can hold it: JSON allows names that are no text."""
    return escape_controls(name[:80])


@contextmanager
def name_field(param: str) -> Iterator[None]:
    """Let errors of the tokenizer name a field of the request: it does not know where its text comes from.

    Raises:
        RequestError: with the field, for one without.
    """
    try:
        yield
    except RequestError as error:
        raise RequestError(param, error.what, hint=error.hint, **error.values) from None


def refuse_body(error: ValidationError, model: type[Body]) -> HttpError:
    """Return the response to a body that pydantic refused: its first error, which names the field."""
    details = error.errors(include_url=False)
    unknown = next((detail for detail in details if detail["type"] == "extra_forbidden"), None)
    detail = unknown or details[0]
    if detail["type"] == "json_invalid":
        message = detail["msg"].removeprefix("Invalid JSON: ")
        return HttpError(400, f"the body is not JSON: {message}", code="invalid_json")
    path = _field_path(detail)
    param = ".".join(printable(str(part)) for part in path) or None
    if detail["type"] == "extra_forbidden":
        known = list(_names_at(model, path[:-1]))
        parent = "".join(f"{part}." for part in path[:-1])
        message = parent + unknown_field_message(str(path[-1]), known, model.other_names)
        return HttpError(400, message, param=param, code="unknown_parameter")
    if detail["type"] == "missing":
        return HttpError(400, f"{param or 'body'}: missing", param=param, code="missing")
    branch_errors = [branch for branch in details if branch is not detail and _field_path(branch) == path]
    what = describe_error(detail, path, branch_errors)
    return HttpError(400, f"{param or 'body'}: {what}", param=param, code="invalid_value")


def _field_path(detail: ErrorDetails) -> list[int | str]:
    """Return the path of an error's field, without the branches of unions."""
    *parents, last = detail["loc"] or ("body",)
    # an unknown field may have the name of a branch; the last part of its location is the field
    is_field = detail["type"] in ("extra_forbidden", "missing")
    path = [part for part in parents if isinstance(part, int) or not _is_branch(part)]
    if detail["loc"] and (is_field or isinstance(last, int) or not _is_branch(last)):
        path.append(last)
    return path


def _is_branch(part: str) -> bool:
    """Whether a part of an error's location is a branch of a union and no field."""
    return part in _TYPE_NAMES or "[" in part or "(" in part or "-" in part or part[:1].isupper()


def _names_at(model: type[Body], path: list[int | str]) -> Iterator[str]:
    """Yield the names of fields of the model, or of all objects inside it if the path is not empty."""
    schema = _json_schema(model)
    if not path:
        yield from schema["properties"]
        return
    for definition in schema.get("$defs", {}).values():
        yield from definition.get("properties", {})


@cache
def _json_schema(model: type[Body]) -> Mapping[str, Any]:
    """Return the JSON schema of a body. Writing it takes 25 ms, which no wrong name in a request may cost."""
    schema = model.model_json_schema(mode="validation")
    describe_fields(schema, model.__name__)
    return MappingProxyType(schema)


def _inline(value: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with every reference replaced by its definition. No definition contains itself."""
    if isinstance(value, list):
        return [_inline(part, definitions) for part in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        rest = {key: part for key, part in value.items() if key != "$ref"}
        return {**_inline(definitions[name], definitions), **rest}
    return {key: _inline(part, definitions) for key, part in value.items()}
