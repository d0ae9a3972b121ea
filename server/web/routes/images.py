"""POST /v1/images/generations and /v1/images/edits: drawing images, and completing a picture."""

from typing import Annotated

from fastapi import APIRouter, Body, File, Request, Response

from ...engine.ledger.ticket import Ticket
from ...errors import (
    BodyTooLarge,
    Exhausted,
    InvalidRequest,
    ModelNotFound,
    NotJson,
    UnsupportedMedia,
)
from ...pictures import uploads
from ..admission import TIMEOUT_PARAMETER, AdmittingRoute
from ..openapi import image_responses
from ..requests.image_request import ImageRequest
from ..requests.request_schemas import EDIT, GENERATE, EditForm, GenerateBody
from ..requests.responses import respond
from ..requests.uploads import check_options, decoded, facts_of, only
from ..schemas import EditEvent, EditResponse, GenerationEvent, ImagesResponse
from ..service import Service

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=AdmittingRoute)

_GENERATIONS = image_responses(GenerationEvent, InvalidRequest("n must be 1..16, got 17", param="n"),
                               ModelNotFound("mnist-large", ["mnist-small"]), NotJson("text/plain"),
                               links={"generate": {"model": "model", "seed": "data/0/seed"}})
_FORM = {"examples": EDIT, "encoding": {"image[]": {"explode": True}}}  # /docs then sends no part without a picture
_EDITS = image_responses(EditEvent,
                         InvalidRequest("it is not clear what to fill in: use an image or a mask with transparent "
                                        "pixels, or keep_rows", param="image"),
                         ModelNotFound("mnist-large", ["mnist-small"]), BodyTooLarge(20_000_000, 2**24), Exhausted(),
                         UnsupportedMedia("image must be a PNG, JPEG or WebP picture, got 5 bytes that begin with "
                                          "b'hello'", param="image"))


@router.post("/generations", response_model=ImagesResponse, operation_id="generate", responses=_GENERATIONS,
             summary="Draw images",
             openapi_extra={"parameters": [TIMEOUT_PARAMETER]})
async def generate(body: Annotated[GenerateBody, Body(openapi_examples=GENERATE)], http: Request) -> Response:
    """Draw images: of any class, or of one.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    service: Service = http.app.state.service
    ticket: Ticket = http.state.ticket
    request = ImageRequest(service, http, body)
    service.ledger.admit(ticket, request.served, request.demand(known=0), request.timeout_s)
    return await respond(service.ledger, http, request, ticket, ImagesResponse, GenerationEvent,
                         {"candidates": body.candidates})


@router.post("/edits", response_model=EditResponse, operation_id="edit", responses=_EDITS,
             summary="Complete a picture",
             openapi_extra={"parameters": [TIMEOUT_PARAMETER], "requestBody": {
                 "content": {"multipart/form-data": _FORM}, "description": "A picture, and which part of it to fill "
                 "in. Unknown fields are ignored and listed in the answer's warnings."}})
async def edit(form: Annotated[EditForm, File()], http: Request) -> Response:
    """Complete an occluded image: known sub-pixels come back unchanged, and the holes are drawn.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    service: Service = http.app.state.service
    ticket: Ticket = http.state.ticket
    request = ImageRequest(service, http, form)
    upload, mask = only(form), form.mask
    check_options(request, form)
    service.ledger.admit(ticket, request.served, request.demand(), request.timeout_s)

    def read() -> uploads.Upload:
        return uploads.read(upload.file.read(), request.config, mask=None if mask is None else mask.file.read(),
                            keep_rows=form.keep_rows, preparation=form.prepare or "none", lay_back=bool(form.lay_back))

    found = await decoded(http, service.ledger, ticket, read, lambda found: found.held)
    occluded = request.complete(service, found, form.conditioning)
    facts = facts_of(occluded, found) | {"candidates": form.candidates}
    del found  # frees the megabytes of a prepared picture while its completions wait
    return await respond(service.ledger, http, request, ticket, EditResponse, EditEvent, facts)
