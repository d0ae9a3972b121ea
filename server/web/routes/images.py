"""POST /v1/images/generations and /v1/images/edits: drawing images, and completing a picture."""

from typing import Annotated

from fastapi import APIRouter, Body, File, Request, Response

from ...errors import InvalidRequest, ModelNotFound, ServiceError, body_too_large, exhausted, not_json
from ...pictures import uploads
from ..images import Images
from ..openapi import image_responses
from ..request_schemas import EDIT, GENERATE, TIMEOUT_PARAMETER, EditForm, GenerateBody
from ..schemas import EditEvent, EditResponse, GenerationEvent, ImagesResponse
from ..uploads import FormRoute, decoded, files_of

router = APIRouter(prefix="/v1/images", tags=["images"])
forms = APIRouter(prefix="/v1/images", tags=["images"], route_class=FormRoute)

_GENERATIONS = image_responses(GenerationEvent, InvalidRequest("n must be 1..16, got 17", param="n"),
                               ModelNotFound("mnist-large", ["mnist-small"]), not_json("text/plain"))
_EDITS = image_responses(EditEvent,
                         InvalidRequest("it is not clear what to fill in: erase that part of the picture (save it "
                                        "as a PNG with transparent pixels), or use a mask or keep_rows",
                                        param="image"),
                         ModelNotFound("mnist-large", ["mnist-small"]), body_too_large(20_000_000, 2**24), exhausted(),
                         ServiceError("image must be a PNG, JPEG or WebP picture, got 5 bytes that begin with "
                                      "b'hello'", 415, param="image"))


@router.post("/generations", response_model=ImagesResponse, operation_id="generate", responses=_GENERATIONS,
             summary="Draw images",
             openapi_extra={"parameters": [TIMEOUT_PARAMETER]})
async def generate(body: Annotated[GenerateBody, Body(openapi_examples=GENERATE)], http: Request) -> Response:
    """Draw images: of any class, or of one.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    return Images(http, body, ImagesResponse, GenerationEvent)


@forms.post("/edits", response_model=EditResponse, operation_id="edit", responses=_EDITS,
             summary="Complete a picture",
             openapi_extra={"parameters": [TIMEOUT_PARAMETER], "requestBody": {
                 "content": {"multipart/form-data": {"examples": EDIT}}, "description": "A picture, and which part of "
                 "it to fill in. Unknown fields are ignored and listed in the answer's warnings."}})
async def edit(form: Annotated[EditForm, File()], http: Request) -> Response:
    """Complete an occluded image: known sub-pixels come back unchanged, and the holes are drawn.

    Choose `image/png` as the media type of the response to see the picture itself.
    """
    images, files = Images(http, form, EditResponse, EditEvent), files_of(form)
    images.check_edit(form)

    def read(picture: bytes, mask: bytes | None) -> uploads.Upload:
        return uploads.read(picture, images.config, mask=mask, keep_rows=form.keep_rows,
                            preparation=form.prepare or "none", lay_back=bool(form.lay_back))

    images.complete(await decoded(images, files, read), form.conditioning)
    return images
