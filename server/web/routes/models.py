"""GET /v1/models: what is loaded."""

from fastapi import APIRouter

from ...engine.served import ServedModel
from ...errors import ModelNotFound
from ...pictures import pictures
from .. import fields
from ..openapi import error_responses, ok_response
from ..schemas import ModelCard, ModelList
from ..service import ServiceDep

router = APIRouter(tags=["models"])



def card_of(served: ServedModel) -> ModelCard:
    engine, config, facts = served.decoder, served.decoder.config, served.decoder.facts
    return ModelCard(
        id=served.name, created=int(engine.checkpoint.provenance.get("created", 0)), checkpoint=facts["checkpoint"],
        bits_per_dim=engine.checkpoint.provenance.get("bits_per_dim") or {}, engine=facts["engine"],
        precision=facts["precision"], device=facts["device"], state=facts["state"], attention=config.attention,
        width=config.width, height=config.height, channels=config.channels, conditional=bool(config.patch),
        classes=list(engine.checkpoint.class_names), sizes=pictures.sizes(config),
        state_bytes=engine.checkpoint.net.attention.state_bytes, slots=engine.slots)


@router.get("/v1/models",
            responses=ok_response("all that is", links={"model": {"model": "data/0/id"}}))
async def models(service: ServiceDep) -> ModelList:
    """What is loaded, the default model first."""
    return ModelList(data=[card_of(served) for served in service.ledger.models.values()])


@router.get("/v1/models/{model}", operation_id="model",
            responses=ok_response("what it is", links={"generate": {"model": "id"}})
            | error_responses(ModelNotFound("mnist-large", ["mnist-small"])))
async def model(model: fields.Name, service: ServiceDep) -> ModelCard:
    """One loaded model."""
    return card_of(service.find(model))
