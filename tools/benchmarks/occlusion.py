"""Pictures with holes, asked for over HTTP: masks, uploads, answers, contact sheets, and what needs
no judge.

Images are (N, T), sub-pixels in raster order; what is hidden is told by pixel, (N, height * width).
"""

import base64
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from linpix.model.config import PRESETS, ModelConfig

IN_FLIGHT = 64
HOLE = (64, 96, 176)  # the colour of what is hidden, on contact sheets
DIGITS = PRESETS["mnist-small"]
Images = NDArray[np.uint8]  # (N, T)
Hidden = NDArray[np.bool_]  # (N, height * width), or of one image
T = TypeVar("T")


def masks(count: int, config: ModelConfig = DIGITS) -> dict[str, Hidden]:
    """What is hidden of each image, by name."""
    random, height, width = np.random.default_rng(0), config.height, config.width
    square = np.zeros((4, height, width), np.bool_)
    square[0, : height // 2], square[1, :, : width // 2], square[3, height // 2 :] = (
        True,
        True,
        True,
    )
    square[2, height // 4 : height - height // 4, width // 4 : width - width // 4] = True
    centre = f"centre {height - 2 * (height // 4)} x {width - 2 * (width // 4)}"
    fixed = dict(
        zip(
            ("upper half", "left half", centre, "lower half"), square.reshape(4, 1, -1), strict=True
        )
    )
    return {name: mask.repeat(count, 0) for name, mask in fixed.items()} | {
        f"random {share:.0%}": random.random((count, height * width)) < share
        for share in (0.5, 0.85)
    }


def from_first_hole_on(hidden: Hidden) -> Hidden:
    """The same, and everything after its first hole."""
    return np.maximum.accumulate(hidden, -1)


def upload(image: NDArray[np.uint8], hidden: Hidden, config: ModelConfig = DIGITS) -> bytes:
    """A PNG of one picture (T,), transparent where it is hidden; what is beneath stays as it is."""
    shape = config.height, config.width
    alpha = np.where(hidden, 0, 255).astype(np.uint8).reshape(*shape, 1)
    mode = "RGBA" if config.channels == 3 else "LA"
    return png(Image.fromarray(np.concatenate([image.reshape(*shape, -1), alpha], -1), mode))


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def images_of(answer: httpx.Response) -> Images:
    answer.raise_for_status()
    return np.stack(
        [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))).reshape(-1)
            for item in answer.json()["data"]
        ]
    )


class Asked:
    """One model on a server, asked by many clients at once."""

    def __init__(self, url: str, model: str, config: ModelConfig = DIGITS) -> None:
        self.url, self.model, self.config = url, model, config

    def drawn(self, labels: Sequence[int | None], seed: int = 0, candidates: int = 1) -> Images:
        """An image of each label, or of none; of more than one candidate each all, the best one
        first.
        """
        ranked = {"n": candidates, "candidates": candidates} if candidates > 1 else {}

        def one(http: httpx.Client, index: int) -> httpx.Response:
            label = {} if labels[index] is None else {"label": labels[index]}
            return http.post(
                "/v1/images/generations",
                json={"model": self.model, "seed": seed + candidates * index} | label | ranked,
            )

        return np.concatenate(self._all(one, images_of, len(labels), candidates))

    def completed(
        self,
        originals: Images,
        hidden: Hidden,
        n: int = 1,
        seed: int = 0,
        candidates: int | None = None,
    ) -> Images:
        """n completions of each picture, (n * N, T); of candidates, the best, the best one
        first.
        """
        chosen = {} if candidates is None else {"candidates": candidates}

        def one(http: httpx.Client, index: int) -> httpx.Response:
            return http.post(
                "/v1/images/edits",
                files={"image": upload(originals[index], hidden[index], self.config)},
                data={"model": self.model, "n": n, "seed": seed + (candidates or n) * index}
                | chosen,
            )

        return np.concatenate(self._all(one, images_of, len(originals), candidates or n))

    def bits_per_dim(self, originals: Images, hidden: Hidden) -> float:
        """Of the hidden sub-pixels of each picture given the known ones: the mean over pictures."""

        def one(http: httpx.Client, index: int) -> httpx.Response:
            return http.post(
                "/v1/images/likelihoods",
                data={"model": self.model},
                files={"image": upload(originals[index], hidden[index], self.config)},
            )

        return float(
            np.mean(
                self._all(
                    one, lambda answer: float(answer.json()["bits_per_dim"]), len(originals), 4
                )
            )
        )

    def _all(
        self,
        one: Callable[[httpx.Client, int], httpx.Response],
        made: Callable[[httpx.Response], T],
        count: int,
        n: int,
    ) -> list[T]:
        """What is made of each answer. n: images that each request has drawn."""
        clients = max(1, IN_FLIGHT // n)

        def answered(http: httpx.Client, index: int) -> T:
            answer = one(http, index)
            answer.raise_for_status()
            return made(answer)

        with (
            httpx.Client(
                base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=clients)
            ) as http,
            ThreadPoolExecutor(clients) as pool,
        ):
            return list(pool.map(lambda index: answered(http, index), range(count)))


def error(originals: Images, completed: Images, hidden: Hidden) -> NDArray[np.float64]:
    """The mean distance of each completion from its original, where it is hidden: grey levels a
    sub-pixel, (N,).
    """
    channels = originals.shape[1] // hidden.shape[1]
    away = (
        np.abs(originals.astype(np.int16) - completed)
        .reshape(len(originals), -1, channels)
        .mean(-1)
    )
    means: NDArray[np.float64] = (away * hidden).sum(1) / hidden.sum(1)
    return means


def seam(images: Images, hidden: Hidden, config: ModelConfig) -> NDArray[np.float64]:
    """The mean step across the border of what is hidden: grey levels a sub-pixel, (N,)."""
    grid = images.reshape(-1, config.height, config.width, config.channels).astype(np.int16)
    holes = hidden.reshape(-1, config.height, config.width)
    steps, borders = np.zeros(len(images)), np.zeros(len(images))
    for axis in (1, 2):
        border = np.diff(holes, axis=axis)  # of bool: whether they differ
        steps += (np.abs(np.diff(grid, axis=axis)).mean(-1) * border).sum((1, 2))
        borders += border.sum((1, 2))
    return steps / borders


def sheet(asked: Asked, originals: Images, hidden: Hidden) -> Image.Image:
    """Columns are pictures; rows the original, what is known of it (blue: hidden), and four
    completions of that; then what is known of it before the first hole, and four completions of
    that."""
    config, scale, gap, margin = asked.config, 2, 4, 104
    rows: list[tuple[str, Images, Hidden]] = [("original", originals, np.zeros_like(hidden))]
    for known, holes in (("known", hidden), ("prefix only", from_first_hole_on(hidden))):
        ways = asked.completed(originals, holes, 4, 3 * 10**6).reshape(len(originals), 4, -1)
        rows += [
            (known, originals, holes),
            *((f"completion {way + 1}", ways[:, way], np.zeros_like(hidden)) for way in range(4)),
        ]
    across, down = config.width * scale + gap, config.height * scale + gap
    whole = Image.new("RGB", (margin + across * len(originals), down * len(rows) + gap), "white")
    draw, font = ImageDraw.Draw(whole), ImageFont.load_default(14)
    for row, (name, images, holes) in enumerate(rows):
        top = gap + row * down
        draw.text((gap, top + down // 2), name, "black", font, "lm")
        for column, (image, hole) in enumerate(zip(images, holes, strict=True)):
            seen = np.where(hole[:, None], np.array(HOLE, np.uint8), image.reshape(hole.size, -1))
            seen = seen.reshape(config.height, config.width, 3).repeat(scale, 0).repeat(scale, 1)
            whole.paste(Image.fromarray(seen), (margin + column * across, top))
    colours = 64 if config.channels == 1 else 256
    return whole.quantize(colours)


def write_sheets(asked: Asked, images: Images, labels: NDArray[np.int64], folder: Path) -> None:
    """A PNG for each mask, with the first image of every class."""
    folder.mkdir(parents=True, exist_ok=True)
    one_of_each = images[[int(np.argmax(labels == label)) for label in np.unique(labels)]]
    for name, hidden in masks(len(one_of_each), asked.config).items():
        file = folder / f"{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}.png"
        sheet(asked, one_of_each, hidden).save(file, optimize=True)
