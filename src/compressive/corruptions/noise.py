"""Noise of ImageNet-C: Gaussian, shot, impulse, speckle."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.corruptions.filters import Pixels, over, stored
from compressive.rng import Keys, uniforms


def normal(u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard normal numbers of uniform ones, by inversion; at most 6.3 in size."""
    return torch.special.ndtri(u + 2.0**-33)


def _drawn(images: Pixels, keys: Keys) -> Float[Tensor, "batch 3 size size"]:
    return uniforms(keys, images.shape[1:].numel()).view(images.shape)


def gaussian_noise(images: Pixels, keys: Keys, sigma: float) -> Pixels:
    """Normal noise of standard deviation `sigma`, of the full range, added."""
    noise = normal(_drawn(images, keys))
    return stored(images + 255 * sigma * noise)


def speckle_noise(images: Pixels, keys: Keys, sigma: float) -> Pixels:
    """Normal noise in proportion to the light."""
    noise = normal(_drawn(images, keys))
    return stored(images * (1 + sigma * noise))


def impulse_noise(images: Pixels, keys: Keys, amount: float) -> Pixels:
    """Each number of a pixel becomes 0 or 255 with probability `amount`, half and half."""
    u = _drawn(images, keys)
    return images.masked_fill(u < amount, 255).masked_fill(u < amount / 2, 0)


def shot_noise(images: Pixels, keys: Keys, photons: float) -> Pixels:
    """Light counted in photons, `photons` for full white: Poisson's law, by inversion.

    A level of uint8 has its own law: 256 distribution functions lie one after the other in one
    sorted list, and one search finds all counts.
    """
    longest = math.ceil(photons + 8 * math.sqrt(photons) + 20)  # what lies beyond is below 1e-13
    level = torch.arange(256, dtype=torch.float64, device=images.device)[:, None]
    count = torch.arange(longest, dtype=torch.float64, device=images.device)
    law = torch.special.gammaincc(count + 1, level / 255 * photons)
    law[:, -1] = 1.0
    u = _drawn(images, keys)
    found = torch.searchsorted((level + law).flatten(), images + u, right=True)
    return stored(over((found - longest * images.long()).double(), photons) * 255)
