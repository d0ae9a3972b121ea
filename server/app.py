"""The application: settings in, routes and their middleware out."""

import contextlib
import logging
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from linpix.model import ops

from .compare.backends import BACKENDS
from .compare.jobs import Comparisons
from .engine.decode.faults import Faults
from .engine.ledger import Ledger
from .engine.models import Catalogue
from .engine.thread import EngineThread
from .metrics import Metrics
from .origins import Hosts, Origins
from .settings import Settings
from .web import error_handlers, openapi
from .web.keys import Keys
from .web.middleware import stack
from .web.middleware.bodies import BodyBudget, UploadDrain
from .web.routes import compare, images, likelihoods, models, operations, page
from .web.service import Service

logger = logging.getLogger("linpix")


def release() -> str:
    try:
        return version("linpix")
    except PackageNotFoundError:
        return "unknown"


def create_app(settings: Settings) -> FastAPI:
    """The service over the models that the settings name. Raises before anything listens."""
    faults = Faults(settings.faults) if settings.faults else None
    if faults is not None:
        logger.warning("THIS SERVICE BREAKS ON PURPOSE, as --faults (LINPIX_FAULTS) asks for: %s", settings.faults)
    keys = Keys(settings.api_keys) if settings.api_keys else None  # a file that cannot be used is told before the wait
    catalogue = Catalogue(settings, faults)
    batchers = catalogue.read()
    for name, model in settings.aliases.items():
        if model not in batchers or name in batchers:
            why = f"{name} is a model itself" if name in batchers else f"{model} is not loaded"
            raise ValueError(f"--alias {name}={model}: {why}; loaded: {', '.join(batchers)}")
    engines = {(batcher.decoder.name, batcher.decoder.device) for batcher in batchers.values()}
    kernel = "cuda" if ("compiled", "cuda") in engines else ops.kernel() if ("compiled", "cpu") in engines else "eager"
    metrics = Metrics([(batcher.name, batcher.backend) for batcher in batchers.values()], BACKENDS, release(), kernel)
    thread = EngineThread(settings.watchdog_timeout)
    ledger = Ledger(batchers, metrics, thread, max_queue=settings.max_queue,
                    request_timeout_s=settings.request_timeout, client_images=settings.client_images)
    intake = UploadDrain()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        ledger.start()
        yield
        await ledger.stop()

    app = FastAPI(title="LinPix", version=release(), docs_url=None, redoc_url=None, lifespan=lifespan,
                  description="Autoregressive image generators built as linear transformers. The images routes have "
                              "the shape of OpenAI's Images API.")
    app.state.service = Service(settings, ledger, Comparisons(ledger, thread), catalogue, intake, keys)
    app.router.routes.extend(images.router.routes)  # included, each request would look for its route twice
    for routes in (likelihoods, models, compare, operations, page):
        app.include_router(routes.router)
    if settings.metrics_port is None:
        app.include_router(operations.probes)
    app.router.routes.extend(page.routes)
    error_handlers.install(app, metrics=metrics)
    stack.install(app, hosts=Hosts(settings.host, settings.allowed_hosts), origins=Origins(settings.allowed_origins),
                  bodies=BodyBudget(settings, metrics, intake), keys=keys)
    openapi.describe(app, keys=keys is not None, compare_budget=settings.compare_budget)
    return app
