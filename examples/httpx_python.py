"""Draw an image, watch one being drawn, and complete half of one: plain HTTP, with httpx."""

import base64
import json
import os
from pathlib import Path

import httpx

client = httpx.Client(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    timeout=60,
    headers={"authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"},
)
png = {"accept": "image/png"}  # without it the answer is JSON, with pictures as base64 in it
seven = {"model": "mnist-conditional", "label": 7, "size": "280x280"}

drawn = client.post("images/generations", json=seven, headers=png).raise_for_status()
Path("drawn.png").write_bytes(drawn.content)

# each event shows more rows than the one before, the last one the whole image; with one
# attempt no row is drawn again
wanted = seven | {"stream": True, "partial_images": 4, "attempts": 1}
with client.stream("POST", "images/generations", json=wanted) as answer:
    lines = (line for line in answer.raise_for_status().iter_lines() if line.startswith("data: "))
    for number, line in enumerate(lines):
        picture = json.loads(line.removeprefix("data: "))["b64_json"]
        Path(f"streamed-{number}.png").write_bytes(base64.b64decode(picture))

# keep the upper half of the seven, and have the lower half drawn anew
half = {"image": Path("drawn.png").read_bytes()}
completed = client.post(
    "images/edits", data=seven | {"keep_rows": 14}, files=half, headers=png
).raise_for_status()
Path("completed.png").write_bytes(completed.content)
