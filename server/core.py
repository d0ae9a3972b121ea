"""The decoding part, without HTTP: models, the engine thread, the ledger of admitted requests, and comparisons."""

import logging
from importlib.metadata import PackageNotFoundError, version

from linpix.model import ops

from .compare.backends import BACKENDS
from .compare.jobs import LocalComparisons
from .engine.catalogue import Catalogue
from .engine.decode.faults import Faults
from .engine.ledger.local_ledger import LocalLedger
from .engine.thread import EngineThread
from .metrics import Metrics
from .settings import Settings

logger = logging.getLogger("linpix")


def release() -> str:
    try:
        return version("linpix")
    except PackageNotFoundError:
        return "unknown"


class Core:
    """Engine thread and ledger of one process. The plain server has one Core, and so has each replica."""

    def __init__(self, settings: Settings, *, share: bool = False) -> None:
        """Read the models that the settings name. Raises CheckpointError or ValueError with the cure.

        share: whether other processes of this machine serve the same models.
        """
        faults = Faults(settings.faults) if settings.faults else None
        if faults is not None:
            logger.warning("THIS SERVICE INJECTS FAULTS, because --faults (LINPIX_FAULTS) is set: %s", settings.faults)
        self._catalogue = Catalogue(settings, faults, share=share)
        batchers = self._catalogue.read()
        engines = {(batcher.decoder.name, batcher.decoder.device) for batcher in batchers.values()}
        self.kernel = ("cuda" if ("compiled", "cuda") in engines else
                       ops.kernel() if ("compiled", "cpu") in engines else "eager")
        logger.info("LinPix %s, kernel %s: %s", release(), self.kernel, ", ".join(
            "{0} ({engine}, {precision}, {device}, checkpoint {checkpoint:.16})".format(name, **batcher.decoder.facts)
            for name, batcher in batchers.items()))
        metrics = Metrics([(batcher.name, batcher.backend) for batcher in batchers.values()], BACKENDS, release(),
                          self.kernel)
        self.thread = EngineThread(settings.watchdog_timeout)
        self.ledger = LocalLedger(batchers, metrics, self.thread, max_queue=settings.max_queue,
                                  request_timeout_s=settings.request_timeout, client_images=settings.client_images)
        self.comparisons = LocalComparisons(self.ledger, self.thread)

    async def reload_models(self) -> None:
        """Serve the models that the settings name now."""
        await self._catalogue.reload(self.ledger)
