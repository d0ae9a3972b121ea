"""GET /v1/models: the loaded models."""

from fastapi import APIRouter

from ...engine.ledger import ServedModel
from ...errors import ModelNotFound
from ...pictures import encode
from .. import fields
from ..openapi import error_responses, ok_response
from ..schemas import ModelCard, ModelList
from ..service import ServiceDep

router = APIRouter(tags=["models"])


def card_of(served: ServedModel, aliases: dict[str, str]) -> ModelCard:
    """aliases: the model that each alias (--alias) stands for."""
    engine, config, facts = served.decoder, served.decoder.config, served.decoder.facts
    return ModelCard(
        id=served.name, created=int(engine.checkpoint.provenance.get("created", 0)), checkpoint=facts["checkpoint"],
        bits_per_dim=engine.checkpoint.provenance.get("bits_per_dim") or {}, engine=facts["engine"],
        precision=facts["precision"], device=facts["device"], state=facts["state"], attention=config.attention,
        width=config.width, height=config.height, channels=config.channels, conditional=bool(config.patch),
        classes=list(engine.checkpoint.class_names), sizes=encode.sizes(config),
        temperature=engine.checkpoint.temperature, temperature_range=list(engine.checkpoint.temperature_range),
        attempts=engine.checkpoint.attempts, limits=engine.checkpoint.limits,
        class_agreement=engine.checkpoint.class_agreement,
        aliases=[alias for alias, name in aliases.items() if name == served.name],
        state_bytes=engine.checkpoint.net.attention.state_bytes, slots=engine.slots)


@router.get("/v1/models", summary="List the models",
            responses=ok_response("the loaded models", links={"model": {"model": "data/0/id"}}))
async def models(service: ServiceDep) -> ModelList:
    """The loaded models, the default one first."""
    return ModelList(data=[card_of(served, service.settings.aliases) for served in service.ledger.models.values()])


@router.get("/v1/models/{model}", summary="Describe a model", operation_id="model",
            responses=ok_response("the model", links={"generate": {"model": "id"}})
            | error_responses(ModelNotFound("mnist-large", ["mnist-small"])))
async def model(model: fields.Name, service: ServiceDep) -> ModelCard:
    """One loaded model."""
    return card_of(service.find(model), service.settings.aliases)
