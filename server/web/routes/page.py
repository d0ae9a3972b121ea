"""The web page, its files, and /docs."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from ..middleware.headers import content_policy

router = APIRouter()

STATIC = Path(__file__).parents[2] / "static"
# a page and its modules must be of one release, and are small: parts of them, which nobody wants, would have errors
REVALIDATE = {"cache-control": "no-cache", "accept-ranges": "none"}

COMPRESSED = Middleware(GZipMiddleware, compresslevel=6)  # a third of the bytes, in some milliseconds a visit


async def page(request: Request) -> FileResponse:
    _in_whole(request.scope)
    return FileResponse(STATIC / "index.html", headers=REVALIDATE)


def _in_whole(scope: Scope) -> None:
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in (b"range", b"if-range")]


class Static(StaticFiles):
    """The page's files, asked about anew each time: their ETag answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _in_whole(scope)
        await super().__call__(scope, receive, send)

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        response = super().file_response(*arguments, **named)
        response.headers.update(REVALIDATE)
        return response


# of Starlette, whose routes can have middleware of their own: answers of the API go out as they are
routes = [Route("/", page, middleware=[COMPRESSED]),
          Mount("/static", Static(directory=STATIC), name="static", middleware=[COMPRESSED])]


@router.head("/docs", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    page = get_swagger_ui_html(openapi_url=str(request.app.openapi_url), title="LinPix",
                               swagger_js_url="/static/swagger-ui-bundle.js", swagger_css_url="/static/swagger-ui.css",
                               swagger_favicon_url="/static/favicon.svg")
    page.headers["content-security-policy"] = content_policy(bytes(page.body).decode(), style_attributes=True)
    return page
