"""Common parts of routes that take a form: finding its picture, decoding it in its turn, telling what was known."""

import base64
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, UploadFile

from ...engine.ledger.ledger import Ledger
from ...engine.ledger.ticket import Ticket
from ...errors import ClientLeft, Exhausted, InvalidRequest, shown
from ...pictures import uploads
from ...pictures.pictures import Occluded
from ..middleware.bodies import Body
from .image_request import ImageRequest
from .request_schemas import EditForm, UploadFields
from .responses import while_connected

logger = logging.getLogger("linpix")
T = TypeVar("T")


def only(form: UploadFields) -> UploadFile:
    """The one picture, sent as image or as image[]. Raises InvalidRequest."""
    sent = [upload for upload in [form.image, *(form.image_list or [])] if upload is not None]
    if len(sent) != 1:
        raise InvalidRequest(f"send exactly one picture as image or image[], got {len(sent)}", param="image")
    return sent[0]


def check_options(request: ImageRequest, form: EditForm) -> None:
    """Raise InvalidRequest or OptionError for options of an edit that contradict each other or do not fit its model."""
    if form.lay_back and request.frame.width != request.config.width:
        raise InvalidRequest("lay_back returns pictures of the upload's size; leave out size, got "
                             f"{shown(form.size)}", param="size")
    if form.lay_back and request.partial_images:
        raise InvalidRequest("with lay_back, a stream has no partial images; leave out partial_images, got "
                             f"{shown(request.partial_images)}", param="partial_images")
    if form.prepare == "mnist":
        uploads.check_preparable(request.config)


async def decoded(http: Request, ledger: Ledger, ticket: Ticket, read: Callable[[], T],
                  held: Callable[[T], int] = lambda found: 0) -> T:
    """The result of `read`, which reads the form's files. Closes the files.

    read is called in a thread, so that waiting uploads stay in their files, and out of memory. held: bytes of the
    result; they count from then on, in place of the upload's. Raises ServiceError, and what read raises.
    """
    try:
        found = await while_connected(http, ledger.decode_upload(ticket, read))
    except ClientLeft:
        ticket.outcome = "cancelled"
        raise
    except (OSError, MemoryError, RuntimeError) as error:  # from reading a file, or from starting a thread
        logger.exception("a picture could not be decoded")
        raise Exhausted() from error
    await http.close()  # closes its files: they are not needed while it waits for a slot
    body: Body = http.scope["linpix.body"]
    body.keep(held(found))
    return found


def facts_of(occluded: Occluded, upload: uploads.Upload | None = None) -> dict[str, Any]:
    """The facts of an answer about what was known; for an edit's upload, also which part of it the model sees."""
    facts: dict[str, Any] = {"conditioning": occluded.conditioning, "known": occluded.known_count,
                             "known_before_first_hole": occluded.known_before_first_hole,
                             "known_after_last_hole": occluded.known_after_last_hole}
    if upload is not None:
        prepared = None if upload.prepared is None else {"inverted": upload.prepared.inverted, "box": upload.box,
                                                         "b64_json": base64.b64encode(upload.seen()).decode()}
        facts |= {"crop": upload.crop, "prepared": prepared}
    return facts
