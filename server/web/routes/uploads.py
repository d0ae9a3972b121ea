"""What routes that take a form with a picture have in common: one picture, decoded in its turn, and what was known."""

import base64
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, UploadFile

from ...engine.ledger import Ledger
from ...engine.ticket import Ticket
from ...errors import Exhausted, InvalidRequest, shown
from ...pictures import uploads
from ...pictures.pictures import Occluded, PictureError
from ..middleware import bodies
from .image_request import ImageRequest, picture_error
from .responses import unless_gone

logger = logging.getLogger("linpix")
T = TypeVar("T")


def only(image: UploadFile | None, image_list: list[UploadFile] | None) -> UploadFile:
    """The picture, under whichever of its two names it came. Raises InvalidRequest."""
    uploads = [upload for upload in [image, *(image_list or [])] if upload is not None]
    if len(uploads) != 1:
        raise InvalidRequest(f"send exactly one picture as image or image[], got {len(uploads)}", param="image")
    return uploads[0]


def check_options(request: ImageRequest, prepare: uploads.Preparation | None, lay_back: bool | None,
                  size: str | None) -> None:
    """Raise InvalidRequest for options of an edit that do not go together, or not with its model."""
    if lay_back and request.frame.width != request.config.width:
        raise InvalidRequest(f"lay_back answers at the upload's size, so it goes without size, got {shown(size)}",
                             param="size")
    if lay_back and request.partial_images:
        raise InvalidRequest("with lay_back a stream has no partial images; leave partial_images out, got "
                             f"{shown(request.partial_images)}", param="partial_images")
    if prepare == "mnist":
        try:
            uploads.check_preparable(request.config)
        except PictureError as error:
            raise picture_error(error) from error


async def decoded(http: Request, ledger: Ledger, ticket: Ticket, read: Callable[[], T],
                  held: Callable[[T], int] = lambda found: 0) -> T | None:
    """What `read` makes of the form's files, which are then closed; None if the client has disconnected.

    read is called in a thread, so that uploads that wait for one are files, and no memory. held: bytes of its result
    that count as its upload did. Raises ServiceError.
    """
    try:
        found = await unless_gone(http, ledger.decode_upload(ticket, read))
    except PictureError as error:
        raise picture_error(error) from error
    except (OSError, MemoryError, RuntimeError) as error:  # of reading a file, or of beginning a thread
        logger.exception("a picture could not be decoded")
        raise Exhausted() from error
    if found is None:
        ticket.outcome = "cancelled"
        return None
    await http.close()  # its files: a slot is waited for without them
    bodies.body_of(http.scope).keep(held(found))
    return found


def facts_of(occluded: Occluded, upload: uploads.Upload | None = None) -> dict[str, Any]:
    """What an answer tells of what was known; of an edit's upload, also which part of it the model sees."""
    facts: dict[str, Any] = {"conditioning": occluded.conditioning, "known": occluded.known_count,
                             "known_before_first_hole": occluded.known_before_first_hole,
                             "known_after_last_hole": occluded.known_after_last_hole}
    if upload is not None:
        prepared = None if upload.prepared is None else {"inverted": upload.prepared.inverted, "box": upload.box,
                                                         "b64_json": base64.b64encode(upload.seen()).decode()}
        facts |= {"crop": upload.crop, "prepared": prepared}
    return facts
