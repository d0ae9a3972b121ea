"""Uploads: reading a form, and decoding its picture."""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.formparsers import MultiPartException, MultiPartParser

from ..errors import InvalidRequest, ServiceError, deadline_passed, exhausted, shown
from ..pictures.uploads import Upload, read
from .answers import Answer, while_connected
from .middleware.bodies import Exchange
from .request_schemas import FORM_FIELDS, FORM_NUMBERS, UploadFields

logger = logging.getLogger("linpix")
# While a form is read, memory holds up to 1 MiB of each file, and 4 bytes per character of a known
# field.
MAX_FILES, MAX_FIELDS, FIELD_BYTES = 3, 64, 2**12
FILES = re.compile(r"(image|mask)(\[\d*\])?")  # some clients name a file like one of several
NAME_CHARACTERS = 80  # kept of the name of an unknown field, for the warning about it


class Form(MultiPartParser):
    """Starlette's parser, but it keeps only the name of an unknown field, and notes whether the
    form has ended.
    """

    ended = False

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part, found = self._current_part, FILES.fullmatch(self._current_part.field_name)
        part.field_name = found[1] if found and part.file is not None else part.field_name
        if part.field_name not in FORM_FIELDS:
            part.field_name = part.field_name[:NAME_CHARACTERS]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        name = self._current_part.field_name
        if self._current_part.file is None and start < end and FILES.fullmatch(name):
            raise InvalidRequest(
                f"{name} must be a file, so its part needs a filename; with curl, -F "
                f"{name}=@picture.png sends one. A picture as text, such as base64, is not read",
                param=name,
            )
        if name in FORM_FIELDS:
            super().on_part_data(data, start, end)

    def on_end(self) -> None:
        self.ended = True


class FormRoute(APIRoute):
    """A route that reads its form before FastAPI does, within our limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        self._handle = super().get_route_handler()
        return self.read

    async def read(self, http: Request) -> Response:
        """Read a request's form, and go on with the route. Raises ServiceError."""
        parser = Form(
            http.headers,
            http.stream(),
            max_files=MAX_FILES,
            max_fields=MAX_FIELDS,
            max_part_size=FIELD_BYTES,
        )
        try:
            # where Request.form() keeps what it has parsed
            form = http._form = await parser.parse()
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
                f"{MAX_FILES} files and {MAX_FIELDS} fields of up to {FIELD_BYTES:,} bytes "
                "each"
            ) from error
        try:
            if not parser.ended:
                raise InvalidRequest(
                    "the form ends before its closing boundary; send the whole form"
                )
            for name, value in form.multi_items():
                if name in FORM_FIELDS and (times := len(form.getlist(name))) > 1:
                    raise InvalidRequest(
                        f"the form has {times} fields {name}; send one", param=name
                    )
                # pydantic would read 1_0 as 10
                if name in FORM_NUMBERS and isinstance(value, str) and "_" in value:
                    raise InvalidRequest(
                        f"{name}: a number must not have underscores, got {shown(value)}",
                        param=name,
                    )
            return await self._handle(http)
        finally:
            await form.close()  # its files are not needed while it waits for a slot


async def decoded(answer: Answer, form: UploadFields, **options: Any) -> Upload:
    """A form's picture, with its mask or keep_rows. options: of `read`. Raises ServiceError.

    The files are read in a thread: waiting uploads stay in their files, and out of memory. The
    bytes that the result holds count from then on, in place of the upload's.
    """
    http, service, mask = answer.http, answer.service, form.mask
    if (image := form.image) is None:
        raise InvalidRequest("send exactly one picture as image or image[], got 0", param="image")
    if refusal := service.requests.refusal(http.state.client, answer.job, answer.model):
        raise refusal
    try:
        async with asyncio.timeout_at(http.state.began + answer.timeout_s) as limit:
            found = await while_connected(
                http,
                service.upload_slots.run(
                    http.state.client,
                    lambda: read(
                        image.file.read(),
                        answer.config,
                        mask=None if mask is None else mask.file.read(),
                        keep_rows=form.keep_rows,
                        **options,
                    ),
                ),
            )
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadline_passed(answer.timeout_s) from None
    # from reading a file, or from starting a thread
    except (OSError, MemoryError, RuntimeError) as error:
        logger.exception("a picture could not be decoded")
        raise exhausted() from error
    exchange: Exchange = http.scope["linpix.exchange"]
    over = found.overlay  # what else it needs is small
    exchange.hold(0 if over is None else over.blank.nbytes + over.hidden.nbytes)
    return found
