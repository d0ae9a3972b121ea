"""A small conditional model with random weights, and each engine that can draw it."""

import dataclasses

import pytest

from linpix.model import checkpoint, ops
from linpix.model.cuda import GpuPool
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.compiled import CudaDecoder
from tests.nets import CONDITIONAL, perturbed_net

STATES = {"gpu": "fp32", "gpu, fp16": "fp16"}
# as a float16 state has to have
CONFIG = dataclasses.replace(CONDITIONAL, key_dim=32, value_dim=32)


@pytest.fixture(scope="package")
def source() -> checkpoint.Checkpoint:
    return checkpoint.Checkpoint("tiny", perturbed_net(CONFIG), {}, "", tuple("0123456789"))


@pytest.fixture(
    params=[
        "compiled",
        "int8",
        *[pytest.param(kind, marks=pytest.mark.slow) for kind in ("eager", *STATES)],
    ]
)
def decoder(request, source):
    """Makes one of so many slots. int8: compiled too. gpu: emulated."""
    if request.param in ("compiled", "int8") and not ops.compiled:
        pytest.skip(ops.why())
    if request.param in STATES:
        place = request.getfixturevalue("emulated").place
        return lambda slots: CudaDecoder(
            source,
            slots,
            GpuPool(source.net, slots, precision="fp32", state=STATES[request.param], **place),
            precision="fp32",
        )
    if request.param == "int8":
        return lambda slots: new_decoder(source, slots, "compiled", "int8")
    return lambda slots: new_decoder(source, slots, request.param, "fp32")
