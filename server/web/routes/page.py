"""The web page, its files, and /docs."""

import os
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route
from starlette.staticfiles import NotModifiedResponse
from starlette.types import Scope

from ..middleware.stack import POLICY

STATIC = Path(__file__).parents[2] / "static"
# no-cache, since a page and its modules must be of one release; no ranges, since the files are
# small, clients need no parts of them, and a bad range would be an error
REVALIDATE = {"cache-control": "no-cache", "accept-ranges": "none"}

# a third of the bytes, for some milliseconds a visit
COMPRESSED = Middleware(GZipMiddleware, compresslevel=6)


class Static(StaticFiles):
    """The page's files. Browsers ask for them anew each time; a file whose ETag is unchanged is not
    sent again.
    """

    def file_response(
        self, full_path: Any, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = FileResponse(full_path, status_code, stat_result=stat_result)
        asked = Headers(scope=scope)
        # a strong ETag names the bytes that are sent, and COMPRESSED sends others
        if "gzip" in asked.get("accept-encoding", ""):
            response.headers["etag"] = response.headers["etag"][:-1] + '-gzip"'
        if self.is_not_modified(response.headers, asked):
            return NotModifiedResponse(response.headers)
        return response

    async def get_response(self, path: str, scope: Scope) -> Response:
        scope["headers"] = [
            (name, value) for name, value in scope["headers"] if name not in (b"range", b"if-range")
        ]
        response = await super().get_response(path, scope)
        response.headers.update(REVALIDATE)
        return response


FILES = Static(directory=STATIC)


async def page(request: Request) -> Response:
    return await FILES.get_response("index.html", request.scope)


async def docs(request: Request) -> Response:
    response = await FILES.get_response("docs.html", request.scope)
    # Swagger UI has style attributes
    styled = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    response.headers["content-security-policy"] = styled
    return response


# Starlette's routes, since they can have their own middleware: answers of the API are not
# compressed
routes = [
    Route("/", page, middleware=[COMPRESSED]),
    Route("/docs", docs, middleware=[COMPRESSED]),
    Mount("/static", FILES, name="static", middleware=[COMPRESSED]),
]
