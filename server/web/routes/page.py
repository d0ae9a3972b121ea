"""The web page, its files, and /docs."""

from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from ..middleware.headers import POLICY

STATIC = Path(__file__).parents[2] / "static"
# no-cache, since a page and its modules must be of one release; no ranges, since the files are small, clients need no
# parts of them, and a bad range would be an error
REVALIDATE = {"cache-control": "no-cache", "accept-ranges": "none"}

COMPRESSED = Middleware(GZipMiddleware, compresslevel=6)  # a third of the bytes, for some milliseconds a visit


async def page(request: Request) -> FileResponse:
    _in_whole(request.scope)
    return FileResponse(STATIC / "index.html", headers=REVALIDATE)


async def docs(request: Request) -> FileResponse:
    _in_whole(request.scope)
    styled = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")  # Swagger UI has style attributes
    return FileResponse(STATIC / "docs.html", headers=REVALIDATE | {"content-security-policy": styled})


def _in_whole(scope: Scope) -> None:
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in (b"range", b"if-range")]


class Static(StaticFiles):
    """The page's files. Browsers ask for them anew each time; a file whose ETag is unchanged is not sent again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _in_whole(scope)
        await super().__call__(scope, receive, send)

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        response = super().file_response(*arguments, **named)
        response.headers.update(REVALIDATE)
        return response


# Starlette's routes, since they can have their own middleware: answers of the API are not compressed
routes = [Route("/", page, middleware=[COMPRESSED]), Route("/docs", docs, middleware=[COMPRESSED]),
          Mount("/static", Static(directory=STATIC), name="static", middleware=[COMPRESSED])]
