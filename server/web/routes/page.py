"""The web page, its files, and /docs."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from ..middleware.headers import content_policy

router = APIRouter()

STATIC = Path(__file__).parents[2] / "static"
# no-cache, since a page and its modules must be of one release; no ranges, since the files are small, clients need no
# parts of them, and a bad range would be an error
REVALIDATE = {"cache-control": "no-cache", "accept-ranges": "none"}

COMPRESSED = Middleware(GZipMiddleware, compresslevel=6)  # a third of the bytes, for some milliseconds a visit


async def page(request: Request) -> FileResponse:
    _in_whole(request.scope)
    return FileResponse(STATIC / "index.html", headers=REVALIDATE)


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
routes = [Route("/", page, middleware=[COMPRESSED]),
          Mount("/static", Static(directory=STATIC), name="static", middleware=[COMPRESSED])]

# Fields of forms begin empty: otherwise Swagger UI would send an example in every field that the user leaves alone.
# The examples go into the descriptions. Dark mode is Swagger UI's own, but it does not choose it by itself.
_DOCS = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>LinPix: the API</title>
<link rel="icon" href="static/favicon.svg"><link rel="stylesheet" href="static/swagger-ui.css">
<style>
html.dark-mode, html.dark-mode body { background: #1c2022; color-scheme: dark }
html.dark-mode noscript { color: #eee }
</style>
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript; /openapi.json has the same description.</noscript>
<script src="static/swagger-ui-bundle.js"></script>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dress();
dark.addEventListener("change", dress);

function withEmptyForms(spec) {
  spec.servers = [{url: new URL(".", location).href.slice(0, -1)}];  // a proxy may have put it under a path
  const named = (schema) => schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema;
  for (const operations of Object.values(spec.paths))
    for (const {requestBody} of Object.values(operations)) {
      const form = requestBody?.content["multipart/form-data"];
      for (const field of Object.values(form ? named(form.schema).properties : {})) {
        const [example] = field.examples ?? [];
        if (typeof example === "object" || example === undefined) continue;
        field.description += `; such as ${example}`;
        field.examples = [""];
      }
    }
  return spec;
}

fetch("openapi.json").then((answer) => answer.json()).then((spec) => SwaggerUIBundle({
  spec: withEmptyForms(spec), dom_id: "#swagger-ui", deepLinking: true, displayRequestDuration: true,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout",
}));
</script>
</body>
</html>
"""


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    return HTMLResponse(_DOCS, headers={"content-security-policy": content_policy(_DOCS, style_attributes=True)})
