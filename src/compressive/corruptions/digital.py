"""Digital corruptions of ImageNet-C: brightness, contrast, elastic, pixelate, saturation."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.corruptions import filters
from compressive.corruptions.filters import Matrix, Pixels, mix, over, stored
from compressive.rng import Keys, uniforms


def _to_hsv(images: Pixels) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue, saturation and value from 0 to 1, in scikit-image's order of operations.

    Levels are near whole numbers, so the last bit decides the rounding; it is the same here.
    """
    light = over(images.double(), 255)
    red, green, blue = light.unbind(1)
    value = light.amax(1)
    chroma = value - light.amin(1)
    gray = chroma == 0
    unit = torch.where(gray, 1.0, chroma)
    hue = torch.where(red == value, (green - blue) / unit, 0.0)
    hue = torch.where(green == value, 2.0 + (blue - red) / unit, hue)
    hue = torch.where(blue == value, 4.0 + (red - green) / unit, hue)
    hue = torch.where(gray, 0.0, over(hue, 6.0) % 1.0)
    return hue, torch.where(gray, 0.0, chroma / torch.where(gray, 1.0, value)), value


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Pixels:
    sixth = (hue * 6).floor()
    rest = hue * 6 - sixth
    p = value * (1 - saturation)
    q = value * (1 - rest * saturation)
    t = value * (1 - (1 - rest) * saturation)
    part = sixth.long() % 6
    planes = ((value, q, p, p, t, value), (t, value, value, q, p, p), (p, p, t, value, value, q))
    chosen = [torch.stack(plane).gather(0, part[None])[0] for plane in planes]
    return stored(torch.stack(chosen, 1).clamp(0, 1) * 255)


def brightness(images: Pixels, delta: float) -> Pixels:
    """Increase the HSV value."""
    hue, saturation, value = _to_hsv(images)
    return _from_hsv(hue, saturation, (value + delta).clamp(0, 1))


def saturate(images: Pixels, factor: float, delta: float) -> Pixels:
    """Multiply and increase the HSV saturation."""
    hue, saturation, value = _to_hsv(images)
    return _from_hsv(hue, (saturation * factor + delta).clamp(0, 1), value)


def contrast(images: Pixels, factor: float) -> Pixels:
    """Shrink distances to the mean of each channel."""
    mean = images.long().sum((2, 3), keepdim=True).double() / images.shape[-1] ** 2
    return stored((images - mean) * factor + mean, filters.SLACK)


def elastic_transform(
    images: Pixels, keys: Keys, alpha: float, sigma: float, jolt: float
) -> Pixels:
    """Apply an affine map that moves three points by up to `jolt`, then displace each pixel.

    OpenCV below 5 rounds positions of the first step to 1/32 pixel; here they are exact.
    """
    size = images.shape[-1]
    u = 2 * uniforms(keys, 6 + 2 * size * size) - 1
    at = torch.arange(size, dtype=torch.float64, device=images.device)
    y, x = at[:, None].expand(size, size), at.expand(size, size)
    levels = filters.sample(images.double(), *_affine(u[:, :6] * jolt, y, x), filters.reflect_101)
    if alpha > 0:
        field = filters.gaussian(size, sigma, filters.reflect, truncate=3.0)
        across, down = alpha * mix(u[:, 6:].unflatten(1, (2, size, size)), field).transpose(0, 1)
        levels = filters.sample(levels, y + down, x + across, filters.reflect)
    return stored(levels, filters.SLACK)


def _affine(
    jolts: Float[Tensor, "batch 6"], y: Float[Tensor, "size size"], x: Float[Tensor, "size size"]
) -> tuple[Float[Tensor, "batch size size"], Float[Tensor, "batch size size"]]:
    """Return the source position of each pixel if three points of the image are moved."""
    middle, arm = float(y.shape[0] // 2), float(y.shape[0] // 3)
    corners = [[middle + arm, middle + arm], [middle + arm, middle - arm], [middle - arm] * 2]
    points = torch.tensor(corners, dtype=torch.float64, device=y.device)  # x, y
    first, pivot, last = (points + jolts.unflatten(1, (3, 2))).unbind(1)
    # Invert the map that takes the edges (0, 2 arm) and (-2 arm, 0) to their moved versions.
    (a, b), (c, d) = ((edge - pivot).unbind(1) for edge in (first, last))
    scale = 2 * arm / (a * d - b * c)
    u, v = (axis - at[:, None, None] for axis, at in zip((x, y), pivot.unbind(1), strict=True))
    a, b, c, d = ((scale * part)[:, None, None] for part in (a, b, c, d))
    return middle - arm + u * d - v * c, middle + arm - (v * a - u * b)


def _box(size: int, to: int) -> Matrix:
    """Return Pillow's BOX resize along one axis as a matrix, in units of 2**-22."""
    scale = size / to
    wide = max(scale, 1.0)
    weights = torch.zeros(to, size, dtype=torch.float64)
    for i in range(to):
        center = (i + 0.5) * scale
        first, last = max(int(center - wide / 2 + 0.5), 0), min(int(center + wide / 2 + 0.5), size)
        inside = [j for j in range(first, last) if -0.5 < (j - center + 0.5) / wide <= 0.5]
        weights[i, inside] = math.floor(2**22 / len(inside) + 0.5)
    return weights


def pixelate(images: Pixels, factor: float) -> Pixels:
    """Shrink and enlarge with the integer arithmetic of Pillow's BOX filter, exact in float64."""
    size = images.shape[-1]
    small = int(size * factor)
    levels = images.double()
    for start, end in ((size, small), (small, size)):
        box = _box(start, end).to(images.device)
        levels = ((levels @ box.mT + 2**21) / 2**22).floor().clamp(0, 255)
        levels = ((box @ levels + 2**21) / 2**22).floor().clamp(0, 255)
    return stored(levels)
