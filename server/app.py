"""The FastAPI application: routes and middleware, as the settings ask for."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from .core import Core, release
from .origins import Hosts, Origins
from .settings import Settings
from .web import error_handlers, openapi
from .web.keys import Keys
from .web.middleware import stack
from .web.middleware.bodies import BodyBudget, BodyDrain
from .web.routes import compare, images, likelihoods, models, operations, page
from .web.service import Service


def create_app(settings: Settings) -> FastAPI:
    """The application that serves the models of the settings. Raises before any request is read."""
    keys = Keys(settings.api_keys) if settings.api_keys else None  # before the wait for models: the file may be bad
    core = Core(settings)
    return application(Service(settings, core.ledger, core.comparisons, core.reload_models, BodyDrain(), keys))


def application(service: Service) -> FastAPI:
    """Routes and middleware around a service, whose engine is in this process or in replicas.

    Raises ValueError for an alias whose model is not loaded, or that is itself the name of a loaded model.
    """
    settings, ledger = service.settings, service.ledger
    for name, model in settings.aliases.items():
        if model not in ledger.models or name in ledger.models:
            why = f"{name} is already the name of a model" if name in ledger.models else f"{model} is not loaded"
            raise ValueError(f"--alias {name}={model}: {why}; loaded: {', '.join(ledger.models)}")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        ledger.start()
        yield
        await ledger.stop()

    app = FastAPI(title="LinPix", version=release(), docs_url=None, redoc_url=None, lifespan=lifespan,
                  redirect_slashes=False, servers=[{"url": settings.root_path}] if settings.root_path else None,
                  description="Autoregressive image generators built as linear transformers. The images routes have "
                              "the shape of OpenAI's Images API.")
    app.state.service = service
    app.router.routes.extend(images.router.routes)  # with include_router each request would look for its route twice
    for routes in (likelihoods, models, compare, operations, page):
        app.include_router(routes.router)
    if settings.metrics_port is None:
        app.include_router(operations.probes)
    app.router.routes.extend(page.routes)
    error_handlers.install(app, metrics=ledger.metrics)
    stack.install(app, hosts=Hosts(settings.host, settings.allowed_hosts), origins=Origins(settings.allowed_origins),
                  bodies=BodyBudget(settings, ledger.metrics, service.body_drain), keys=service.keys,
                  root_path=settings.root_path)
    openapi.describe(app, keys=service.keys is not None)
    return app
