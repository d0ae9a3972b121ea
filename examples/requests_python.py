"""Draw an image, watch one being drawn, and complete half of one: plain HTTP, with requests."""

import base64
import json
import os
from pathlib import Path

import requests

images = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1") + "/images"
key = {"authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
png = key | {"accept": "image/png"}  # without it the answer is JSON, with pictures as base64 in it
seven = {"model": "mnist-conditional", "label": 7, "size": "280x280"}

drawn = requests.post(f"{images}/generations", json=seven, headers=png, timeout=60)
drawn.raise_for_status()
Path("drawn.png").write_bytes(drawn.content)

# each event shows more rows than the one before, the last one the whole image; with one
# attempt no row is drawn again
wanted = seven | {"stream": True, "partial_images": 4, "attempts": 1}
with requests.post(
    f"{images}/generations", json=wanted, headers=key, timeout=60, stream=True
) as answer:
    answer.raise_for_status()
    events = (line for line in answer.iter_lines() if line.startswith(b"data: "))
    for number, event in enumerate(events):
        picture = json.loads(event.removeprefix(b"data: "))["b64_json"]
        Path(f"streamed-{number}.png").write_bytes(base64.b64decode(picture))

# keep the upper half of the seven, and have the lower half drawn anew
half = {"image": Path("drawn.png").read_bytes()}
completed = requests.post(
    f"{images}/edits", data=seven | {"keep_rows": 14}, files=half, headers=png, timeout=60
)
completed.raise_for_status()
Path("completed.png").write_bytes(completed.content)
