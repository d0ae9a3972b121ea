"""The choice of a model's decoder, among those that can run it on this machine."""

import logging

import torch

from linpix.model.checkpoint import Checkpoint
from linpix.model.choice import choose, gpu_obstacle
from linpix.model.cuda import GpuPool, StatePrecision, check_state

from .compiled import CompiledDecoder, CudaDecoder
from .decoder import Decoder, EagerDecoder

logger = logging.getLogger(__name__)


def new_decoder(
    checkpoint: Checkpoint,
    slots: int,
    engine: str = "auto",
    precision: str = "auto",
    *,
    device: str = "auto",
    state: StatePrecision = "fp32",
    share: bool = False,
) -> Decoder:
    """The decoder with this engine, precision and device; for auto, the best one for this model.
    Raises ValueError.

    share: whether other processes on this machine decode with the same weights.
    """
    check_state(state)
    chosen = choose(checkpoint.net.config, engine, precision, device)
    if chosen.warning:
        logger.warning("%s: %s", checkpoint.name, chosen.warning)
    if chosen.device == "cuda":
        try:
            pool = GpuPool(checkpoint.net, slots, precision=chosen.precision, state=state)
            pool.record(slots)
        except torch.OutOfMemoryError as error:
            free, whole = (size / 2**30 for size in torch.cuda.mem_get_info())
            raise ValueError(
                f"the GPU has too little memory for {slots} slots of {checkpoint.name}: {free:.1f}"
                f" GiB of {whole:.1f} GiB are free; lower --slots"
            ) from error
        return CudaDecoder(checkpoint, slots, pool, precision=chosen.precision)
    if state != "fp32":
        obstacle = gpu_obstacle(checkpoint.net.config, precision)
        why = f": {obstacle}" if obstacle else ""
        raise ValueError(
            "--state fp16 is for decoding on a GPU, but this model decodes on a CPU"
            f"{why}; leave the flag out"
        )
    if chosen.engine == "eager":
        return EagerDecoder(checkpoint, slots)
    return CompiledDecoder(checkpoint, slots, precision=chosen.precision, share=share)
