"""Sixteen digits in a grid: shown where this is a notebook's cell (%load examples/quickstart.py),
and in a file.
"""

from os import getenv
from urllib.request import urlopen

from openai import OpenAI
from PIL import Image

url, key = getenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), getenv("OPENAI_API_KEY", "-")
client, grid = OpenAI(base_url=url, api_key=key), Image.new("L", (448, 448))
digits = client.images.generate(model="mnist-conditional", prompt="", n=16, size="112x112").data
for i, digit in enumerate(digits):
    picture = Image.open(urlopen(f"data:image/png;base64,{digit.b64_json}"))
    grid.paste(picture, (i % 4 * 112, i // 4 * 112))
grid.save("quickstart.png")
grid  # noqa: B018 - what a cell ends with is shown
