"""Datasets of images that differ by color, for tests of whole evaluations."""

from pathlib import Path

import torch
from PIL import Image


def paint(folder: Path, *, seed: int, each: int, swap: bool = False) -> None:
    """Write images of three classes with noisy class colors."""
    random = torch.Generator().manual_seed(seed)
    for label in range(3):
        place = folder / f"class{(label + 1) % 3 if swap else label}"
        place.mkdir(parents=True)
        for i in range(each):
            pixels = torch.randint(0, 200, (20, 20, 3), generator=random, dtype=torch.uint8)
            pixels[:, :, label] += 55
            Image.fromarray(pixels.numpy()).save(place / f"{seed}-{label}-{i}.png")
