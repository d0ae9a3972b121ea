"""Pictures in Python: in, as a path, a PIL image or an array; out, as one array with the facts of
its images.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from linpix.model.config import ModelConfig
from linpix.model.orientation import orientation
from linpix.model.palette import nearest
from linpix.server.errors import InvalidRequest
from linpix.server.pictures import animation, uploads
from linpix.server.pictures.pictures import LARGEST_UPLOAD, eight_bits, upright

MAX_16_BIT = 2**16 - 1
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}  # modes whose colours are multiplied by their alpha


class Images(np.ndarray[Any, np.dtype[np.uint8]]):
    """Drawn images: a numpy array, uint8 (count, height, width), or (count, height, width, 3) in
    colour, or (count, height, width, 4) with alpha, from a model with a palette.

    seeds:       of each image; the same seed draws the same image again, here and on a server
    labels:      the name of each image's class; None where it has none, or none is known
    confidences: how probable this class is to the model, which has read the image; None where it
        has not
    In a notebook they are shown as pictures. Arrays that are made of them, such as images[0], have
    no such lists.
    """

    seeds: Sequence[int] = ()
    labels: Sequence[str | None] = ()
    confidences: Sequence[float | None] = ()
    _model: ModelConfig | None = None

    def __new__(
        cls,
        images: NDArray[np.uint8],
        model: ModelConfig,
        seeds: Sequence[int],
        labels: Sequence[str | None],
        confidences: Sequence[float | None],
    ) -> "Images":
        made = images.view(cls)
        made._model, made.seeds, made.labels, made.confidences = model, seeds, labels, confidences
        return made

    def __array_finalize__(self, made_of: object) -> None:
        self._model = getattr(made_of, "_model", None)

    def __array_wrap__(
        self, array: NDArray[Any], context: object = None, return_scalar: bool = False
    ) -> Any:
        """A result without dimensions, such as a mean, is a number as those of numpy are."""
        return array[()] if array.ndim == 0 else super().__array_wrap__(array)

    def __reduce__(self) -> Any:  # for other processes
        plain = np.asarray(self)
        if not self.seeds:
            return plain.__reduce__()
        return Images, (plain, self._model, self.seeds, self.labels, self.confidences)

    def grid(self, columns: int | None = None, scale: int | None = None) -> Image.Image:
        """A PIL image of all images side by side, of `columns` and enlarged `scale` times; None: to
        fit a screen.
        """
        model = self._model
        shape = () if model is None else model.image_shape + (4,) * bool(model.palette)
        if (
            model is None
            or self.dtype != np.uint8
            or not self.size
            or shape not in (self.shape, self.shape[1:])
        ):
            raise ValueError(
                f"grid needs images as they were drawn, got {self.dtype} of shape {self.shape}"
            )
        values = np.asarray(self)
        if model.palette:
            values = nearest(values.reshape(-1, 4), model)
        sheet = animation.grid(values.reshape(-1, model.subpixels), model, columns=columns or 0)
        scale = scale or max(1, animation.WIDEST // sheet.shape[1])
        return Image.fromarray(sheet.repeat(scale, 0).repeat(scale, 1))

    def __repr__(self) -> str:
        if self._model is None or not self.seeds:
            return repr(np.asarray(self))
        images = "1 image" if len(self) == 1 else f"{len(self)} images"
        size = f"{self._model.width} x {self._model.height}"
        text = f"{images} of {size}, seeds from {self.seeds[0]}"
        if any(self.labels):
            classes = [label or "none" for label in self.labels[:10]]
            if len(self) > 10:
                classes.append("...")
            text += f", classes {', '.join(classes)}"
        return f"<{text}>"

    def __str__(self) -> str:
        return repr(self) if self.seeds else str(np.asarray(self))

    def _repr_png_(self) -> bytes | None:
        """For notebooks. None for arrays that are not images, and are shown as numbers."""
        out = io.BytesIO()
        try:
            self.grid().save(out, "PNG")
        except ValueError:
            return None
        return out.getvalue()


def read_given(image: object, known: object, config: ModelConfig, **options: Any) -> uploads.Upload:
    """Read a picture as an upload is read. image, known: as in linpix.complete · options: of
    uploads.read.
    """
    picture = _picture_of(image)
    mask, rows = None, None
    if isinstance(known, (int, np.integer)) and not isinstance(known, bool):
        rows = int(known)
    elif isinstance(known, (str, Path, Image.Image)):
        mask = _encoded(_picture_of(known))
    elif known is not None:
        kept, sizes = _array(known, "known"), [(config.height, config.width)]
        fits = kept.ndim == 2
        if isinstance(picture, Image.Image):
            sizes = list(dict.fromkeys((picture.size[::-1], *sizes)))
            fits = kept.shape in sizes
        if kept.dtype != np.bool_ or not fits:
            raise ValueError(
                f"known must be bool of shape {' or '.join(map(str, sizes))}, true for pixels to"
                f" keep, or a number of rows, got {kept.dtype} of shape {kept.shape}"
            )
        alpha = kept.astype(np.uint8) * 255
        mask = _encoded(Image.fromarray(np.dstack([alpha, alpha])))
    try:
        return uploads.read(_encoded(picture), config, mask=mask, keep_rows=rows, **options)
    except InvalidRequest as error:  # with the names that it has here
        words = str(error).replace("keep_rows", "known")
        if known is not None:
            words = words.replace("mask", "known")
        raise ValueError(words) from error


def _picture_of(given: object) -> Image.Image | Path:
    if isinstance(given, (str, Path)):
        return Path(given)
    if isinstance(given, Image.Image) and given.mode != "F":
        given.load()  # a PNG may have its EXIF data at the end
        return _writable(upright(given, orientation(given.info.get("exif", b""))))
    values = _array(given, "image")
    if (
        values.dtype != np.uint8
        or values.ndim < 2
        or not values.size
        or values.shape[2:] not in ((), (1,), (3,), (4,))
    ):
        cure = (
            "; if its values are from 0 to 1, give (255 * image).astype('uint8')"
            if values.dtype.kind == "f"
            else ""
        )
        raise ValueError(
            "image must be a path, a PIL image, or an array that is uint8 of shape (height, width)"
            f" or (height, width, 3), got {values.dtype} of shape {values.shape}{cure}"
        )
    if values.shape[2:] == (1,):
        values = values[..., 0]
    return Image.fromarray(values)


def _array(given: object, name: str) -> NDArray[Any]:
    """An array, or a tensor of any device, also one that needs gradients. name: for the error."""
    try:
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu()
            if given.is_floating_point():
                given = given.float()  # numpy has no bfloat16
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as an array: {error}") from error


def _writable(picture: Image.Image) -> Image.Image:
    """The picture in a mode of 8 bits that PNG has. Raises ValueError."""
    mode = picture.mode
    if mode == "I":  # which does not say how many bits it has
        values = np.asarray(picture)
        least, most = values.min(initial=0), values.max(initial=0)
        if least < 0 or 0 < most <= 255 or most > MAX_16_BIT:
            raise ValueError(
                "a PIL image of mode I must have values of 16 bits, up to more than 255 and at most"
                f" {MAX_16_BIT:,}, got {least}..{most}; bring it to 8 bits first, and if it has"
                ' them, give image.convert("L")'
            )
    if mode.startswith("I"):
        return eight_bits(picture)
    if mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        return picture
    if mode in _PREMULTIPLIED:
        return picture.convert(_PREMULTIPLIED[mode])
    return _in_colour(picture)


def _in_colour(picture: Image.Image) -> Image.Image:
    mode = "RGBA" if picture.has_transparency_data else "RGB"
    return picture.convert(mode)


def _encoded(picture: Image.Image | Path) -> bytes:
    if isinstance(picture, Path):
        return picture.read_bytes()
    if picture.width * picture.height > LARGEST_UPLOAD:  # models need far less
        factor = math.ceil(math.sqrt(picture.width * picture.height / LARGEST_UPLOAD))
        picture = _in_colour(picture).reduce(factor)
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()
