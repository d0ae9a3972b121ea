"""The memory of images in flight as tensors that begin with the slots; every step changes all of a
slot's part.
"""

import torch
from torch import Tensor


class Pools:
    """What a decoder needs from a State: see SlotPool and State."""

    def __init__(self, *pools: Tensor) -> None:
        self._pools = pools
        self._kept: list[Tensor] = []
        self._place: dict[int, int] = {}  # slot -> its index in _kept

    def clear(self, slot: int) -> None:
        for pool in self._pools:
            # NumPy, not torch: see server/engine/decode/decoder.py
            (pool.numpy() if pool.is_cpu else pool)[slot] = 0

    def fill_with_nan(self, slot: int) -> None:
        for pool in self._pools:
            pool[slot] = torch.nan

    def keep(self, slots: Tensor) -> None:
        if not self._kept:  # pages that are never written take no memory
            self._kept = [torch.empty_like(pool) for pool in self._pools]
        self._place = {slot: index for index, slot in enumerate(slots.tolist())}
        for pool, kept in zip(self._pools, self._kept, strict=True):
            torch.index_select(pool, 0, slots, out=kept[: len(slots)])

    def restore(self, slots: Tensor) -> None:
        places = torch.tensor([self._place[slot] for slot in slots.tolist()])
        for pool, kept in zip(self._pools, self._kept, strict=True):
            pool[slots] = kept[places]

    def copy(self, source: int, targets: list[int]) -> None:
        for pool in self._pools:
            # torch refuses to read from the tensor that it writes to
            pool[targets] = pool[source].clone()
