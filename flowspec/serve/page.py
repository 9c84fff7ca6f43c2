"""The live view's page: files of this package, served as they are. They hold no data, so they need no key;
the API that they call does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

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


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page; `tag` is of its content, so that a browser that has it need not have it sent
    again."""

    content: bytes
    media_type: str
    tag: str

    def response(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def assets() -> dict[str, Asset]:
    """The files of the page by name; raises KeyError for one of a kind that is not served."""
    found = {}
    for file in resources.files("flowspec.serve").joinpath("page").iterdir():
        content = file.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[file.name] = Asset(
            content=content, media_type=TYPES[file.name[file.name.rindex(".") :]], tag=tag
        )
    return found


def page_routes() -> list[Route]:
    """`/` and `/page/<file>`, for the files of the page and nothing else."""
    files = assets()

    async def index(request: Request) -> Response:
        return files[INDEX].response(request)

    async def file(request: Request) -> Response:
        asset = files.get(request.path_params["name"])
        return (
            asset.response(request)
            if asset is not None
            else PlainTextResponse("no such file\n", 404, headers=HEADERS)
        )

    return [Route("/", index, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]
