"""POST /v1/images/inside: what a model looked at, remembered and expected while it read a
picture.
"""

import io
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, File, Response
from fastapi import Request as Http
from numpy.typing import NDArray
from pydantic import Field

from linpix.model.config import ModelConfig
from linpix.model.inside import Token, View

from ...engine.job import checked_options
from ...engine.request import Request
from ...errors import InvalidRequest
from ...pictures import uploads
from ...pictures.encode import NPY
from ...pictures.likelihoods import labels_of, numbers
from ..answers import Answer, Order, as_json, order_of
from ..openapi import BODY, DRAWING, UPLOADING, error_responses, ok_response
from ..request_schemas import INSIDE, TIMEOUT_PARAMETER, InsideForm
from ..schemas import Created, Described, Digest, Name
from ..uploads import FormRoute, decoded

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=FormRoute)

NUMBER_BYTES = 32  # of one number in JSON, at most


class TokenFacts(Described):
    """A token that goes through the layers."""

    kind: Literal["patch", "query", "drawn"] = Field(examples=["drawn"])
    """drawn: a sub-pixel, or a pixel of a model that draws whole pixels; patch: the known pixels of
    a square; query: what a conditional model reads after them"""
    at: int = Field(examples=[400])
    """drawn: its position in raster order; patch: the number of its square, in raster order; query:
    0"""


class InsideView(Described):
    """What one head of a model did with a picture, at one token."""

    created: Created
    model: Name
    checkpoint: Digest
    warnings: list[str] = Field(examples=[[]])
    """parts of the request that were ignored, or that had no effect"""
    label: str | None = Field(examples=["7"])
    """class that the model assumed"""
    layers: int = Field(examples=[4])
    """layers of the model"""
    heads: int = Field(examples=[4])
    """heads of a layer"""
    key_dim: int = Field(examples=[32])
    """D, the length of a key"""
    value_dim: int = Field(examples=[32])
    """M, the length of a value"""
    layer: int = Field(examples=[3])
    """the layer looked into, from 0"""
    head: int = Field(examples=[2])
    """the head looked into, from 0"""
    token: int = Field(examples=[400])
    """the sub-pixel, or pixel, that is looked at, in raster order"""
    tokens: list[TokenFacts]
    """the tokens that go through the layers, in the order in which the model reads them; known
    sub-pixels and those amid background do not"""
    attention: list[float] | None = Field(examples=[[0.25, 0.75]])
    """how much the token looked at each of tokens; the sum is 1; null if it did not go through the
    layers"""
    distribution: list[list[float]] | None = Field(examples=[[[0.5, 0.5]]])
    """how probable each of the 256 values was before it was drawn, for each sub-pixel of the token;
    null if it was known"""
    bits: list[list[list[float | None]]] = Field(examples=[[[[0.001], [3.25]], [[None], [0.5]]]])
    """how unexpected each sub-pixel was, by image row, pixel and channel; null where known"""
    state: list[list[float]] | None = Field(examples=[[[0.1, 2.5], [0.3, 1.5]]])
    """the head's whole memory after the token, D rows of M + 1 numbers: a row of S, and z; null for
    softmax, which keeps all keys and values, and if the token did not go through the layers"""
    picture: list[list[list[int]]] = Field(examples=[[[[0], [255]], [[0], [0]]]])
    """the picture that was looked at, by image row, pixel and channel"""


_OK = ok_response(
    "what the model did; with Accept: application/x-npy, one array of all tokens",
    content={
        NPY: {
            "schema": {
                "type": "string",
                "contentMediaType": NPY,
                "description": "float16, of the shape that `array` names: numpy.load reads it",
            },
            "examples": {"one array": {"value": r"\x93NUMPY..."}},
        }
    },
)
_NO_STATE = InvalidRequest(
    "mnist-small-softmax has no state of S and z, since its attention is softmax: ask for"
    " array=attention or array=distributions, or for a model with linear attention",
    param="array",
)
_RESPONSES = _OK | error_responses(
    *BODY,
    *DRAWING,
    InvalidRequest("layer must be 0..3, got 4", param="layer"),
    _NO_STATE,
    *UPLOADING,
)


@router.post(
    "/inside",
    response_model=InsideView,
    responses=_RESPONSES,
    summary="Look inside a model",
    openapi_extra={
        "parameters": [TIMEOUT_PARAMETER],
        "requestBody": {
            "content": {"multipart/form-data": {"examples": INSIDE}},
            "description": (
                "A picture, or the seed of one that is drawn again. Unknown fields are ignored and"
                " listed in the answer's warnings."
            ),
        },
    },
)
async def look_inside(form: Annotated[InsideForm, File()], http: Http) -> Response:
    """Say where a token of a picture looked, which values it expected, and what was remembered
    after it.
    """
    order = order_of(http, form)
    config = order.model.config
    http.state.images = 1  # for the log
    layer = config.layers - 1 if form.layer is None else form.layer
    token = config.length - 1 if form.token is None else form.token
    asked = {"layer": (layer, config.layers), "head": (form.head, config.heads)}
    asked["token"] = token, config.length
    for name, (value, size) in asked.items():
        if value >= size:
            raise InvalidRequest(f"{name} must be 0..{size - 1}, got {value}", param=name)
    _check_attention(order, form.array)
    if form.image is None and form.seed is None:
        raise InvalidRequest(
            "send a picture as image, or the seed of one that is to be drawn", param="image"
        )
    if form.image is not None:
        order = await _of_upload(http, order, form)
    else:
        checkpoint = order.model.checkpoint
        options = checked_options(checkpoint, 1, label=order.label, seed=form.seed)
        order = replace(order, options=options)
    order = replace(
        order,
        options={**order.options, "look": (layer, form.head)},
        held_bytes=_bytes_of(config),
    )
    return InsideAnswer(http, order, token, form.array)


def _check_attention(order: Order, array: str) -> None:
    """Raise InvalidRequest if the model's attention has no weights, or not the array."""
    model = order.model
    kind = model.config.attention
    if not model.checkpoint.net.attention.has_weights:
        raise InvalidRequest(
            f"{model.name} has {kind} attention, which cannot say where a token looks: ask for a"
            " model with linear or softmax attention",
            param="model",
        )
    wants_array = order.accepted == NPY and array == "states"
    if wants_array and not model.checkpoint.net.attention.has_states:
        raise InvalidRequest(
            f"{model.name} has no state of S and z, since its attention is {kind}: ask for"
            " array=attention or array=distributions, or for a model with linear attention",
            param="array",
        )


async def _of_upload(http: Http, order: Order, form: InsideForm) -> Order:
    """The order with the options of a picture that was sent. Raises ServiceError."""
    upload = await decoded(http, order, form, scored=True)
    labels_of(order.model.checkpoint, upload, order.label, every=False)  # it must be possible
    options = {
        "model": order.model.name,
        "scored": True,
        "canvas": upload.canvas,
        "known": upload.known,
        "label": order.label,
    }
    warnings = [*order.warnings, *uploads.warnings_of(upload)]
    return replace(order, options=options, warnings=warnings)


def _bytes_of(config: ModelConfig) -> int:
    """Largest size of the arrays of a View, and of what is sent of them."""
    tokens = config.length + config.patches + 1
    state = config.feature_dim * (config.value_dim + 1)
    largest = max(tokens * tokens, tokens * state, config.subpixels * 256)
    view = 4 * (tokens * tokens + tokens * state + config.subpixels * 257)
    sent = NUMBER_BYTES * (tokens + state + 256 * config.token_size + 2 * config.subpixels)
    return view + max(2 * largest, sent)


class InsideAnswer(Answer):
    """A view of one head, as JSON or as one array."""

    def __init__(self, http: Http, order: Order, token: int, array: str) -> None:
        super().__init__(http, order)
        self.token, self.array = token, array

    async def in_one_piece(self, request: Request) -> Response:
        event = await request.next_event()
        assert event is not None and event.view is not None
        return await self.in_time(
            request, self._response, request.job, event.canvas, event.view, inline=False
        )

    def _response(self, job: Any, canvas: NDArray[np.uint8], view: View) -> Response:
        if self.order.accepted == NPY:
            return Response(_npy(getattr(view, self.array)), media_type=NPY)
        config, checkpoint = self.order.model.config, self.order.model.checkpoint
        layer, head = job.look
        place = None
        if (token := Token("drawn", self.token)) in view.tokens:
            place = view.tokens.index(token)
        return as_json(
            InsideView(
                created=int(time.time()),
                model=checkpoint.name,
                checkpoint=checkpoint.digest,
                warnings=list(self.order.warnings),
                label=None if view.label is None else checkpoint.class_names[view.label],
                layers=config.layers,
                heads=config.heads,
                key_dim=config.feature_dim,
                value_dim=config.value_dim,
                layer=layer,
                head=head,
                token=self.token,
                tokens=[TokenFacts(kind=kind, at=at) for kind, at in view.tokens],
                attention=_row(view.attention, place),
                distribution=_distribution(view, self.token, config.token_size),
                bits=numbers(view.bits.astype(np.float64), config),
                state=_row(view.states, place),
                picture=canvas.reshape((*config.image_shape[:2], -1)).tolist(),
            )
        )


def _row(array: NDArray[np.float32] | None, place: int | None) -> Any:
    """Numbers of one token, if it has any."""
    return None if array is None or place is None else array[place].tolist()


def _distribution(view: View, token: int, size: int) -> list[list[float]] | None:
    found = view.distributions[token * size : (token + 1) * size]
    return None if np.isnan(found).any() else found.tolist()


def _npy(array: NDArray[np.float32]) -> bytes:
    """As the file that numpy.load reads, in half the bytes."""
    out = io.BytesIO()
    np.save(out, array.astype(np.float16))
    return out.getvalue()
