"""What the routes share: the settings, the requests that are served, and which model is the default."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from linpix.model.config import ModelConfig

from ..compare.jobs import Comparisons
from ..engine.request import Requests, ServedModel
from ..errors import ModelNotFound
from ..pictures.upload_slots import UploadSlots
from ..settings import Settings
from .keys import Keys
from .middleware.bodies import Bodies


@dataclass(frozen=True, slots=True)
class Service:
    settings: Settings
    requests: Requests
    comparisons: Comparisons | None  # None: replicas draw, and none of them can be measured alone
    reload_models: Callable[[], Awaitable[None]] | None  # on SIGHUP; None: this process has no models of its own
    bodies: Bodies
    keys: Keys | None = None  # None: no key is required
    upload_slots: UploadSlots = field(default_factory=UploadSlots)

    def reload_keys(self) -> bool:
        """Read the file of API keys again. Returns whether that was possible; if it was not, the old keys stay."""
        return self.keys is None or self.keys.reload()

    def find(self, model: str | None) -> ServedModel:
        """The loaded model with this name or alias (--alias); None means the default. Raises ModelNotFound."""
        name = next(iter(self.requests.models)) if model is None else model
        if name not in self.requests.models:
            name = self.settings.aliases.get(name, name)
        if name not in self.requests.models:
            raise ModelNotFound(name, self.requests.models)
        return self.requests.models[name]

    def instead_of(self, served: ServedModel, able: Callable[[ModelConfig], bool]) -> str | None:
        """A loaded model that can do what `served` cannot, with pictures of the same shape; None if there is none."""
        return next((name for name, other in self.requests.models.items()
                     if able(other.config) and other.config.image_shape == served.config.image_shape), None)

    def max_images(self, *models: ServedModel, bulk: bool = False) -> int:
        """Images that one request may ask for, for any of these models."""
        return min(self.settings.max_n, self.settings.client_images or self.settings.max_n,
                   *(served.slots + served.queue[bulk] for served in models))


async def _service(request: Request) -> Service:
    """Async, since FastAPI calls plain functions in threads: each request would wait for one."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def preferred(accept: str) -> str:
    """The media type that an Accept header weighs most; of equal ones the first."""
    best, most = "", 0.0
    for part in accept.split(","):
        media, *parameters = (text.strip().lower() for text in part.split(";"))
        try:
            weight = float(next((text[2:] for text in parameters if text.startswith("q=")), 1))
        except ValueError:
            weight = 0.0
        if weight > most:
            best, most = media, weight
    return best
