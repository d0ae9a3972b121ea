"""POST /v1/images/likelihoods: how probable the hidden part of a picture is, given the known
part.
"""

import base64
import time
from dataclasses import replace
from typing import Annotated, Literal
from urllib.parse import quote

import numpy as np
from fastapi import APIRouter, File, Response
from fastapi import Request as Http
from numpy.typing import NDArray
from pydantic import Field

from ...engine.request import Request
from ...errors import InvalidRequest
from ...pictures import encode, uploads
from ...pictures.likelihoods import labels_of, likelihood, map_png, numbers
from ..answers import Answer, Order, as_json, order_of
from ..openapi import BODY, DRAWING, PNG, UPLOADING, error_responses, ok_response, png_headers
from ..request_schemas import LIKELIHOOD, TIMEOUT_PARAMETER, LikelihoodForm
from ..schemas import Conditioning, Created, Described, Digest, Name
from ..uploads import FormRoute, decoded

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=FormRoute)

# log-probabilities of all classes; with up to so many, an answer takes a few milliseconds
INLINE_NUMBERS = 2**15
NUMBER_BYTES = 32  # of one number in JSON, at most


# --- the answer; the examples are of the shipped `mnist-small` ---

_Nats = Annotated[
    float,
    Field(
        description="natural logarithm of the probability of the counted sub-pixels",
        examples=[-457.6],
    ),
]
_Bits = Annotated[
    float,
    Field(
        description=(
            "mean number of bits over the counted sub-pixels; 8 is a uniform guess, and "
            "lower is more probable"
        ),
        examples=[0.842],
    ),
]


class ClassLikelihood(Described):
    """How probable the picture is as one of this class."""

    label: str = Field(examples=["7"])
    """name of the class"""
    posterior: float = Field(ge=0, le=1, examples=[0.992])
    """probability of the class after the counted sub-pixels were seen, if all classes are equally
    probable before"""
    log_likelihood: _Nats
    bits_per_dim: _Bits


class Likelihoods(Conditioning):
    """How probable the hidden part of a picture is, given the known part: as a whole, by class and
    by sub-pixel.
    """

    created: Created
    model: Name
    checkpoint: Digest
    precision: Literal["fp32"] = "fp32"
    """always fp32: likelihoods are computed by torch in float32, whatever precision the model draws
    with"""
    warnings: list[str] = Field(examples=[[]])
    """parts of the request that were ignored, or that had no effect"""
    label: str | None = Field(examples=["7"])
    """class that the model assumed; null: no class; with labels=all, or with a model that draws the
    class first: the mixture of all classes"""
    counted: int = Field(examples=[784])
    """number of hidden sub-pixels; without transparency, mask and keep_rows, all are hidden"""
    log_likelihood: _Nats
    bits_per_dim: _Bits
    exact: bool = Field(examples=[True])
    """false: with classes=plausible, some classes were left out, so that log_likelihood is a lower
    bound"""
    labels: list[ClassLikelihood] | None
    """every class, the most probable first, without those that classes=plausible leaves out; null
    without labels=all"""
    map: list[list[list[float | None]]] = Field(examples=[[[[0.001], [3.25]], [[None], [0.5]]]])
    """bits of each sub-pixel given the ones before it, by image row, pixel and channel; null for
    known sub-pixels; their sum is -log_likelihood / ln 2"""
    b64_json: str | None = Field(examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAQAAAB..."])
    """the map as a PNG in base64: the mean over channels, from black for 0 bits to white for 8 bits
    or more; transparent for known pixels; null unless response_format is b64_json"""


# --- the route ---

_OK = ok_response("the likelihood; with Accept: image/png, its map as a picture", content=PNG)
_OK[200]["headers"] = png_headers(Likelihoods)
_RESPONSES = _OK | error_responses(
    *BODY,
    *DRAWING,
    InvalidRequest(
        "keep_rows hides nothing, so there is nothing to score: hide at least one pixel, or leave"
        " out keep_rows to score the whole picture",
        param="keep_rows",
    ),
    InvalidRequest(
        "mnist considers the value of the first sub-pixel impossible: none of its training pictures"
        " starts with it; send another picture, or keep the first pixel with a mask",
        param="image",
    ),
    *UPLOADING,
)


@router.post(
    "/likelihoods",
    response_model=Likelihoods,
    responses=_RESPONSES,
    summary="Compute how probable a picture is",
    openapi_extra={
        "parameters": [TIMEOUT_PARAMETER],
        "requestBody": {
            "content": {"multipart/form-data": {"examples": LIKELIHOOD}},
            "description": (
                "A picture, and which part of it is hidden. Unknown fields are ignored and listed"
                " in the answer's warnings."
            ),
        },
    },
)
async def score(form: Annotated[LikelihoodForm, File()], http: Http) -> Response:
    """Say how probable the hidden part of a picture is, given the known part; if none is known, the
    whole picture.
    """
    order = order_of(http, form)
    model, config = order.model, order.model.config
    http.state.images = 1  # for the log
    if form.response_format == "url":
        raise InvalidRequest(
            "response_format must be b64_json here, or absent, got 'url'", param="response_format"
        )
    if form.labels and not model.checkpoint.class_names:
        raise InvalidRequest(
            f"labels=all needs a model with classes, and {model.name} has none; leave it out",
            param="labels",
        )
    upload = await decoded(http, order, form, scored=True)
    labels = labels_of(model.checkpoint, upload, order.label, every=bool(form.labels))
    png_bytes = encode.max_bytes(order.frame, 2, "png")
    order = replace(
        order,
        warnings=[*order.warnings, *uploads.warnings_of(upload)],
        options={
            "model": model.name,
            "scored": True,
            "plausible": bool(form.classes),
            "canvas": upload.canvas,
            "known": upload.known,
            "labels": labels,
            "label": order.label,
        },
        facts=upload.facts,
        held_bytes=NUMBER_BYTES * config.subpixels + png_bytes * 4 // 3,
    )
    return LikelihoodAnswer(http, order, form)


class LikelihoodAnswer(Answer):
    """The likelihood of a job's picture."""

    def __init__(self, http: Http, order: Order, form: LikelihoodForm) -> None:
        super().__init__(http, order)
        self.form = form

    async def in_one_piece(self, request: Request) -> Response:
        event = await request.next_event()
        assert event is not None and event.scores is not None
        inline = event.scores[0].size <= INLINE_NUMBERS
        known = request.job.known
        return await self.in_time(request, self._response, known, *event.scores, inline=inline)

    def _response(
        self,
        known: NDArray[np.bool_],
        log_probs: NDArray[np.float32],
        priors: NDArray[np.float64],
    ) -> Response:
        order, checkpoint = self.order, self.order.model.checkpoint
        every = bool(self.form.labels)
        bits, scores = likelihood(checkpoint, known, log_probs, priors, order.label, every=every)
        source = {"model": checkpoint.name, "checkpoint": checkpoint.digest}
        config = order.model.config
        # only PNG: maps have transparent parts, and exact values
        alone = order.accepted == "image/png"
        drawn = alone or self.form.response_format
        png = map_png(bits, config, order.frame) if drawn else b""
        if alone:
            facts = source | {"precision": "fp32"}
            facts |= {name: f"{scores[name]:.6g}" for name in ("bits_per_dim", "log_likelihood")}
            headers = {
                f"x-linpix-{name.replace('_', '-')}": quote(value, safe="+")
                for name, value in facts.items()
            }
            return Response(png, media_type="image/png", headers=headers)
        return as_json(
            Likelihoods(
                created=int(time.time()),
                **source,
                warnings=order.warnings,
                **order.facts,
                **scores,
                map=numbers(bits, config),
                b64_json=base64.b64encode(png).decode() or None,
            )
        )
