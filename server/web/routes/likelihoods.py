"""POST /v1/images/likelihoods: how probable the hidden part of a picture is, given the known part."""

import asyncio
import base64
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, File, Request, Response

from linpix.model.likelihood import Scoring

from ...engine.decode.scoring import likelihood, scoring_of
from ...engine.ledger.ticket import Demand, Ticket
from ...errors import BodyTooLarge, Exhausted, Impossible, InvalidRequest, ModelNotFound, UnsupportedMedia
from ...pictures.likelihoods import map_png, numbers, read_scored
from ...pictures.pictures import Occluded
from ...pictures.uploads import outside
from ..admission import TIMEOUT_PARAMETER, AdmittingRoute
from ..likelihood_schemas import Likelihoods
from ..openapi import BODY, DRAWING, PNG, error_responses, ok_response, png_headers
from ..requests.image_request import PictureRequest
from ..requests.request_schemas import LIKELIHOOD, LikelihoodForm
from ..requests.responses import as_json, while_connected
from ..requests.uploads import decoded, facts_of, only
from ..service import Service

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=AdmittingRoute)

SOON_NUMBERS = 2**15  # log-probabilities of all classes; with up to so many, an answer takes a few milliseconds

_FORM = {"examples": LIKELIHOOD, "encoding": {"image[]": {"explode": True}}}
_OK = ok_response("the likelihood; with Accept: image/png, its map as a picture", content=PNG)
_OK[200]["headers"] = png_headers(Likelihoods)
_RESPONSES = _OK | error_responses(
    *BODY, *DRAWING,
    InvalidRequest("keep_rows hides nothing, so there is nothing to score: hide at least one pixel, or leave out "
                   "keep_rows to score the whole picture", param="keep_rows"),
    Impossible("mnist"),
    ModelNotFound("mnist-large", ["mnist-small"]), BodyTooLarge(20_000_000, 2**24), Exhausted(),
    UnsupportedMedia("image must be a PNG, JPEG or WebP picture, got 5 bytes that begin with b'hello'", param="image"))


@router.post("/likelihoods", response_model=Likelihoods, operation_id="likelihoods", responses=_RESPONSES,
             summary="Compute how probable a picture is",
             openapi_extra={"parameters": [TIMEOUT_PARAMETER], "requestBody": {
                 "content": {"multipart/form-data": _FORM}, "description": "A picture, and which part of it is hidden. "
                 "Unknown fields are ignored and listed in the answer's warnings."}})
async def likelihoods(form: Annotated[LikelihoodForm, File()], http: Request) -> Response:
    """Say how probable the hidden part of a picture is, given the known part; if none is known, the whole picture."""
    service: Service = http.app.state.service
    ticket: Ticket = http.state.ticket
    request = PictureRequest(service, http, form)
    http.state.images = 1  # for the log
    if form.response_format == "url":
        raise InvalidRequest("response_format must be b64_json here, or absent, got 'url'", param="response_format")
    checkpoint, every, upload, mask = request.served.checkpoint, form.labels == "all", only(form), form.mask
    if every and not checkpoint.class_names:
        raise InvalidRequest(f"labels=all needs a model with classes, and {request.served.name} has none; leave it out",
                             param="labels")
    service.ledger.admit(ticket, request.served, Demand(1, scored_only=True), request.timeout_s)

    def read() -> Occluded:
        return read_scored(upload.file.read(), request.config, mask=None if mask is None else mask.file.read(),
                           keep_rows=form.keep_rows)

    occluded = await decoded(http, service.ledger, ticket, read)
    request.warnings += outside(occluded)
    scoring = scoring_of(checkpoint, occluded.canvas, occluded.known, request.label, every=every)
    await service.ledger.score(ticket, scoring)
    answer = partial(_answer, request, scoring, facts_of(occluded), every=every, drawn=form.response_format is not None)
    response = await while_connected(http, _when_scored(request, ticket, scoring, answer))
    service.ledger.release(ticket, "completed")
    return response


async def _when_scored(request: PictureRequest, ticket: Ticket, scoring: Scoring, answer: Callable[[], Response]
                       ) -> Response:
    """The answer, made in a thread if that takes more than a moment. Raises ServiceError."""
    await ticket.scored()
    if scoring.log_probs.numel() <= SOON_NUMBERS and request.frame.soon:
        return answer()
    async with ticket.in_time():
        return await asyncio.to_thread(answer)


def _answer(request: PictureRequest, scoring: Scoring, facts: dict[str, Any], *, every: bool, drawn: bool) -> Response:
    """drawn: whether the JSON has the map as a PNG too."""
    checkpoint = request.served.checkpoint
    bits, found = likelihood(scoring, request.label, checkpoint, every=every)
    source = {"model": checkpoint.name, "checkpoint": checkpoint.digest}
    alone = request.alone == "png"  # only PNG: maps have transparent parts, and exact values
    png = map_png(bits, request.config, request.frame) if drawn or alone else b""
    if alone:
        headers = {f"x-linpix-{name}": quote(value, safe="+") for name, value in source.items()}
        headers["x-linpix-precision"] = "fp32"
        headers |= {f"x-linpix-{name.replace('_', '-')}": f"{found[name]:.6g}" for name in ("bits_per_dim",
                                                                                            "log_likelihood")}
        return Response(png, media_type="image/png", headers=headers)
    return as_json(Likelihoods(created=int(time.time()), **source, warnings=request.warnings, **facts, **found,
                               map=numbers(bits, request.config), b64_json=base64.b64encode(png).decode() or None))
