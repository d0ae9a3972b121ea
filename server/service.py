"""What the routes share: the settings, the worker, and which model is the default."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.batcher import Batcher
from server.catalogue import Catalogue
from server.comparisons import Comparisons
from server.errors import ModelNotFound
from server.guard import Intake
from server.keys import Keys
from server.settings import Settings
from server.worker import Worker


@dataclass(frozen=True, slots=True)
class Service:
    settings: Settings
    worker: Worker
    comparisons: Comparisons
    catalogue: Catalogue
    intake: Intake
    keys: Keys | None = None  # no key is asked for

    def reload_keys(self) -> bool:
        """Read the file of API keys again; whether that was possible. Where it was not, the old keys stay."""
        return self.keys is None or self.keys.reload()

    @property
    def default(self) -> str:
        """The first model loaded."""
        return next(iter(self.worker.batchers))

    def find(self, model: str | None) -> tuple[str, Batcher]:
        """A loaded model by its name, or the default one. Raises ModelNotFound."""
        name = self.default if model is None else model
        if name not in self.worker.batchers:
            raise ModelNotFound(name, self.worker.batchers)
        return name, self.worker.batchers[name]

    def most(self, *batchers: Batcher, bulk: bool = False) -> int:
        """Images that one request may ask for, of whichever of these models."""
        return min(self.settings.max_n, self.settings.client_images or self.settings.max_n,
                   *(batcher.most(bulk) for batcher in batchers))


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def _service(request: Request) -> Service:
    """Not a plain function: FastAPI would have each request wait for a thread to call it."""
    return service_of(request)


ServiceDep = Annotated[Service, Depends(_service)]
