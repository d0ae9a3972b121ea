"""Stock OpenAI clients, unmodified: the current major version, and the last of the 1.x line."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# where `make venv` puts openai 1.x, apart from the current one
OLD_CLIENT = Path(sys.prefix) / "openai-1"

SCRIPT = """
    import base64, io, sys
    import numpy as np
    import openai
    from PIL import Image

    assert openai.__version__.split(".")[0] == sys.argv[2], openai.__version__
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)

    def pixels(b64):
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))

    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "linpix"

    answer = client.images.generate(model="tiny", prompt="3", n=2, response_format="b64_json")
    assert len(answer.data) == 2 and pixels(answer.data[0].b64_json).shape == (8, 8)
    answer = client.images.generate(model="tiny", prompt="", size="auto", extra_body={"seed": 7, "temperature": 0.5})
    assert answer.data[0].seed == 7

    def opened(url):
        return Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))

    exact = pixels(client.images.generate(model="tiny", prompt="3", size="1024x1024", extra_body={"seed": 7})
                   .data[0].b64_json)
    for kind, name, most in (("png", "PNG", 0), ("webp", "WEBP", 0), ("jpeg", "JPEG", 60)):
        answer = client.images.generate(model="tiny", prompt="please draw a three", size="1024x1024",
                                        output_format=kind,
                                        response_format="url", quality="high", extra_body={"seed": 7})
        picture = opened(answer.data[0].url)
        assert (picture.format, picture.size, answer.output_format) == (name, (1024, 1024), kind)
        assert np.abs(np.asarray(picture.convert("L")).astype(int) - exact).max() <= most
        assert answer.data[0].revised_prompt == "3" and answer.usage.total_tokens == 0
    answer = client.images.generate(model="tiny", prompt="a cat")
    assert answer.data[0].revised_prompt == "an image of any class"

    events = list(client.images.generate(model="tiny", prompt="", stream=True, partial_images=2))
    kinds = [event.type for event in events]
    assert kinds == ["image_generation.partial_image"] * 2 + ["image_generation.completed"], kinds
    assert [event.partial_image_index for event in events[:-1]] == [0, 1]
    assert pixels(events[-1].b64_json).shape == (8, 8) and events[-1].usage.total_tokens == 0

    picture = np.zeros((8, 8, 4), np.uint8)
    picture[:4] = 200
    picture[:4, :, 3] = 255
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    buffer.name = "picture.png"
    buffer.seek(0)
    answer = client.images.edit(model="tiny", image=buffer, prompt="", n=2)
    assert (pixels(answer.data[1].b64_json)[:4] == 200).all()
    assert answer.conditioning == "prefix"
    buffer.seek(0)
    events = list(client.images.edit(model="tiny", image=buffer, prompt="", stream=True))
    assert events[-1].type == "image_edit.completed", events[-1]
    assert len(events) == 5

    for call, error in ((lambda: client.images.generate(model="big", prompt=""), openai.NotFoundError),
                        (lambda: client.images.generate(model="tiny", prompt="", n=99), openai.BadRequestError)):
        try:
            call()
        except error as caught:
            assert caught.body["message"] and caught.param, caught
        else:
            raise AssertionError("no error")
    print("all good")
"""  # noqa: E501


@pytest.mark.parametrize(("major", "folder"), [("3", None), ("1", OLD_CLIENT)])
def test_a_stock_client_lists_generates_streams_edits_and_understands_errors(server, major, folder):
    environment = dict(os.environ)
    if folder is not None:
        if not folder.is_dir():
            pytest.skip(f"openai 1.x is not at {folder}; make venv installs it there")
        environment["PYTHONPATH"] = str(folder)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), server.url, major],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.strip() == "all good", ended.stderr
