"""Reading the form of an upload: only known fields, each small and sent once, and only if the form is complete."""

import logging
from collections import Counter

from fastapi import Request
from starlette.formparsers import MultiPartException, MultiPartParser

from ..errors import Exhausted, InvalidRequest, ServiceError
from .requests.request_schemas import FORM_FIELDS, FORM_LISTS

logger = logging.getLogger("linpix")
# While a form is read, memory holds up to 1 MiB of each file, and 4 bytes per character of a known field.
MAX_FILES, MAX_FIELDS, FIELD_BYTES = 3, 64, 2**12
NAME_CHARACTERS = 80  # kept of the name of an unknown field, for the warning about it


class _Form(MultiPartParser):
    """Starlette's parser, but it keeps only the name of an unknown field, and notes whether the form has ended."""

    ended = False

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if self._current_part.field_name not in FORM_FIELDS:
            self._current_part.field_name = self._current_part.field_name[:NAME_CHARACTERS]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.field_name in FORM_FIELDS:
            super().on_part_data(data, start, end)

    def on_end(self) -> None:
        self.ended = True


async def read(http: Request) -> None:
    """Read a request's form, so that FastAPI finds it parsed. Raises ServiceError."""
    parser = _Form(http.headers, http.stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=FIELD_BYTES)
    try:
        form = http._form = await parser.parse()  # where Request.form() keeps what it has parsed
    except ServiceError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:  # such as a full disk, or no more threads
        logger.exception("an upload could not be read")
        raise Exhausted() from error
    except Exception as error:  # whatever else it is, it is the client's mistake
        why = error.message if isinstance(error, MultiPartException) else type(error).__name__
        raise InvalidRequest(f"the body cannot be read as a form ({why}); send multipart/form-data with at most "
                             f"{MAX_FILES} files and {MAX_FIELDS} fields of up to {FIELD_BYTES:,} bytes "
                             "each") from error
    if not parser.ended:
        await form.close()
        raise InvalidRequest("the form ends before its closing boundary; send the whole form")
    for name, times in Counter(name for name, _ in form.multi_items()).items():
        if times > 1 and name in FORM_FIELDS and name not in FORM_LISTS:
            await form.close()
            raise InvalidRequest(f"the form has {times} fields {name}; send one", param=name)
