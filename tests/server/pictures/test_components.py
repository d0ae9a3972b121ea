"""Connected components of a mask."""

import numpy as np
import pytest

from linpix.server.pictures.components import components


@pytest.mark.parametrize("seed", range(5))
def test_components_are_those_of_a_flood(seed):
    mask = np.random.default_rng(seed).random((30, 40)) < 0.4
    labels, seen = components(mask), np.zeros_like(mask)
    for start in zip(*np.nonzero(mask), strict=True):
        if seen[start]:
            continue
        flood, found = [start], []
        while flood:
            y, x = flood.pop()
            if 0 <= y < 30 and 0 <= x < 40 and mask[y, x] and not seen[y, x]:
                seen[y, x] = True
                found.append(labels[y, x])
                flood += [(y + down, x + across) for down in (-1, 0, 1) for across in (-1, 0, 1)]
        assert len(set(found)) == 1 and (labels == found[0]).sum() == len(found)
    assert not labels[~mask].any()
