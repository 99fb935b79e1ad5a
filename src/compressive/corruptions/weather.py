"""Weather of ImageNet-C: snow, frost, fog."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from compressive.corruptions.filters import Pixels, mix, over, stored, streak, zoom
from compressive.corruptions.noise import normal
from compressive.rng import Keys, uniforms

Photo = UInt8[Tensor, "3 _ _"]  # of any size

_FROST = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")


def snow(
    images: Pixels,
    keys: Keys,
    mean: float,
    scale: float,
    factor: float,
    threshold: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Pixels:
    """Add motion-blurred flakes, also rotated by 180 degrees, to a whitened image."""
    size = images.shape[-1]
    u = uniforms(keys, 1 + size * size)
    field = mean + scale * normal(u[:, 1:].unflatten(1, (1, size, size)))
    flakes = mix(field, zoom(size, factor))
    flakes = stored(255 * torch.where(flakes < threshold, 0.0, flakes))
    flakes = streak(flakes, 90 * u[:, 0] - 135, radius, sigma).double()
    levels = images.double()
    red, green, blue = levels.unbind(1)
    gray = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    levels = keep * levels + (1 - keep) * levels.maximum(1.5 * gray + 127.5)
    return stored(levels + flakes + flakes.flip(2, 3))


def load_frost(folder: str | Path) -> tuple[Photo, ...]:
    """Load the six photographs of the official code; the first five are used."""
    folder = Path(folder)
    if missing := [name for name in _FROST if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: copy the six frost files there from "
            "ImageNet-C/create_c of github.com/hendrycks/robustness"
        )
    photos = []
    for name in _FROST:
        with Image.open(folder / name) as photo:
            photos.append(torch.from_numpy(np.array(photo.convert("RGB"))).permute(2, 0, 1))
    return tuple(photos)


def frost_canvas(
    photos: Sequence[Photo], size: int, scale: float
) -> tuple[UInt8[Tensor, "photos 3 height width"], Float[Tensor, "photos 2"]]:
    """Return five shrunk photographs in one tensor, and the number of crops in each direction.

    A photograph that is too small for a crop of this size is shrunk less, or enlarged.
    """
    shrunk = []
    for photo in photos[:5]:
        least = (size + 1) / min(photo.shape[1:])
        shrunk.append(_resize_as_opencv(photo, max(scale, least)))
    tall, wide = (max(photo.shape[i] for photo in shrunk) for i in (1, 2))
    canvas = shrunk[0].new_zeros(len(shrunk), 3, tall, wide)
    for place, photo in zip(canvas, shrunk, strict=True):
        place[:, : photo.shape[1], : photo.shape[2]] = photo
    crops = [[side - size for side in photo.shape[1:]] for photo in shrunk]
    return canvas, torch.tensor(crops, dtype=torch.float64, device=canvas.device)


def _resize_as_opencv(photo: Photo, scale: float) -> Photo:
    """Resize as OpenCV's bilinear mode: pixel centers are aligned, without antialiasing."""
    if scale == 1:
        return photo

    def weights(side: int) -> Tensor:
        at = (torch.arange(round(side * scale), dtype=torch.float64) + 0.5) / scale - 0.5
        apart = at.clamp(0, side - 1)[:, None] - torch.arange(side)
        return (1 - apart.abs()).clamp(min=0)

    return stored(mix(photo.double(), weights(photo.shape[1]), weights(photo.shape[2])), 0.5)


def frost(
    images: Pixels,
    keys: Keys,
    image_weight: float,
    frost_weight: float,
    *,
    photos: Sequence[Photo],
    scale: float,
) -> Pixels:
    """Add a random part of a random photograph of ice."""
    size = images.shape[-1]
    canvas, crops = frost_canvas([photo.to(images.device) for photo in photos], size, scale)
    u = uniforms(keys, 3)
    which = (u[:, 0] * len(canvas)).long()
    start = (u[:, 1:] * crops[which]).long()
    at = torch.arange(size, device=images.device)
    rows, columns = start[:, :1] + at, start[:, 1:] + at
    ice = canvas.permute(0, 2, 3, 1)[which[:, None, None], rows[:, :, None], columns[:, None]]
    return stored(image_weight * images.double() + frost_weight * ice.permute(0, 3, 1, 2).double())


def plasma(u: Float[Tensor, "batch side side"], decay: float) -> Float[Tensor, "batch side side"]:
    """Return diamond-square noise from 0 to 1 on a periodic map.

    A point uses the random number at its own position in `u`.
    """
    side = u.shape[-1]
    clouds, wibble, step = torch.zeros_like(u), 100.0, side
    swing = 2 * u - 1

    def fill(top: int, left: int, total: Tensor) -> None:
        at = (slice(None), slice(top, None, step), slice(left, None, step))
        clouds[at] = total / 4 + wibble * (wibble * swing[at])

    while step >= 2:
        half = step // 2
        corners = clouds[:, ::step, ::step]
        total = corners + corners.roll(-1, 1)
        fill(half, half, total + total.roll(-1, 2))
        middles = clouds[:, half::step, half::step]
        fill(0, half, middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        fill(half, 0, middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wibble = half, wibble / decay
    clouds = clouds - clouds.amin((1, 2), keepdim=True)
    return clouds / clouds.amax((1, 2), keepdim=True)


def fog(images: Pixels, keys: Keys, strength: float, decay: float, *, side: int) -> Pixels:
    """Add fog and restore the maximum brightness; `side` is that of the fog map."""
    size = images.shape[-1]
    while side < size:
        side *= 2
    clouds = plasma(uniforms(keys, side * side).unflatten(1, (side, side)), decay)
    most = over(images.amax((1, 2, 3), keepdim=True).double(), 255)
    light = over(images.double(), 255) + strength * clouds[:, None, :size, :size]
    return stored(255 * (light * most / (most + strength)))
