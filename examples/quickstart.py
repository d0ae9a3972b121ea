"""Sixteen digits in a grid: shown where this is a notebook's cell (%load examples/quickstart.py),
and in a file.
"""

from os import getenv
from urllib.request import urlopen

from openai import OpenAI
from PIL import Image

client = OpenAI(
    base_url=getenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=getenv("OPENAI_API_KEY", "-"),
)
grid = Image.new("L", (448, 448))
for i, image in enumerate(
    client.images.generate(model="mnist-conditional", prompt="", n=16, size="112x112").data
):
    grid.paste(
        Image.open(urlopen(f"data:image/png;base64,{image.b64_json}")), (i % 4 * 112, i // 4 * 112)
    )
grid.save("quickstart.png")
grid  # noqa: B018 - what a cell ends with is shown
