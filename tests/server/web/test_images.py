"""Answers as they are asked for: formats, sizes, data URLs, prompts, and other names for a
model.
"""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from linpix.server.app import create_app
from linpix.server.settings import Settings
from tests.linpix.test_main import succeeds
from tests.server.web.routes.test_images import (
    assert_refused,
    edit,
    events_of,
    generate,
    message_of,
    occluded,
)
from tools.harness.servers import here


@pytest.fixture(scope="module")
def server(tiny):
    with here(tiny.parent, alias="gpt-image-1=tiny, dall-e-3=tiny") as server:
        yield server


def opened(data: bytes) -> tuple[str, np.ndarray]:
    """Format and grey values."""
    picture = Image.open(io.BytesIO(data))
    return str(picture.format), np.asarray(picture.convert("L"))


def picture_of(answer) -> tuple[str, np.ndarray]:
    assert answer.status_code == 200, answer.text
    return opened(base64.b64decode(answer.json()["data"][0]["b64_json"]))


@pytest.mark.parametrize(("asked", "kind"), [("png", "PNG"), ("webp", "WEBP"), ("jpeg", "JPEG")])
def test_a_picture_comes_in_the_format_asked_for(client, asked, kind):
    body = {"seed": 5, "size": "256x256"}
    _, exact = picture_of(generate(client, **body))
    answer = generate(client, **body, output_format=asked)
    found, pixels = picture_of(answer)
    assert (found, answer.json()["output_format"], answer.json()["warnings"]) == (kind, asked, [])
    assert np.abs(pixels.astype(int) - exact).max() <= (40 if asked == "jpeg" else 0)
    alone = generate(client, headers={"accept": f"image/{asked}"}, **body)
    assert (alone.headers["content-type"], alone.headers["x-linpix-seed"]) == (
        f"image/{asked}",
        "5",
    )
    assert np.array_equal(opened(alone.content)[1], pixels)
    events = events_of(
        generate(client, **body, output_format=asked, stream=True, partial_images=1).text
    )
    assert [opened(base64.b64decode(event["b64_json"]))[0] for event in events] == [kind, kind]


def test_a_gif_is_the_drawing_that_sample_writes(client, tiny, tmp_path):
    drawing = generate(client, headers={"accept": "image/gif"}, seed=5)
    assert drawing.headers["content-type"] == "image/gif", drawing.text
    assert drawing.headers["x-linpix-seed"] == "5"
    succeeds(f"sample --model {tiny} --seed 5 --out", f"{tmp_path}/drawn.gif")
    assert drawing.content == (tmp_path / "drawn.gif").read_bytes()
    (tmp_path / "picture.png").write_bytes(occluded(3))
    files = {"image": ("picture.png", occluded(3))}
    completing = client.post(
        "/v1/images/edits", files=files, data={"seed": 5}, headers={"accept": "image/gif"}
    )
    succeeds(
        f"complete {tmp_path}/picture.png --model {tiny} --seed 5 --out",
        f"{tmp_path}/completed.gif",
    )
    assert completing.content == (tmp_path / "completed.gif").read_bytes()
    assert Image.open(io.BytesIO(completing.content)).n_frames == 6


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"n": 2}, "n", "needs n=1"),
        ({"stream": True}, "n", "no stream"),
        ({"size": "16x16"}, "size", "leave out size"),
        ({"output_format": "png"}, "output_format", "send one of them"),
        ({"lay_back": True}, "lay_back", "send one of them"),
    ],
)
def test_what_does_not_go_with_a_gif_is_refused(client, fields, param, told):
    answer = client.post(
        "/v1/images/edits",
        files={"image": ("picture.png", occluded())},
        data=fields,
        headers={"accept": "image/gif"},
    )
    assert_refused(answer, param, told)


@pytest.mark.parametrize("size", ["native", "24x24", "256x256", "192x108"])
def test_an_array_has_the_pixels_and_seeds_of_the_pictures(client, size):
    body = {"n": 3, "seed": 5, "size": size, "prompt": "7 cats"}
    data = generate(client, **body).json()["data"]
    answer = generate(client, headers={"accept": "application/x-npy"}, **body)
    assert answer.headers["content-type"] == "application/x-npy", answer.text
    array = np.load(io.BytesIO(answer.content), allow_pickle=False)
    assert array.dtype == np.uint8 and array.ndim == 3
    assert np.array_equal(array, [opened(base64.b64decode(item["b64_json"]))[1] for item in data])
    assert answer.headers["x-linpix-seed"] == "5,6,7"
    assert (
        answer.headers["x-linpix-model"] == "tiny" and "cats" in answer.headers["x-linpix-warnings"]
    )


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"stream": True}, "stream", "without stream"),
        ({"output_format": "png"}, "output_format", "send one of them"),
        ({"size": "1:1"}, "size", "2048x2048"),
        ({"lay_back": True}, "lay_back", "send one of them"),
    ],
)
def test_what_does_not_go_with_an_array_is_refused(client, fields, param, told):
    answer = client.post(
        "/v1/images/edits",
        files={"image": ("picture.png", occluded())},
        data=fields,
        headers={"accept": "application/x-npy"},
    )
    assert_refused(answer, param, told)


def test_an_array_has_a_largest_size(tiny):
    with here(tiny.parent, max_n=200) as process, process.client() as client:
        for body in ({"n": 129}, {"n": 100, "size": "1024x1024"}):
            answer = generate(client, headers={"accept": "application/x-npy"}, **body)
            assert_refused(answer, "n")


def test_an_edit_has_its_format_too(client):
    for fields in ({}, {"lay_back": True}):
        found, pixels = picture_of(edit(client, seed=3, output_format="webp", **fields))
        assert found == "WEBP" and np.array_equal(
            pixels, picture_of(edit(client, seed=3, **fields))[1]
        )
    assert_refused(edit(client, output_format="tiff"), "output_format")


def test_accept_and_output_format_that_contradict_each_other_are_refused(client):
    answer = generate(client, headers={"accept": "image/webp"}, output_format="jpeg")
    assert_refused(answer, "output_format")


def test_a_url_has_the_picture_in_itself(client):
    [item] = generate(client, seed=5, response_format="url", output_format="webp").json()["data"]
    head, text = item["url"].split(",")
    assert head == "data:image/webp;base64" and "b64_json" not in item and item["seed"] == 5
    assert np.array_equal(
        opened(base64.b64decode(text))[1], picture_of(generate(client, seed=5))[1]
    )
    events = events_of(
        generate(client, seed=5, response_format="url", stream=True, partial_images=0).text
    )
    assert "b64_json" in events[-1] and "events of a stream" in events[-1]["warnings"][0]


def test_tools_made_for_dall_e_get_a_url_where_they_ask_for_none(client):
    for model, there in (("dall-e-3", "url"), ("gpt-image-1", "b64_json"), ("tiny", "b64_json")):
        for answer in (
            generate(client, model=model, size="1792x1024", style="vivid", quality="hd"),
            edit(client, model=model),
        ):
            [item] = answer.json()["data"]
            assert {"url", "b64_json"} & item.keys() == {there}
    [item] = generate(client, model="dall-e-3", response_format="b64_json").json()["data"]
    assert "b64_json" in item
    events = events_of(generate(client, model="dall-e-3", stream=True).text)
    assert "b64_json" in events[-1] and events[-1]["warnings"] == []


@pytest.mark.parametrize(("ask", "kind"), [(generate, "image_generation"), (edit, "image_edit")])
def test_events_have_every_field_of_openais(client, ask, kind):
    partial, completed = events_of(
        ask(client, stream=True, partial_images=1, size="1536x1024").text
    )
    assert (partial["type"], completed["type"]) == (f"{kind}.partial_image", f"{kind}.completed")
    for event in (partial, completed):
        assert event["created_at"] == event["created"] > 1_700_000_000
        assert (event["size"], event["quality"], event["background"]) == (
            "1536x1024",
            "auto",
            "opaque",
        )


def test_words_of_a_prompt_choose_the_class_and_the_answer_says_so(client):
    plain = picture_of(generate(client, seed=5, label=7))[1]
    answer = generate(client, seed=5, prompt="Seven, in green")
    assert np.array_equal(picture_of(answer)[1], plain)
    assert answer.json()["data"][0]["revised_prompt"] == "7"
    assert answer.json()["warnings"] == ["prompt: these words have no effect: in, green"]
    unknown = generate(client, seed=5, prompt="a cat", quality="high")
    assert unknown.json()["data"][0]["revised_prompt"] == "an image of any class"
    assert np.array_equal(picture_of(unknown)[1], picture_of(generate(client, seed=5))[1])
    assert "quality" in unknown.json()["warnings"][1]
    assert "revised_prompt" not in generate(client, label=7).json()["data"][0]
    assert_refused(generate(client, label=3, prompt="a seven"), "label")
    alone = generate(client, headers={"accept": "image/png"}, prompt="a cat")
    assert "prompt was ignored" in alone.headers["x-linpix-warnings"]


def test_a_model_can_be_asked_for_by_other_names(client):
    for name in ("gpt-image-1", "dall-e-3"):
        assert generate(client, model=name).json()["model"] == "tiny"
    assert client.get("/v1/models/gpt-image-1").json()["id"] == "tiny"
    assert client.get("/v1/models").json()["data"][0]["aliases"] == ["gpt-image-1", "dall-e-3"]
    assert generate(client, model="gpt-image-2").status_code == 404


@pytest.mark.parametrize(
    ("alias", "words"),
    [("a=big", "big is not loaded; loaded: tiny"), ("tiny=tiny", "the name of a model")],
)
def test_an_alias_of_nothing_stops_the_start(tiny, alias, words):
    with pytest.raises(ValueError, match=words):
        create_app(Settings(checkpoints=tiny.parent, alias=alias))


def test_a_card_says_how_a_model_is_drawn_from(client):
    card = client.get("/v1/models/tiny").json()
    assert (card["temperature"], card["temperature_range"]) == (1.0, [0.5, 1.2])
    assert card["limits"] is None and card["class_agreement"] is None


@pytest.mark.parametrize(
    ("begins", "words"),
    [
        (
            b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
            "HEIC, as iPhones save photographs; export it as JPEG",
        ),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf", "AVIF; save it as"),
        (b"GIF89a", "a GIF"),
        (b"BM", "a BMP"),
        (b"II*\0", "a TIFF"),
        (b"%PDF-1.7", "a PDF"),
        (b"<svg xmlns=", "an SVG"),
        (b"\0\0\0\x18ftypisom\0\0\0\0mp42", "a video"),
        (b"hello", "45 bytes that begin with b'hello"),
    ],
)
def test_a_file_that_is_not_taken_is_named_with_the_cure(client, begins, words):
    assert_refused(edit(client, begins + bytes(40), keep_rows=4), "image", words, 415)


@pytest.mark.parametrize("name", ["image", "image[]", "mask"])
@pytest.mark.parametrize("text", ["seven.png", "iVBORw0KGgo" * 1000])
def test_text_in_place_of_a_file_is_explained_in_plain_words(client, name, text):
    answer = client.post("/v1/images/edits", files={"x": ("m.png", occluded())}, data={name: text})
    assert_refused(
        answer, name, f"{name} must be a file, so its part needs a filename; with curl, -F {name}=@"
    )
    assert "base64" in message_of(answer)


@pytest.mark.parametrize(
    "name", ["model", "prompt", "size", "label", "response_format", "output_format", "seed", "n"]
)
def test_an_empty_text_is_an_absent_field_in_json_as_in_forms(client, name):
    assert generate(client, **{name: ""}).status_code == 200
    assert edit(client, occluded(), **{name: ""}).status_code == 200
