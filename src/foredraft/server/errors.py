"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from foredraft.errors import CapacityError

_WANTED = "Input should be "
_KINDS = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "none_required": "null",
}


class ApiError(Exception):
    """A request that is not answered: HTTP status, message, and the field at fault if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # A lone surrogate, which JSON can hold, cannot be sent as UTF-8.
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def refused(error: Exception, fields: Container[str]) -> ApiError:
    """Return a ForedraftError of ours as an answer. Its message begins with the field at fault, if one is."""
    code = "context_length_exceeded" if isinstance(error, CapacityError) else None
    found = re.match(r"(?:the )?(\w+)", str(error))
    first = found[1] if found else ""
    param = "messages" if first == "prompt" and "messages" in fields else first
    return ApiError(400, str(error), param=param if param in fields else None, code=code)


def bug() -> ApiError:
    """Return a fault of ours as an answer."""
    return ApiError(500, "the server has a bug; its log has the details")


def unreadable(reason: str) -> ApiError:
    """Return that a body cannot be parsed as an answer."""
    return ApiError(400, f"the body is no JSON: {reason}")


def invalid(error: RequestValidationError) -> ApiError:
    """Return what pydantic found as an answer that names the field."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return unreadable(f"{errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}")
    if isinstance(error.body, bytes):  # not read: any web page may have it sent without asking first
        return ApiError(400, "the body does not say that it is JSON: send content-type: application/json")
    path, found = _fitting(errors, error.body)
    where = ".".join(path).encode("utf-8", "replace").decode()
    return ApiError(400, _told(where or "the body", found), param=where or None)


def _fitting(errors: Sequence[Any], body: Any) -> tuple[list[str], list[Any]]:
    """Return the path to the first wrong field and what is wrong with it.

    Of a field that may be of several kinds pydantic tells the errors of every kind. Those of the innermost
    field count: they are of the kind that fits best.
    """
    paths = [_path(error, body) for error in errors]
    path, choice = paths[0]
    candidates = [each for each, _ in paths if each[:choice] == path[:choice]]
    inner = max(candidates, key=len)
    return inner, [error for error, (each, _) in zip(errors, paths, strict=True) if each == inner]


def _path(error: Any, body: Any) -> tuple[list[str], int]:
    """Return the fields and indices that lead to an error, and how many come before the first choice of a
    kind, which pydantic names in between.
    """
    path: list[str] = []
    choice: int | None = None
    at, parts = body, error["loc"][1:]
    for place, part in enumerate(parts, start=1):
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int)):
            at = at[part]
        elif error["type"] != "missing" or place < len(parts):
            choice = len(path) if choice is None else choice
            continue
        path.append(str(part))
    return path, len(path) if choice is None else choice


def _told(where: str, found: Sequence[Any]) -> str:
    kind, context = found[0]["type"], found[0].get("ctx", {})
    if kind == "extra_forbidden":
        return f"{where} is not supported: leave it out"
    if kind == "missing":
        return f"{where} is missing"
    if kind == "union_tag_not_found":
        return f"{where}.type is missing"
    if kind == "union_tag_invalid":
        return f"{where}.type should be one of {context['expected_tags']}, not {_short(context['tag'])}"
    for error in found:  # of the right type, but its value is wrong
        said = error["msg"]
        if not said.startswith(_WANTED):
            complete = error["type"] == "value_error" or ", not " in said
            return f"{where}: {said.removeprefix('Value error, ')}" + (
                "" if complete else f", not {_short(error['input'])}"
            )
    wanted = [_KINDS.get(error["type"], error["msg"].removeprefix(_WANTED)) for error in found]
    return f"{where} should be {' or '.join(dict.fromkeys(wanted))}, not {_short(found[0]['input'])}"


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= 40 else f"{said[:40]}…"
