"""Many images as one picture."""

import numpy as np
from numpy.typing import NDArray

from model.config import ModelConfig


def tile(images: NDArray[np.uint8], config: ModelConfig, columns: int = 10) -> NDArray[np.uint8]:
    """Images (count, T) side by side, `columns` a line, one grey pixel apart; (height, width[, channels])."""
    columns = min(columns, len(images))
    lines = -(-len(images) // columns)
    height, width = config.height + 1, config.width + 1
    sheet = np.full((lines * height + 1, columns * width + 1, config.channels), 96, np.uint8)
    for index, image in enumerate(images):
        y, x = index // columns * height + 1, index % columns * width + 1
        sheet[y:y + config.height, x:x + config.width] = image.reshape(config.height, config.width, config.channels)
    return sheet[..., 0] if config.channels == 1 else sheet
