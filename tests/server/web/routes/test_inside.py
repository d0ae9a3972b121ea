"""What a model does with a picture, over HTTP: the same as from Python."""

import dataclasses
import io

import numpy as np
import pytest

import linpix
from linpix.model.config import PRESETS
from tests.nets import CONDITIONAL, perturbed_net, saved
from tests.server.web.routes.test_images import PICTURE, assert_refused, encode, images_of, occluded
from tools.harness.servers import serving

PATH = "/v1/images/inside"
NPY = {"accept": "application/x-npy"}


def ask(client, image=None, headers=None, **fields):
    files = {"image": ("picture.png", encode(PICTURE) if image is None else image)}
    return client.post(PATH, files=files, data=fields, headers=headers)


def drawn_by(client, **fields):
    answer = client.post(PATH, files={name: (None, str(value)) for name, value in fields.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


def array_of(answer):
    assert answer.status_code == 200, answer.text
    return np.load(io.BytesIO(answer.content))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny = PRESETS["tiny"]
    for name, config in {
        "conditional": CONDITIONAL,
        "softmax": dataclasses.replace(tiny, attention="softmax"),
    }.items():
        saved(folder / name, perturbed_net(config))
    return folder


@pytest.fixture(scope="module")
def several(models):
    with serving(models) as process, process.client() as client:
        yield client


def test_the_answer_is_what_python_sees(client, tiny):
    seen = linpix.inside(str(tiny), PICTURE, label=4)
    asked = {"label": 4, "token": 20, "layer": 0, "head": 1}
    answer = ask(client, **asked).json()
    assert (answer["label"], answer["layer"], answer["head"], answer["token"]) == ("4", 0, 1, 20)
    assert answer["tokens"] == [{"kind": "drawn", "at": t} for t in range(64)]
    assert answer["picture"] == PICTURE[..., None].tolist()
    np.testing.assert_allclose(answer["attention"], seen.attention(0, 1)[20], atol=1e-5)
    np.testing.assert_allclose(answer["distribution"], seen.distributions[20:21], atol=1e-5)
    np.testing.assert_allclose(np.ravel(answer["bits"]), seen.bits, atol=1e-3)
    S, z = seen.states(0, 1)
    state = np.concatenate([S, z[..., None]], -1)
    np.testing.assert_allclose(answer["state"], state[20], atol=1e-4)
    whole = array_of(ask(client, headers=NPY, **asked))
    assert whole.dtype == np.float16
    np.testing.assert_allclose(whole, state, rtol=1e-3, atol=1e-3)
    attention = array_of(ask(client, headers=NPY, array="attention", **asked))
    np.testing.assert_allclose(attention, seen.attention(0, 1), atol=1e-3)


def test_an_image_is_drawn_again_by_its_seed(client, tiny):
    drawn = linpix.sample(str(tiny), seed=5, label=3)[0]
    answer = drawn_by(client, seed=5, label=3)
    assert answer["picture"] == np.asarray(drawn)[..., None].tolist()
    sent = ask(client, encode(np.asarray(drawn)), label=3).json()
    assert sent.pop("created") and answer.pop("created") and answer == sent


def test_a_conditional_model_reads_known_squares_first(several):
    answer = ask(several, occluded(4), model="conditional", token=1).json()
    kinds = [token["kind"] for token in answer["tokens"]]
    assert kinds[:3] == ["patch", "patch", "query"] and set(kinds[3:]) == {"drawn"}
    assert answer["attention"] is answer["state"] is answer["distribution"] is None  # it is known
    assert answer["label"] is not None
    last = ask(several, occluded(4), model="conditional").json()
    assert sum(last["attention"]) == pytest.approx(1, abs=1e-4)
    drawn = drawn_by(several, model="conditional", seed=5)
    image = several.post("/v1/images/generations", json={"model": "conditional", "seed": 5})
    assert np.array_equal(np.array(drawn["picture"])[..., 0], images_of(image)[0])
    assert drawn["label"] in set("0123456789")


def test_softmax_has_weights_and_no_state(several):
    answer = ask(several, model="softmax").json()
    assert answer["state"] is None and sum(answer["attention"]) == pytest.approx(1, abs=1e-5)
    assert_refused(ask(several, model="softmax", headers=NPY), "array", "no state of S and z")
    assert array_of(ask(several, model="softmax", headers=NPY, array="attention")).shape == (64, 64)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"layer": 9}, "layer", "layer must be 0..1, got 9"),
        ({"head": 2}, "head", "head must be 0..1, got 2"),
        ({"token": 64}, "token", "token must be 0..63, got 64"),
    ],
)
def test_what_is_not_there_is_refused(client, fields, param, words):
    assert_refused(ask(client, **fields), param, words)
