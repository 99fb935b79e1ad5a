"""Blurs of ImageNet-C: defocus, frosted glass, motion, zoom; and the plain Gaussian."""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from compressive.corruptions import filters
from compressive.corruptions.filters import Pixels, mix, stored
from compressive.rng import Keys, uniforms


def gaussian_blur(images: Pixels, sigma: float) -> Pixels:
    """Blur with a Gaussian of standard deviation `sigma`."""
    return stored(mix(images.double(), filters.gaussian(images.shape[-1], sigma)), filters.SLACK)


def disk(radius: float, alias: float) -> Tensor:
    """Return the kernel of a defocused lens: a disk smoothed by a small Gaussian.

    It is rounded to float32 as in OpenCV: if weights are fifths, the last bit decides a level.
    """
    half = 8 if radius <= 8 else int(radius)
    at = torch.arange(-half, half + 1, dtype=torch.float64)
    inside = (at[:, None] ** 2 + at**2 <= radius**2).double()
    soft = filters.band(filters.bell(alias, 1 if radius <= 8 else 2), len(at), filters.reflect_101)
    return mix((inside / inside.sum()).float().double(), soft.float().double()).float().double()


def defocus_blur(images: Pixels, radius: float, alias: float) -> Pixels:
    """Correlate with a disk, as a sum of one matrix product per row of the disk."""
    kernel, size = disk(radius, alias), images.shape[-1]
    half, at = len(kernel) // 2, torch.arange(size, device=images.device)
    total = torch.zeros(images.shape, dtype=torch.float64, device=images.device)
    for row, taps in enumerate(kernel):
        if taps.max() > 1e-12:
            rows = images[:, :, filters.reflect_101(at + row - half, size)].double()
            total += rows @ filters.band(taps, size, filters.reflect_101).mT.to(images.device)
    return stored(total, filters.SLACK)


def sources(
    down: Int[Tensor, "batch size size"], across: Int[Tensor, "batch size size"], reach: int
) -> Int[Tensor, "batch pixels"]:
    """Return the source of each pixel after one pass of copies, from the last to the first pixel.

    A copy reads the result of earlier copies. Each pixel is two nodes, before and after its own
    copy. Each node points to the node of its value, and pointers are doubled until all arrive.
    """
    size = down.shape[-1]
    pixel = torch.arange(size * size, device=down.device).view(size, size)
    place = torch.arange(size, device=down.device)
    moves = (place > reach) & (place <= size - reach)
    moves = moves[:, None] & moves
    source = torch.where(moves, pixel + size * down + across, pixel).flatten(1)
    if reach == 1:  # moves of -1 and 0 never read an earlier copy
        return source
    count, pixel = size * size, pixel.flatten()
    was_copied = moves.flatten()[source] & (source > pixel)
    after = torch.where(was_copied, source, source + count)
    points = torch.cat([after, (pixel + count).expand_as(after)], 1)
    for _ in range(count.bit_length()):
        points = points.gather(1, points)
    return points[:, :count] - count


def glass_blur(images: Pixels, keys: Keys, sigma: float, reach: int, passes: int) -> Pixels:
    """Copy pixels from up to `reach` away, one after another, between two Gaussian blurs.

    The official code intends to swap pixels but copies them, because it assigns NumPy views.
    """
    size = images.shape[-1]
    blurred = gaussian_blur(images, sigma).flatten(2)
    u = uniforms(keys, 2 * passes * size * size).unflatten(1, (passes, 2, size, size))
    for i in range(passes):
        across, down = (u[:, i] * (2 * reach)).long().sub(reach).unbind(1)
        source = sources(down, across, reach)[:, None].expand_as(blurred)
        blurred = blurred.gather(2, source)
    return gaussian_blur(blurred.view_as(images), sigma)


def motion_blur(images: Pixels, keys: Keys, radius: int, sigma: float) -> Pixels:
    """Blur along a random direction from -45 to 45 degrees."""
    return filters.streak(images, 90 * uniforms(keys, 1)[:, 0] - 45, radius, sigma)


def zoom_blur(images: Pixels, end: float, step: float) -> Pixels:
    """Return the mean of an image and its magnified copies; the first copy is the image."""
    levels = images.double()
    total, factors = levels.clone(), np.arange(1, end, step)
    for factor in factors:
        total += mix(levels, filters.zoom(images.shape[-1], float(factor)))
    return stored(total / (len(factors) + 1), filters.SLACK)
