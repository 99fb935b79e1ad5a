"""Draw a contact sheet of the built-in images with one row per class.

uv run python docs/pictures/pictures.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

from compressive.data.synthetic import CLASSES, pictures

SIDE, GAP, ACROSS, SCALE = 32, 2, 20, 2


def main() -> None:
    """Write builtin.png next to this file."""
    images, labels = pictures(2000, split="train")
    step = SIDE + GAP
    sheet = np.full((len(CLASSES) * step - GAP, ACROSS * step - GAP, 3), 255, np.uint8)
    for row in range(len(CLASSES)):
        for column, image in enumerate(images[labels == row][:ACROSS]):
            top, left = row * step, column * step
            sheet[top : top + SIDE, left : left + SIDE] = image.transpose(1, 2, 0)
    size = (SCALE * sheet.shape[1], SCALE * sheet.shape[0])
    large = Image.fromarray(sheet).resize(size, Image.Resampling.NEAREST)
    large.quantize(256).save(Path(__file__).parent / "builtin.png", optimize=True)


if __name__ == "__main__":
    main()
