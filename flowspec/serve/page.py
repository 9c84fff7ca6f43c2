"""The live view's page: files of this package, served as they are. They hold no data, so they need no key;
the API that they call does."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

PATHS = ("/", "/page/")
"""Where the page is; a path that ends in a slash is all that is below it."""
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """`/` and `/page/<file>`, for the files of the page and nothing else. Raises KeyError for one of a kind
    that is not served."""
    folder = resources.files("flowspec.serve").joinpath("page")
    files = {each.name: (each.read_bytes(), TYPES[PurePath(each.name).suffix]) for each in folder.iterdir()}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        if name not in files:
            return PlainTextResponse("no such file\n", 404, headers=HEADERS)
        content, media_type = files[name]
        # of the content, so that a browser that has it need not have it sent again
        headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return [Route("/", file, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]
