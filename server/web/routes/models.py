"""GET /v1/models: the loaded models."""

from typing import Any

from fastapi import APIRouter

from ...engine.request import ServedModel
from ...errors import model_not_found
from ...pictures import encode
from ..openapi import LEAVING, error_responses, ok_response
from ..schemas import Board, ModelCard, ModelList, Name
from ..service import ServiceDep

router = APIRouter(tags=["models"])


def card_of(served: ServedModel, aliases: dict[str, str]) -> ModelCard:
    """aliases: the model that each alias (--alias) stands for."""
    source, config = served.checkpoint, served.config
    facts: dict[str, Any] = served.facts
    return ModelCard(
        id=served.name,
        created=int(source.provenance.get("created", 0)),
        bits_per_dim=source.provenance.get("bits_per_dim") or {},
        **facts,
        kernels=served.kernels,
        attention=config.attention,
        width=config.width,
        height=config.height,
        channels=config.channels,
        palette=["#" + bytes(colour).hex() for colour in config.palette],
        conditional=bool(config.patch),
        classes=list(source.class_names),
        sizes=encode.sizes(config),
        temperature=source.temperature,
        temperature_range=list(source.temperature_range),
        attempts=source.attempts,
        limits=source.limits,
        class_agreement=source.class_agreement,
        board=Board(**source.board),
        aliases=[alias for alias, name in aliases.items() if name == served.name],
        state_bytes=source.net.attention.state_bytes,
        slots=served.slots,
    )


@router.get(
    "/v1/models",
    summary="List the models",
    responses=ok_response("the loaded models", links={"describe_model": {"model": "data/0/id"}})
    | error_responses(*LEAVING),
)
async def list_models(service: ServiceDep) -> ModelList:
    """The loaded models, the default one first."""
    service.requests.check_open()
    return ModelList(
        data=[
            card_of(served, service.settings.aliases)
            for served in service.requests.drawer.models.values()
        ]
    )


@router.get(
    "/v1/models/{model}",
    summary="Describe a model",
    responses=ok_response("the model")
    | error_responses(model_not_found("mnist-large", ["mnist-small"]), *LEAVING),
)
async def describe_model(model: Name, service: ServiceDep) -> ModelCard:
    """One loaded model."""
    service.requests.check_open()
    return card_of(service.find(model), service.settings.aliases)
