"""Uploads: reading a form, and decoding its picture."""

import asyncio
import binascii
import io
import json
import logging
import re
import urllib.parse
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request as Http
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..errors import (
    InvalidRequest,
    ServiceError,
    body_too_large,
    deadline_passed,
    exhausted,
    shown,
)
from ..pictures.uploads import Upload, read
from .answers import Order, while_connected
from .middleware.bodies import JSON_MEDIA, PLAIN_BYTES
from .request_schemas import (
    FORM_FIELDS,
    FORM_NUMBERS,
    EditBody,
    PictureReference,
    UploadFields,
)

logger = logging.getLogger("linpix")
# While a form is read, memory holds up to 1 MiB of each file, and 4 bytes per character of known
# fields, which together may be as long as a body of JSON.
MAX_FILES, MAX_FIELDS, TEXT_BYTES = 3, 64, PLAIN_BYTES
FILES = re.compile(r"(image|mask)(\[\d*\])?")  # some clients name a file like one of several
_IMAGE_URL = re.compile(rb'("image_url"\s*:\s*)"([^"]*)"')  # in JSON; no URL has quotation marks
MAX_PICTURES = 17  # of OpenAI's JSON: 16 images and a mask
NAME_CHARACTERS = 80  # kept of the name of an unknown field, for the warning about it


class Form(MultiPartParser):
    """Starlette's parser, but it keeps only the name of an unknown field, and notes whether the
    form has ended.
    """

    ended = False
    _text_bytes = 0  # of known fields

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part, found = self._current_part, FILES.fullmatch(self._current_part.field_name)
        if found and part.file is not None:
            part.field_name = found[1]
        elif part.field_name not in FORM_FIELDS:
            part.field_name = part.field_name[:NAME_CHARACTERS]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._current_part
        name = part.field_name
        if part.file is None and start < end and FILES.fullmatch(name):
            raise InvalidRequest(
                f"{name} must be a file, so its part needs a filename; with curl, -F "
                f"{name}=@picture.png sends one. A picture as text, such as base64, is not read",
                param=name,
            )
        if name not in FORM_FIELDS:
            return
        if part.file is None:
            self._text_bytes += end - start
        if self._text_bytes > TEXT_BYTES:
            raise InvalidRequest(
                f"the fields of a form may have {TEXT_BYTES:,} bytes together; shorten {name}",
                param=name,
            )
        super().on_part_data(data, start, end)

    def on_end(self) -> None:
        self.ended = True


class FormRoute(APIRoute):
    """A route that reads its form before FastAPI does, within our limits; or JSON in its place."""

    def get_route_handler(self) -> Callable[[Http], Coroutine[Any, Any, Response]]:
        self._handle = super().get_route_handler()
        return self.read

    async def read(self, http: Http) -> Response:
        """Read a request's form, and go on with the route. Raises ServiceError."""
        kind = http.headers.get("content-type", "")
        parse = _of_json if JSON_MEDIA.fullmatch(kind) else _of_multipart
        # where Request.form() keeps what it has parsed
        form = http._form = await parse(http)
        try:
            return await self._handle(http)
        finally:
            await form.close()  # its files are not needed while it waits for a slot


async def _of_multipart(http: Http) -> FormData:
    parser = Form(
        http.headers,
        http.stream(),
        max_files=MAX_FILES,
        max_fields=MAX_FIELDS,
        max_part_size=TEXT_BYTES,
    )
    try:
        form = await parser.parse()
    except ServiceError:
        raise
    # such as a full disk, or no more threads
    except (OSError, MemoryError, RuntimeError) as error:
        logger.exception("an upload could not be read")
        raise exhausted() from error
    except Exception as error:  # whatever else it is, it is the client's mistake
        why = error.message if isinstance(error, MultiPartException) else type(error).__name__
        raise InvalidRequest(
            f"the body cannot be read as a form ({why}); send multipart/form-data with at most "
            f"{MAX_FILES} files and {MAX_FIELDS} fields"
        ) from error
    try:
        if not parser.ended:
            raise InvalidRequest("the form ends before its closing boundary; send the whole form")
        for name, value in form.multi_items():
            if name in FORM_FIELDS and (times := len(form.getlist(name))) > 1:
                raise InvalidRequest(f"the form has {times} fields {name}; send one", param=name)
            # pydantic would read 1_0 as 10
            if name in FORM_NUMBERS and isinstance(value, str) and "_" in value:
                raise InvalidRequest(
                    f"{name}: a number must not have underscores, got {shown(value)}", param=name
                )
    except InvalidRequest:
        await form.close()
        raise
    return form


async def _of_json(http: Http) -> FormData:
    """The form that the JSON of an edit stands for.

    Its pictures are taken out before the rest is parsed: JSON of megabytes may take 30 times as
    much memory.
    """
    whole = b"".join([piece async for piece in http.stream()])
    urls: dict[str, bytes] = {}

    def name_of(found: re.Match[bytes]) -> bytes:
        name = f"#{len(urls)}"
        urls[name] = found[2]
        return found[1] + f'"{name}"'.encode()

    text = _IMAGE_URL.sub(name_of, whole, MAX_PICTURES)
    if len(text) > PLAIN_BYTES:
        raise body_too_large(len(text), PLAIN_BYTES)
    try:
        body = EditBody.model_validate(json.loads(text))
    except ValidationError as invalid:
        raise RequestValidationError(
            [{**error, "loc": ("body", *error["loc"])} for error in invalid.errors()]
        ) from invalid
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {str(error)[:200]}") from error
    if "image" in (body.model_extra or {}):
        raise InvalidRequest(
            'in JSON, a picture is sent as "images": [{"image_url": "data:image/png;base64,..."}]',
            param="image",
        )
    if len(body.images) != 1:
        raise InvalidRequest(
            f"send exactly one picture in images, got {len(body.images)}", param="images"
        )
    fields = body.model_dump(exclude={"images", "mask"}, exclude_none=True)
    fields["image"] = _file_of(body.images[0], "images.0", urls)
    if body.mask is not None:
        fields["mask"] = _file_of(body.mask, "mask", urls)
    return FormData(fields)


def _file_of(reference: PictureReference, place: str, urls: dict[str, bytes]) -> UploadFile:
    """The picture of a data URL, as a form would have it.

    urls: those that were taken out of the JSON, as they stood there
    """
    if (reference.image_url is None) == (reference.file_id is None):
        raise InvalidRequest(f"{place} must have either image_url or file_id", param=place)
    if reference.image_url is None:
        raise InvalidRequest(
            f"there is no file {shown(reference.file_id)}, since this server keeps none; send the"
            " picture as image_url, a data URL",
            param=f"{place}.file_id",
        )
    param, url = f"{place}.image_url", urls.get(reference.image_url, b"")
    try:
        if b"\\" in url:  # some programs escape / or +
            url = json.loads(b'"%b"' % url).encode()
        kind, _, data = url.partition(b",")
        if not kind.lower().startswith(b"data:") or not kind.lower().endswith(b";base64"):
            raise ValueError(f"got {shown(url[:60].decode(errors='replace'))}")
        picture = binascii.a2b_base64(urllib.parse.unquote_to_bytes(data), strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(
            f"{param} must be a data URL in base64, such as data:image/png;base64,iVBORw0K...; no"
            f" other address is fetched: {error}",
            param=param,
        ) from error
    return UploadFile(io.BytesIO(picture), size=len(picture), filename=param)


async def decoded(http: Http, order: Order, form: UploadFields, **options: Any) -> Upload:
    """A form's picture, with its mask or keep_rows. options: of `read`. Raises ServiceError.

    The files are read in a thread: waiting uploads stay in their files, and out of memory.
    """
    service, mask = http.app.state.service, form.mask
    if (image := form.image) is None:
        raise InvalidRequest("send exactly one picture as image or image[], got 0", param="image")
    images, bulk = order.options.get("count", 1), order.options.get("bulk", False)
    drawer = service.requests.drawer
    drawer.check_room(http.state.client, images, bulk=bulk, model=order.model)
    try:
        async with asyncio.timeout_at(http.state.began + order.timeout_s) as limit:
            return await while_connected(
                http,
                service.decoders.run(
                    http.state.client,
                    lambda: read(
                        image.file.read(),
                        order.model.config,
                        mask=None if mask is None else mask.file.read(),
                        keep_rows=form.keep_rows,
                        **options,
                    ),
                ),
            )
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadline_passed(order.timeout_s) from None
    # from reading a file, or from starting a thread
    except (OSError, MemoryError, RuntimeError) as error:
        logger.exception("a picture could not be decoded")
        raise exhausted() from error
