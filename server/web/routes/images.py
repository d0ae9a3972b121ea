"""POST /v1/images/generations and /v1/images/edits: drawing images, and completing a picture."""

from typing import Annotated

from fastapi import APIRouter, Body, File, Form, Request, Response, UploadFile

from ...engine.decode.ranking import check_recognises
from ...errors import (
    BodyTooLarge,
    Exhausted,
    InvalidRequest,
    ModelNotFound,
    NotJson,
    UnsupportedMedia,
)
from ...pictures import uploads
from .. import fields
from ..admission import TIMEOUT_PARAMETER, AdmittingRoute
from ..openapi import image_responses
from ..requests.image_request import ImageRequest, naming_fields
from ..requests.responses import respond
from ..requests.uploads import check_options, decoded, facts_of, only
from ..schemas import (
    EDIT,
    FORM_FIELDS,
    GENERATE,
    EditEvent,
    EditResponse,
    GenerateBody,
    GenerationEvent,
    ImagesResponse,
)
from ..service import service_of

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=AdmittingRoute)

_GENERATIONS = image_responses("image_generation", GenerationEvent,
                               InvalidRequest("n must be 1..16, got 17", param="n"),
                               ModelNotFound("mnist-large", ["mnist-small"]), NotJson("text/plain"),
                               links={"generate": {"model": "model", "seed": "data/0/seed"}})
_FORM = {"examples": EDIT, "encoding": {"image[]": {"explode": True}}}  # /docs then sends no part without a picture
_EDITS = image_responses("image_edit", EditEvent,
                         InvalidRequest("it is not clear what to fill in: use an image with transparent pixels, or "
                                        "mask or keep_rows", param="image"),
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
    service, ticket = service_of(http), http.state.ticket
    ignored = list(body.model_extra or {})
    request = ImageRequest(service, http, **body.model_dump(exclude=set(ignored)), ignored=ignored)
    with naming_fields():
        check_recognises(body.candidates, request.served.decoder.checkpoint)
    service.ledger.admit(ticket, request.served, request.images, stream=request.stream and not request.ranked,
                         bulk=request.bulk, timeout_s=request.timeout_s, known=0, attempts=request.attempts)
    await service.ledger.submit(ticket, request.specs())
    return await respond(service.ledger, http, request, ticket, "image_generation", {"candidates": body.candidates})


@router.post("/edits", response_model=EditResponse, operation_id="edit", responses=_EDITS,
             summary="Complete a picture",
             openapi_extra={"parameters": [TIMEOUT_PARAMETER], "requestBody": {
                 "content": {"multipart/form-data": _FORM}, "description": "A picture, and which part of it to fill "
                 "in. Unknown fields are ignored and listed in the answer's warnings."}})
async def edit(
        http: Request,
        image: Annotated[UploadFile | None, File(description="PNG, JPEG or WebP, not smaller than the model's size; "
                                                 "without mask and keep_rows, its transparent parts are filled in",
                                                 examples=["seven.png"])] = None,
        image_list: Annotated[list[UploadFile] | None, File(alias="image[]", examples=[[]], description="another name "
                                                            "for image, which some clients use; one picture")] = None,
        mask: Annotated[UploadFile | None, File(description="picture whose transparent parts say what to fill in, "
                                                "instead of the transparent parts of "
                                                "image", examples=["mask.png"])] = None,
        keep_rows: Annotated[fields.KeptRows | None, Form()] = None,
        prepare: Annotated[fields.Prepare | None, Form()] = None,
        lay_back: Annotated[fields.LayBack | None, Form()] = None,
        conditioning: Annotated[fields.Conditioning | None, Form()] = None,
        model: Annotated[fields.Model | None, Form()] = None,
        prompt: Annotated[fields.Prompt | None, Form()] = None,
        n: Annotated[fields.Count | None, Form()] = None,
        candidates: Annotated[fields.Candidates | None, Form()] = None,
        attempts: Annotated[fields.Attempts | None, Form()] = None,
        method: Annotated[fields.Method | None, Form()] = None,
        particles: Annotated[fields.Particles | None, Form()] = None,
        size: Annotated[fields.Size | None, Form()] = None,
        response_format: Annotated[fields.Format | None, Form()] = None,
        output_format: Annotated[fields.OutputFormat | None, Form()] = None,
        stream: Annotated[fields.Stream | None, Form()] = None,
        partial_images: Annotated[fields.Partials | None, Form()] = None,
        seed: Annotated[fields.Seed | None, Form()] = None,
        temperature: Annotated[fields.Temperature | None, Form()] = None,
        label: Annotated[fields.Label | None, Form()] = None,
        timeout: Annotated[fields.Timeout | None, Form()] = None,
        priority: Annotated[fields.Priority | None, Form()] = None) -> Response:
    """Complete an occluded image: known sub-pixels come back unchanged, and the holes are drawn.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    service, ticket = service_of(http), http.state.ticket
    ignored = [name for name in await http.form() if name not in FORM_FIELDS]
    request = ImageRequest(service, http, model=model, n=n, size=size, response_format=response_format, stream=stream,
                           partial_images=partial_images, seed=seed, temperature=temperature, label=label,
                           prompt=prompt, timeout=timeout, priority=priority, ignored=ignored,
                           candidates=candidates, attempts=attempts, method=method, particles=particles,
                           output_format=output_format)
    upload = only(image, image_list)
    check_options(request, prepare, lay_back, size)
    service.ledger.admit(ticket, request.served, request.images, stream=request.stream and not request.chosen,
                         bulk=request.bulk, timeout_s=request.timeout_s, group=request.particles or 1,
                         ranked=request.ranked and not request.attempts, attempts=request.attempts)

    def read() -> uploads.Upload:
        return uploads.read(upload.file.read(), request.config, mask=None if mask is None else mask.file.read(),
                            keep_rows=keep_rows, preparation=prepare or "none", lay_back=bool(lay_back))

    found = await decoded(http, service.ledger, ticket, read, lambda found: found.held)
    if found is None:
        return Response(status_code=499)  # the client has disconnected
    request.complete(found, conditioning)
    await service.ledger.submit(ticket, request.specs())
    facts = facts_of(request.occluded, found) | {"candidates": candidates, "method": method or "raster",
                                                 "particles": request.particles or None}
    del found  # frees the megabytes of a prepared picture while its completions wait
    return await respond(service.ledger, http, request, ticket, "image_edit", facts)
