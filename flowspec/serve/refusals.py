"""Whatever a request is refused for, in the API's own form: a status and `{"error": {"message", "type",
"param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowspec.errors import FlowSpecError, InputError
from flowspec.serve.documents import Error

INVALID = "invalid_request_error"
SERVER = "server_error"
STOPPING = "the server is stopping"
_CODES = {
    400: "invalid_value",
    403: "forbidden",
    404: "not_found",
    405: "method_not_supported",
    408: "request_timeout",
    500: "internal_error",
}
"""Of refusals that name none."""


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal; `headers` go with it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = INVALID
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Error]:
        return {"error": Error(self.message, self.kind, self.param, self.code or _CODES.get(self.status))}


def invalid(param: str, expected: str, got: object, code: str = "invalid_value") -> ApiError:
    """A field that is not what it should be."""
    return ApiError(400, f"{param}: expected {expected}, got {got!r:.80}", param, code)


def unavailable(error: FlowSpecError | str) -> ApiError:
    """The cluster cannot answer."""
    return ApiError(503, str(error), code="unavailable", kind=SERVER)


def of_error(error: FlowSpecError) -> ApiError:
    """What the runtime says of a request: its own fault, or the cluster's."""
    return (
        ApiError(400, str(error), code="invalid_value")
        if isinstance(error, InputError)
        else unavailable(error)
    )


def busy(retry_after_s: int) -> ApiError:
    """As many wait already as may."""
    return ApiError(
        429,
        "as many requests are being answered, and wait, as this server takes; try again in "
        f"{retry_after_s} s",
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": str(retry_after_s)},
    )
