"""A colour model that draws pixels and uses every known one, over HTTP: any hole, any picture."""

from dataclasses import replace

import numpy as np
import pytest

from linpix.model.config import PRESETS
from tests.nets import perturbed_net, saved
from tests.server.web.routes.test_images import edit, encode, images_of
from tools.harness.servers import here

RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.integers(0, 256, (8, 8, 3), dtype=np.uint8)
HOLES = {
    "everything": np.s_[:],
    "one pixel": np.s_[3, 5],
    "the first": np.s_[0, 0],
    "the last": np.s_[7, 7],
    "the upper border": np.s_[0],
    "the right border": np.s_[:, 7],
    "all but one": np.s_[1:],
    "a frame": np.s_[::7],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = replace(
        PRESETS["tiny"],
        channels=3,
        tokens="pixel",
        look_ups=("previous", "row", "column", "class"),
        patch=4,
        neighbours=((0, -1, 0), (-1, 0, 1), (-1, 1, 2)),
        following=((0, 1, 0), (1, 0, 1)),
    )
    folder = tmp_path_factory.mktemp("colours")
    saved(folder / "colours", perturbed_net(config))
    with here(folder) as process:
        yield process


def holed(hole, picture: np.ndarray = PICTURE) -> tuple[bytes, np.ndarray]:
    """The picture, transparent where it has a hole, and what is known of it, (8, 8)."""
    alpha = np.full(picture.shape[:2], 255, np.uint8)
    alpha[hole] = 0
    return encode(np.dstack([picture, alpha])), alpha > 0


@pytest.mark.parametrize("name", HOLES)
def test_any_hole_is_filled_and_what_is_known_stays(client, name):
    image, known = holed(HOLES[name])
    answer = edit(client, image, n=3, seed=7)
    told, found = answer.json(), images_of(answer)
    late = known.reshape(-1)[np.argmin(known) :].any()
    assert (told["known"], told["conditioning"]) == (3 * known.sum(), "full" if late else "prefix")
    assert all(np.array_equal(one[known], PICTURE[known]) for one in found)
    assert len({one.tobytes() for one in found}) > 1
    repainted = PICTURE.copy()
    repainted[~known] = 255 - PICTURE[~known]
    assert (
        edit(client, holed(HOLES[name], repainted)[0], n=3, seed=7).json()["data"] == told["data"]
    )


def test_a_portrait_and_a_panorama(client):
    long = RANDOM.integers(0, 256, (16, 64, 3), dtype=np.uint8)
    for turned in (False, True):
        shape = long.transpose(1, 0, 2) if turned else long
        alpha = np.full(shape.shape[:2], 255, np.uint8)
        alpha[(slice(56, 62), slice(4, 9)) if turned else (slice(4, 9), slice(56, 62))] = 0
        answer = edit(client, encode(np.dstack([shape, alpha])), seed=1, lay_back=True)
        assert answer.json()["crop"] == ([0, 48, 16, 64] if turned else [48, 0, 64, 16])
        [laid] = images_of(answer)
        assert laid.shape == shape.shape and np.array_equal(laid[alpha > 0], shape[alpha > 0])
