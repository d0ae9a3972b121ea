"""Draw an image, watch one being drawn, and complete half of one: the stock openai package, 1.x to
3.x.
"""

import base64
import os
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)


def save(name, picture):
    Path(name).write_bytes(base64.b64decode(picture.b64_json))


# a prompt that is the name of a class conditions the image
drawn = client.images.generate(model="mnist-conditional", prompt="7", size="280x280")
save("drawn.png", drawn.data[0])

# each event shows more rows than the one before, the last one the whole image; with one
# attempt no row is drawn again
events = client.images.generate(
    model="mnist-conditional",
    prompt="3",
    size="280x280",
    stream=True,
    partial_images=4,
    extra_body={"attempts": 1},
)
for number, event in enumerate(events):
    save(f"streamed-{number}.png", event)

# keep the upper half of the seven, and have the lower half drawn anew
completed = client.images.edit(
    model="mnist-conditional",
    image=Path("drawn.png"),
    prompt="7",
    size="280x280",
    extra_body={"keep_rows": 14},
)
save("completed.png", completed.data[0])
