"""JPEG compression with 4:2:0 chroma in the integer arithmetic of libjpeg-turbo, in batch.

Only the lossy steps are computed; entropy coding changes nothing. All values are whole numbers far
below 2**53 in float64, hence exact.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.corruptions.filters import Pixels, clamp_to_border, stored

ChannelPlane = Float[Tensor, "batch _ _"]

# Annex K of the standard, row after row.
_LUMA = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    *(17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99),
    *(24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99, 99, 99, 99),
    *(99,) * 32,
)


def jpeg_compression(images: Pixels, quality: int) -> Pixels:
    """Compress and decompress with this quality, equal to Pillow."""
    size = images.shape[-1]
    # Padding: columns repeat before chroma is halved, rows after.
    rows, columns = (_grown(size, unit, images.device) for unit in (2, 16))
    red, green, blue = images[:, :, rows][..., columns].double().unbind(1)
    luma = _shifted(19595 * red + 38470 * green + 7471 * blue, 16)
    blues = _shifted(-11059 * red - 21709 * green + 32768 * blue + (128 << 16) - 1, 16)
    reds = _shifted(32768 * red - 27439 * green - 5329 * blue + (128 << 16) - 1, 16)
    luma = _coded(luma, _LUMA, quality)[:, :size, :size]
    half = (size + 1) // 2
    blues, reds = (
        _doubled(_coded(_halved(plane), _CHROMA, quality)[:, :half, :half])[:, :size, :size] - 128
        for plane in (blues, reds)
    )
    red = luma + _shifted(91881 * reds, 16)
    green = luma + _shifted(-22554 * blues - 46802 * reds, 16)
    blue = luma + _shifted(116130 * blues, 16)
    return stored(torch.stack([red, green, blue], 1))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Divide by a power of two and round halves up."""
    return ((values + 2 ** (bits - 1)) / 2**bits).floor()


def _grown(size: int, unit: int, device: torch.device) -> Int[Tensor, " positions"]:
    """Return positions along an axis; repeat the last up to a multiple of `unit`."""
    return clamp_to_border(torch.arange(size + -size % unit, device=device), size)


def _halved(plane: ChannelPlane) -> ChannelPlane:
    """Return means of 2 x 2 pixels, rounded up and down in turn."""
    total = plane.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).sum((2, 4))
    turn = torch.arange(total.shape[2], device=plane.device) % 2 + 1
    return ((total + turn) / 4).floor()


def _doubled(plane: ChannelPlane) -> ChannelPlane:
    """Repeat each pixel 2 x 2, mixed 3 to 1 with the neighbor on that side in both directions."""
    size = plane.shape[1]
    at = clamp_to_border(torch.arange(-1, size + 1, device=plane.device), size)
    rows = plane[:, at][:, :, at]
    middle = 3 * rows[:, 1:-1]
    rows = torch.stack([middle + rows[:, :-2], middle + rows[:, 2:]], 2).flatten(1, 2)
    middle = 3 * rows[:, :, 1:-1]
    left, right = middle + rows[:, :, :-2] + 8, middle + rows[:, :, 2:] + 7
    return (torch.stack([left, right], 3).flatten(2) / 16).floor()


def _coded(plane: ChannelPlane, table: tuple[int, ...], quality: int) -> ChannelPlane:
    """Transform blocks of 8 x 8, quantize, and transform back."""
    plane = plane[:, _grown(plane.shape[1], 8, plane.device)]
    blocks = plane.unflatten(1, (-1, 8)).unflatten(3, (-1, 8)).transpose(2, 3) - 128
    cosines = torch.tensor(_cosines(), dtype=torch.float64, device=plane.device)
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = [min(max((base * scale + 50) // 100, 1), 255) for base in table]
    divisor = torch.tensor(steps, dtype=torch.float64, device=plane.device).view(8, 8)
    found = _shifted(cosines @ _shifted(blocks @ cosines.mT, 11), 15)
    kept = ((found.abs() + 4 * divisor) / (8 * divisor)).floor() * found.sign() * divisor
    blocks = _shifted(_shifted(cosines.mT @ kept, 11) @ cosines, 18) + 128
    return blocks.clamp(0, 255).transpose(2, 3).flatten(3).flatten(1, 2)


def _cosines() -> list[list[int]]:
    """Return the transform of 8 numbers in units of 2**-13, rounded as in Loeffler's scheme.

    Each weight is a sum of rounded constants, which may differ from the rounded sum.
    """
    c2, c6 = 4433 + 6270, 4433  # 0.541 + 0.765, 0.541
    c6_low = 15137 - 4433  # 1.848 - 0.541
    z1, z2, z3, z4, z5 = -7373, -20995, -16069, -3196, 9633
    t4, t5, t6, t7 = 2446, 16819, 25172, 12299
    odd = [  # weights of d0 - d7, d1 - d6, d2 - d5, d3 - d4
        [t7 + z1 + z4 + z5, z5, z4 + z5, z1 + z5],
        [z5, t6 + z2 + z3 + z5, z2 + z5, z3 + z5],
        [z4 + z5, z2 + z5, t5 + z2 + z4 + z5, z5],
        [z1 + z5, z3 + z5, z5, t4 + z1 + z3 + z5],
    ]
    even = [[8192] * 4, [c2, c6, -c6, -c2], [8192, -8192, -8192, 8192], [c6, -c6_low, c6_low, -c6]]
    rows: list[list[int]] = []
    for symmetric, opposite in zip(even, odd, strict=True):
        rows.append(symmetric + symmetric[::-1])
        rows.append(opposite + [-weight for weight in opposite[::-1]])
    return rows
