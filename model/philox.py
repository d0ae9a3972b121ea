"""The random generator Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), in NumPy.

It is counter-based: the numbers of image `seed` at position t are a pure function of (seed, t,
stream). They do not depend on other images, on the batch or on earlier draws.
"""

import numpy as np
from numpy.typing import NDArray

MAX_SEED = 2**53 - 1  # the largest integer that JSON readers agree on

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds. counter: (..., 4), key: (..., 2), words below 2^32; returns (..., 4) such
    words.
    """
    c0, c1, c2, c3 = np.moveaxis(counter, -1, 0)
    k0, k1 = np.moveaxis(key, -1, 0)
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ k0,
            right & _LOW,
            (left >> _HALF) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], -1)


def uniforms(
    seeds: NDArray[np.int64], t: NDArray[np.int64], stream: int = 0
) -> NDArray[np.float32]:
    """Four uniforms in (0, 1) for each pair of seed and position (broadcast together): (..., 4)
    float32.

    u = ((word >> 9) + 0.5) * 2^-23, so u and 1 - u are both exact in float32.
    """
    seeds, t = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(t, np.uint64))
    zero = np.zeros_like(t)
    counter = np.stack([t, zero, zero + np.uint64(stream), zero], -1)
    words = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _HALF], -1))
    return ((words >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
