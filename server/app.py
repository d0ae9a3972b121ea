"""The FastAPI application: models, the engine thread, admission, routes and middleware, as the
settings ask for.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial

from fastapi import FastAPI

import linpix
from linpix.model import ops

from .compare.backends import backends
from .compare.jobs import Comparisons
from .engine.admission import Admission
from .engine.catalogue import Catalogue
from .engine.request import Requests
from .engine.thread import EngineThread
from .errors import draining
from .metrics import Metrics
from .origins import Origins
from .settings import Settings
from .web import error_handlers, openapi
from .web.keys import Keys
from .web.middleware.bodies import Bodies
from .web.middleware.stack import Gate
from .web.routes import compare, images, inside, likelihoods, models, operations, page
from .web.service import Service

logger = logging.getLogger("linpix")


def service_of(settings: Settings, *, share: bool = False) -> Service:
    """A service with an engine in this process. share: see Catalogue. Raises before any request is
    read.
    """
    # before the wait for models: the file may be bad
    keys = Keys(settings.api_keys) if settings.api_keys else None
    if settings.faults:
        logger.warning(
            "THIS SERVICE INJECTS FAULTS, because --faults (LINPIX_FAULTS) is set: %s",
            settings.faults,
        )
    catalogue = Catalogue(settings, share=share)
    engines = catalogue.read()
    used = {(engine.decoder.kind, engine.decoder.device) for engine in engines.values()}
    kernel = "eager"
    if ("compiled", "cuda") in used:
        kernel = "cuda"
    elif ("compiled", "cpu") in used:
        kernel = ops.kernel()
    logger.info(
        "LinPix %s, kernel %s: %s",
        linpix.__version__,
        kernel,
        ", ".join(
            "{0} ({engine}, {precision}, {device}, checkpoint {checkpoint:.16})".format(
                name, **engine.decoder.facts
            )
            for name, engine in engines.items()
        ),
    )
    metrics = Metrics(backends(), kernel)
    thread = EngineThread(settings.watchdog_timeout)
    admission = Admission(
        engines, metrics, thread, max_queue=settings.max_queue, client_images=settings.client_images
    )
    requests = Requests(admission, metrics)
    return Service(
        settings,
        requests,
        Comparisons(admission, thread),
        partial(catalogue.reload, requests, admission),
        Bodies(settings, requests),
        keys,
        admission,
    )


def create_app(settings: Settings) -> FastAPI:
    """The application that serves the models of the settings. Raises before any request is read."""
    return application(service_of(settings))


def application(service: Service) -> FastAPI:
    """Routes and middleware around a service, whose engine is in this process or in replicas.

    Raises ValueError for an alias whose model is not loaded, or that is itself the name of a loaded
    model.
    """
    settings, served = service.settings, service.requests.drawer.models
    for name, model in settings.aliases.items():
        why = ""
        if name in served:
            why = f"{name} is already the name of a model"
        elif model not in served:
            why = f"{model} is not loaded"
        if why:
            raise ValueError(f"--alias {name}={model}: {why}; loaded: {', '.join(served)}")
    app = FastAPI(
        title="LinPix",
        version=linpix.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=partial(_life, service),
        # relative to the address of this document, whose path a proxy may have changed
        servers=[{"url": "."}],
        generate_unique_id_function=lambda route: route.name,
        openapi_tags=openapi.TAGS,
        license_info={"name": "MIT", "identifier": "MIT"},
        exception_handlers=error_handlers.HANDLERS,
        description=(
            "Autoregressive image generators built as linear transformers. The images routes have "
            "the shape of OpenAI's Images API."
        ),
    )
    app.state.service = service
    # with include_router each request would look for its route twice
    for drawing in (images.router, images.forms):
        app.router.routes.extend(drawing.routes)
    for routes in (likelihoods, inside, models, compare, operations):
        app.include_router(routes.router)
    if settings.metrics_port is None:
        app.include_router(operations.probes)
    app.router.routes.extend(page.routes)
    app.add_middleware(
        Gate,
        origins=Origins(settings.host, settings.allowed_hosts, settings.allowed_origins),
        bodies=service.bodies,
        keys=service.keys,
        root_path=settings.root_path,
    )
    openapi.describe(app, keys=service.keys is not None)
    return app


@contextlib.asynccontextmanager
async def _life(service: Service, app: FastAPI) -> AsyncIterator[None]:
    if service.admission is not None:
        service.admission.start()
    yield
    service.requests.draining = True
    service.requests.fail_all(draining())  # those that are still here
    if service.admission is not None:
        await service.admission.stop()
