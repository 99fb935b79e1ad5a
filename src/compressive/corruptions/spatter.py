"""Spatter, an extra corruption of ImageNet-C: drops of water or mud."""

from itertools import product

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compressive.corruptions.filters import Pixels, gaussian, mix, over, reflect_101, stored
from compressive.corruptions.noise import normal
from compressive.rng import Keys, uniforms

Levels = Int[Tensor, "batch size size"]

_WATER, _MUD = (175.0, 238.0, 238.0), (63.0, 42.0, 20.0)
# OpenCV's 5 x 5 distance: straight, diagonal and knight's moves, in units of 2**-16.
_DISTANCE_STEPS = {(0, 1): 65536, (1, 1): 91750, (1, 2): 143976}
_ONES = [[1, 1, 1]] * 3


def spatter(
    images: Pixels,
    keys: Keys,
    mean: float,
    scale: float,
    sigma: float,
    threshold: float,
    amount: float,
    mud: int,
) -> Pixels:
    """Draw drops above a threshold of smoothed noise; `amount` is their strength or blur."""
    size = images.shape[-1]
    noise = normal(uniforms(keys, size * size)).unflatten(1, (size, size))
    liquid = mean + scale * mix(noise, gaussian(size, sigma))
    liquid = torch.where(liquid < threshold, 0.0, liquid)
    if mud:
        cover = mix((liquid > threshold).double(), gaussian(size, amount))[:, None]
        cover = torch.where(cover < 0.8, 0.0, cover)
        return stored(images * (1 - cover) + cover * _color(images, _MUD))
    light = water((liquid * 255).long() % 256)  # a cast to uint8 wraps around
    most = light.amax((1, 2), keepdim=True)
    light = amount * light / torch.where(most > 0, most, 1.0)
    return stored(images + light[:, None] * _color(images, _WATER))


def _color(images: Pixels, rgb: tuple[float, ...]) -> Tensor:
    return torch.tensor(rgb, dtype=torch.float64, device=images.device)[:, None, None]


def water(liquid: Levels) -> Float[Tensor, "batch size size"]:
    """Return the brightness of drops from the distance to their edges."""
    far = distance(canny(liquid, 50, 150), 20)
    near = equalized(over(_correlated(far, _ONES), 9).long(), 20)
    relief = _correlated(near, [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]).clamp(0, 255)
    smooth = (_correlated(relief, _ONES) / 9).round()
    return liquid * smooth.double()


def _correlated(field: Tensor, kernel: list[list[int]], border: str = "reflect") -> Tensor:
    """Correlate exactly with a 3 x 3 kernel of whole numbers."""
    size = field.shape[-1]
    at = torch.arange(-1, size + 1, device=field.device)
    at = reflect_101(at, size) if border == "reflect" else at.clamp(0, size - 1)
    padded = field[:, at][:, :, at]
    total = torch.zeros_like(field)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight:
                total += weight * padded[:, i : i + size, j : j + size]
    return total


def canny(levels: Levels, low: int, high: int) -> Bool[Tensor, "batch size size"]:
    """Return OpenCV's Canny edges: L1 norm of Sobel gradients, integer directions, hysteresis."""
    size = levels.shape[-1]
    x = _correlated(levels, [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], "nearest")
    y = _correlated(levels, [[-1, -2, -1], [0, 0, 0], [1, 2, 1]], "nearest")
    norm = x.abs() + y.abs()
    padded = F.pad(norm, (1, 1, 1, 1))

    def beside(down: int, across: int) -> Tensor:
        return padded[:, 1 + down : 1 + down + size, 1 + across : 1 + across + size]

    flat, steep = x.abs() * 13573, y.abs() << 15  # 13573 is tan(22.5 degrees) in units of 2**-15
    level = (norm > beside(0, -1)) & (norm >= beside(0, 1))
    upright = (norm > beside(-1, 0)) & (norm >= beside(1, 0))
    falling = (norm > beside(-1, -1)) & (norm > beside(1, 1))
    rising = (norm > beside(-1, 1)) & (norm > beside(1, -1))
    slanted = torch.where((x ^ y) < 0, rising, falling)
    ridge = torch.where(steep > flat + (x.abs() << 16), upright, slanted)
    ridge = torch.where(steep < flat, level, ridge)
    weak, strong = ridge & (norm > low), ridge & (norm > high)
    while True:  # strong edges grow along weak ones; one host synchronization per step
        grown = weak & (F.max_pool2d(strong[:, None].float(), 3, 1, 1)[:, 0] > 0)
        if torch.equal(grown, strong):
            return strong
        strong = grown


def distance(edges: Bool[Tensor, "batch size size"], most: int) -> Float[Tensor, "batch size size"]:
    """Return OpenCV's 5 x 5 chamfer distance to the nearest edge, at most `most`."""
    size = edges.shape[-1]
    far = torch.where(edges, 0, most << 16)
    for _ in range(most):  # a step is at least 1 long
        padded = F.pad(far, (2, 2, 2, 2), value=most << 16)
        for i, j in product(range(5), repeat=2):
            side = abs(i - 2), abs(j - 2)
            if (length := _DISTANCE_STEPS.get((min(side), max(side)))) is not None:
                far = far.minimum(padded[:, i : i + size, j : j + size] + length)
    return far.double() / 2**16


def equalized(levels: Levels, most: int) -> Levels:
    """Equalize the histogram of levels from 0 to `most` as OpenCV does."""
    counts = torch.stack([(levels == level).sum((1, 2)) for level in range(most + 1)], 1)
    first = counts.gather(1, (counts > 0).int().argmax(1, keepdim=True))
    rest = counts.sum(1, keepdim=True) - first
    table = ((counts.cumsum(1) - first) * (255.0 / rest.clamp(min=1))).round().long()
    table = torch.where(rest > 0, table, torch.arange(most + 1, device=levels.device))
    return table.gather(1, levels.flatten(1)).view_as(levels)
