"""Counter-based random numbers, which depend on image, seed, epoch and view only."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.platforms.float64 import to_float64

Integers = Int[Tensor, " batch"]
Keys = Int[Tensor, "batch 2"]

_WORD, _MASK = 2**32, 2**32 - 1
_IMAGES_AT_ONCE = 2**15  # small enough for the processor's cache


def threefry(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return two random 32-bit words for key and counter: Threefry-2x32-20 (Salmon et al. 2011)."""
    # Sums, shifts and xor in int64 never overflow, so results are the same on all devices. Only the
    # lower 32 bits of x count. It stays below 2**38 and is masked at the end: the fewer operations,
    # the faster steps compile, and these are a third of those that make views.
    words = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (c + k for c, k in zip(counter, key, strict=True))
    y = y & _MASK
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = ((y << turn | y >> (32 - turn)) ^ x) & _MASK
        x, y = x + words[(i + 1) % 3], (y + words[(i + 2) % 3] + (i + 1)) & _MASK
    return x & _MASK, y


def image_keys(
    index: Integers, *, seed: int, epoch: int | Integers = 0, view: int | Integers = 0
) -> Keys:
    """Return a key for each image from its index in the dataset, the epoch and the view."""
    for name, value in (("seed", seed), ("epoch", epoch), ("view", view)):
        if isinstance(value, int) and not 0 <= value < _WORD:
            raise ValueError(f"{name} must be from 0 to 2**32 - 1, got {value}")
    index = index.long() & _MASK
    zero = torch.zeros_like(index)
    return torch.stack(threefry((zero + seed, zero + epoch), (index, zero + view)), 1)


def uniforms(keys: Keys, count: int) -> Float[Tensor, "batch count"]:
    """Return uniform numbers on [0, 1) in steps of 2**-32, in float64 (see `to_float64`)."""
    slot = torch.arange((count + 1) // 2, device=keys.device)
    words = threefry((keys[:, :1], keys[:, 1:]), (slot, torch.zeros_like(slot)))
    return to_float64(torch.stack(words, 2).flatten(1)[:, :count]) / _WORD


def uniforms_of_all(
    images: int, count: int, *, seed: int, epoch: int = 0, view: int = 0
) -> Float[Tensor, "images count"]:
    """Return `uniforms` for the keys of images 0 to `images` - 1, on the CPU."""
    # In parts: the integers of 1e8 images at once would take many gigabytes.
    found = to_float64(torch.empty(images, count))
    for part in found.split(_IMAGES_AT_ONCE):
        first = part.storage_offset() // max(1, count)
        index = torch.arange(first, first + len(part))
        part.copy_(uniforms(image_keys(index, seed=seed, epoch=epoch, view=view), count))
    return found
