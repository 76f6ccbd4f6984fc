"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from foredraft.errors import CapacityError


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


def refused(error: Exception, param: str | None = None) -> ApiError:
    """Return a ForedraftError of ours as an answer."""
    code = "context_length_exceeded" if isinstance(error, CapacityError) else None
    return ApiError(400, str(error), param=param, code=code)


def invalid(error: RequestValidationError) -> ApiError:
    """Return what pydantic found as an answer that names the field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    where = ".".join(path).encode("utf-8", "replace").decode()
    if first["type"] == "extra_forbidden":
        message = f"{where} is not supported: leave it out"
    elif first["type"] == "missing":
        message = f"{where or 'the body'} is missing"
    else:
        message = f"{where or 'the body'}: {first['msg']}"
    return ApiError(400, message, param=path[0] if path else None)
