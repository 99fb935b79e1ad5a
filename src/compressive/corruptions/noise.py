"""Noise of ImageNet-C: Gaussian, shot, impulse, speckle."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.corruptions.filters import Pixels, over, stored
from compressive.rng import Keys, uniforms


def normal(u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert uniform to standard normal numbers by inversion; absolute values are at most 6.3."""
    return torch.special.ndtri(u + 2.0**-33)


def _uniform_pixels(images: Pixels, keys: Keys) -> Float[Tensor, "batch 3 size size"]:
    return uniforms(keys, images.shape[1:].numel()).view(images.shape)


def gaussian_noise(images: Pixels, keys: Keys, sigma: float) -> Pixels:
    """Add normal noise; `sigma` is relative to the full range."""
    return stored(images + 255 * sigma * normal(_uniform_pixels(images, keys)))


def speckle_noise(images: Pixels, keys: Keys, sigma: float) -> Pixels:
    """Add normal noise proportional to the pixel values."""
    return stored(images * (1 + sigma * normal(_uniform_pixels(images, keys))))


def impulse_noise(images: Pixels, keys: Keys, amount: float) -> Pixels:
    """Set each value to 0 or 255, equally likely, with probability `amount`."""
    u = _uniform_pixels(images, keys)
    return images.masked_fill(u < amount, 255).masked_fill(u < amount / 2, 0)


def shot_noise(images: Pixels, keys: Keys, photons: float) -> Pixels:
    """Draw Poisson counts of photons by inversion; white has `photons` on average.

    Each uint8 level has its own distribution. The 256 distribution functions are concatenated to
    one sorted list, so that one search finds all counts.
    """
    longest = math.ceil(photons + 8 * math.sqrt(photons) + 20)  # the rest: below 1e-13
    level = torch.arange(256, dtype=torch.float64, device=images.device)[:, None]
    count = torch.arange(longest, dtype=torch.float64, device=images.device)
    law = torch.special.gammaincc(count + 1, level / 255 * photons)
    law[:, -1] = 1.0
    u = _uniform_pixels(images, keys)
    found = torch.searchsorted((level + law).flatten(), images + u, right=True)
    return stored(over((found - longest * images.long()).double(), photons) * 255)
