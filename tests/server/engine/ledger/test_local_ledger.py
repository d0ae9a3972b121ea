"""Admission by the ledger, without an engine thread: no image is decoded."""

import pytest

from linpix.model import checkpoint
from linpix.server.engine.batch import Batcher
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.ledger.local_ledger import LocalLedger
from linpix.server.engine.ledger.ticket import Demand
from linpix.server.engine.thread import EngineThread
from linpix.server.errors import ClientLimit
from linpix.server.metrics import Metrics


def test_a_client_with_too_many_images_is_refused_when_its_upload_holds_room_for_one_and_needs_more(tiny):
    batcher = Batcher(new_decoder(checkpoint.read(tiny), 4, "eager"))
    metrics = Metrics([(batcher.name, batcher.backend)], [batcher.backend], version="0", kernel="eager")
    ledger = LocalLedger({batcher.name: batcher}, metrics, EngineThread(), max_queue=8, client_images=6)
    served = ledger.models[batcher.name]
    with ledger.holding("first", "edits", "somebody") as first, ledger.holding("upload", "edits", "somebody") as upload:
        ledger.admit(first, served, Demand(4))
        ledger.reserve(upload, draws=True)
        with pytest.raises(ClientLimit):
            ledger.admit(upload, served, Demand(4))
    assert served.idle
