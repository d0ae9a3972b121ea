"""The web page, its files, and /docs."""

import gzip
import os
from functools import lru_cache
from html import escape
from pathlib import Path

from fastapi import Request as Http
from fastapi import Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.routing import Mount, Route
from starlette.staticfiles import NotModifiedResponse
from starlette.types import Scope

from ..middleware.stack import POLICY

STATIC = Path(__file__).parents[2] / "static"
# no-cache, since a page and its modules must be of one release; no ranges, since the files are
# small, clients need no parts of them, and a bad range would be an error
REVALIDATE = {"cache-control": "no-cache", "accept-ranges": "none", "vary": "Accept-Encoding"}
PREVIEW = '"static/preview.png"'  # in index.html


@lru_cache(maxsize=64)
def compressed(path: str, changed_ns: int) -> bytes:
    """A file, a third as long. changed_ns: when it was changed, so that it is then read again."""
    return gzip.compress(Path(path).read_bytes(), 6)  # 75 ms for the largest


class Static(StaticFiles):
    """The page's files. Browsers ask for them anew each time; a file whose ETag is unchanged is not
    sent again.
    """

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        asked = Headers(scope=scope)
        response: Response = FileResponse(
            full_path, status_code, REVALIDATE, stat_result=stat_result
        )
        if "gzip" in asked.get("accept-encoding", ""):
            content = compressed(str(full_path), stat_result.st_mtime_ns)
            headers = {
                **response.headers,
                "content-encoding": "gzip",
                "content-length": str(len(content)),
                # other bytes than those of the plain file
                "etag": response.headers["etag"][:-1] + '-gzip"',
            }
            response = Response(content, status_code, headers)
        if self.is_not_modified(response.headers, asked):
            return NotModifiedResponse(response.headers)
        return response

    async def get_response(self, path: str, scope: Scope) -> Response:
        scope["headers"] = [
            (name, value) for name, value in scope["headers"] if name not in (b"range", b"if-range")
        ]
        return await super().get_response(path, scope)


FILES = Static(directory=STATIC)


async def page(http: Http) -> Response:
    """index.html. What shows links with a picture (og:image) may need the picture's whole address,
    which begins as the client's does if the proxies are those of the settings.
    """
    response = await FILES.get_response("index.html", http.scope)
    host = http.headers.get("host")
    if response.status_code == 304 or host is None:
        return response
    root = http.app.state.service.settings.root_path
    here = escape(f"{http.scope['scheme']}://{host}{root}")
    content = page_at(here, response.headers["etag"], "content-encoding" in response.headers)
    headers = {**response.headers, "content-length": str(len(content))}
    return Response(content, headers=headers)


@lru_cache(maxsize=64)
def page_at(here: str, etag: str, packed: bool) -> bytes:
    """index.html for clients that reach it at this address. etag: of the file, so that it is read
    again when it has changed.
    """
    text = (STATIC / "index.html").read_text()
    content = text.replace(PREVIEW, f'"{here}/{PREVIEW[1:]}').encode()
    return gzip.compress(content, 6) if packed else content


async def docs(http: Http) -> Response:
    response = await FILES.get_response("docs.html", http.scope)
    # Swagger UI has style attributes
    styled = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    response.headers["content-security-policy"] = styled
    return response


routes = [
    Route("/", page),
    Route("/docs", docs),
    Mount("/static", FILES, name="static"),
]
