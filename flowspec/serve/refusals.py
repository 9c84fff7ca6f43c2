"""Whatever a request is refused for, in the API's own form: a status and `{"error": {"message", "type",
"param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowspec.errors import FlowSpecError, InputError
from flowspec.serve.documents import Error

STOPPING = "the server is stopping"
_CODES = {
    400: "invalid_value",
    403: "forbidden",
    404: "not_found",
    405: "method_not_supported",
    408: "request_timeout",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "unavailable",
}
"""Of refusals that name none."""


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal; `headers` go with it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Error]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": Error(self.message, kind, self.param, self.code or _CODES.get(self.status))}


def invalid(param: str, expected: str, got: object) -> ApiError:
    """A field that is not what it should be."""
    return ApiError(400, f"{param}: expected {expected}, got {got!r:.80}", param)


def unsupported(param: str, text: str) -> ApiError:
    """A field that asks for what this server or its model has not."""
    return ApiError(400, f"{param}: {text}", param, "unsupported_parameter")


def of_error(error: FlowSpecError | str) -> ApiError:
    """What the runtime says of a request: its own fault, or that the cluster cannot answer."""
    return ApiError(400 if isinstance(error, InputError) else 503, str(error))
