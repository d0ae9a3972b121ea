"""The form of an upload: the fields that are known, each once and small, and never a part of a form for a whole one."""

import logging
from collections import Counter

from fastapi import Request
from starlette.formparsers import MultiPartException, MultiPartParser

from ..errors import Exhausted, InvalidRequest, ServiceError
from .likelihood_schemas import LIKELIHOOD_FIELDS
from .schemas import FORM_FIELDS, FORM_LISTS

logger = logging.getLogger("linpix")
# What is in memory as long as a form is read: up to 1 MiB of each file, and 4 bytes a character of a known field.
MAX_FILES, MAX_FIELDS, FIELD_BYTES = 3, 64, 2**12
_KNOWN = FORM_FIELDS | LIKELIHOOD_FIELDS  # of one form or another: routes ignore those that are not theirs
NAME_CHARACTERS = 80  # of an unknown field, for the warning that names it


class _Form(MultiPartParser):
    """Starlette's parser, which keeps of an unknown field its name alone, and knows whether it came to the end."""

    ended = False

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if self._current_part.field_name not in _KNOWN:
            self._current_part.field_name = self._current_part.field_name[:NAME_CHARACTERS]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.field_name in _KNOWN:
            super().on_part_data(data, start, end)

    def on_end(self) -> None:
        self.ended = True


async def read(http: Request) -> None:
    """Read a request's form; FastAPI then finds it read. Raises ServiceError."""
    parser = _Form(http.headers, http.stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=FIELD_BYTES)
    try:
        form = http._form = await parser.parse()  # where Request.form() keeps what it has parsed
    except ServiceError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:  # such as a full disk, or no more threads
        logger.exception("an upload could not be read")
        raise Exhausted() from error
    except Exception as error:  # a client's mistake whatever it is
        why = error.message if isinstance(error, MultiPartException) else type(error).__name__
        raise InvalidRequest(f"the body cannot be read as a form ({why}); send multipart/form-data of at most "
                             f"{MAX_FILES} files, and {MAX_FIELDS} fields of {FIELD_BYTES:,} bytes") from error
    if not parser.ended:
        await form.close()
        raise InvalidRequest("the form ends before its closing boundary: send all of it")
    for name, times in Counter(name for name, _ in form.multi_items()).items():
        if times > 1 and name in _KNOWN and name not in FORM_LISTS:
            await form.close()
            raise InvalidRequest(f"the form has {times} fields {name}; send one", param=name)
