"""Connected components of a mask, and what counts as torn."""

import numpy as np
import pytest

from linpix.model.pieces import WHOLE, components, torn, whole


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


def drawing(*rows: str) -> np.ndarray:
    """Ink is 200 where there is a letter, on 0."""
    return np.array([[200 if one.isalpha() else 0 for one in row] for row in rows], np.uint8)


@pytest.mark.parametrize("ground", [0, 255])
def test_a_picture_whose_visible_ink_is_in_several_pieces_is_torn(ground):
    whole_one, corner, two, faint = (
        drawing("aa..", "a...", "...."),
        drawing("aa..", "..a.", "...."),
        drawing("aa.b", "a..b", "...."),
        drawing("aa..", "a...", "...."),
    )
    faint[2, 3] = 31
    pictures = np.stack([whole_one, corner, two, faint, two * 0, two, whole_one])
    found = torn(np.abs(pictures.astype(np.int16) - ground).astype(np.uint8), ground)
    assert found.tolist() == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("drawn", "known", "several"),
    [
        (("a..b", "a..b", "a..b"), ("kkkk", "....", "...."), True),  # they could have met below
        (("a..b", "a..b", "abbb"), ("kkkk", "....", "...."), False),
        (("a..b", "a..b", "a..b"), ("kkkk", "kkkk", "kkkk"), False),  # nothing was drawn
        # two columns were drawn, and nothing known is ink
        (("a..b", "a..b", "a..b"), (".kk.", ".kk.", ".kk."), True),
        # a and c could have met below; b is a third piece
        (("a.c.", "a...", "a..b"), ("kkkk", "kkkk", "...."), True),
        (("a..b", "a..b", "a..b"), ("kkkk", "kkkk", "k..k"), True),  # through two hidden pixels
        # known ground is all around b, but c could join a
        (("a..b", "a...", "a..c"), ("kkkk", "kkkk", "...k"), True),
        (("a..b", "a...", "addc"), ("kkkk", "kkkk", "...k"), False),
        (("a..b", "....", "d..c"), ("kkkk", "kkkk", "...k"), True),
    ],
)
def test_a_completion_is_torn_only_if_it_could_be_in_fewer_pieces(drawn, known, several):
    both = np.stack([drawing(*known), drawing("kkkk", "kkkk", "kkkk")]) > 0
    found = torn(np.stack([drawing(*drawn)] * 2), 0, both)
    assert found.tolist() == [several, False]  # nothing of the other was drawn


def test_only_pictures_that_are_hardly_ever_in_several_pieces_can_be_torn():
    assert whole({"pieces": WHOLE}, 1) and not whole({"pieces": 0.2}, 1) and not whole(None, None)
    assert [whole({"pieces": WHOLE, "divided": [1, 2]}, label) for label in (0, 1, 2, None)] == [
        1,
        0,
        0,
        1,
    ]
