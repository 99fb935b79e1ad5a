"""Linear filters for corruptions, in float64 on batches of square images.

In float64 rounding is far below a level of uint8, so that neither the device nor the batch size
changes an image.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Num, UInt8
from torch import Tensor

Pixels = UInt8[Tensor, "batch 3 size size"]
Matrix = Float[Tensor, "out size"]


def stored(levels: Num[Tensor, "*shape"], slack: float = 0.0) -> UInt8[Tensor, "*shape"]:
    """Convert levels from 0 to 255 to uint8 like NumPy's cast: clip, then truncate.

    A filtered flat area is a whole number up to rounding; `slack` keeps that number.
    """
    return (levels + slack).clamp(0, 255).to(torch.uint8)


def over(levels: Float[Tensor, "*shape"], divisor: float) -> Float[Tensor, "*shape"]:
    """Return the quotient with IEEE rounding on any device.

    CUDA multiplies by the reciprocal of a Python number, which may reduce a whole level.
    """
    return levels / levels.new_full((), divisor)


SLACK = 1e-9  # far above the rounding of float64, far below a level


def clamp_to_border(at: Tensor, size: int) -> Tensor:
    """Move positions beyond the border onto it: a a | a b c | c c."""
    return at.clamp(0, size - 1)


def reflect(at: Tensor, size: int) -> Tensor:
    """Mirror positions beyond the border, repeating it: b a | a b c | c b."""
    at = at % (2 * size)
    return torch.minimum(at, 2 * size - 1 - at)


def reflect_101(at: Tensor, size: int) -> Tensor:
    """Mirror positions beyond the border, not repeating it: c b | a b c | b a."""
    period = max(2 * size - 2, 1)
    at = at % period
    return torch.minimum(at, period - at).clamp(max=size - 1)


Border = Callable[[Tensor, int], Tensor]


def band(taps: Sequence[float] | Tensor, size: int, border: Border) -> Matrix:
    """Return a centered filter along one axis as a matrix on the CPU."""
    weights = torch.as_tensor(taps, dtype=torch.float64)
    half = len(weights) // 2
    at = torch.arange(size)[:, None] + torch.arange(-half, half + 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, border(at, size), weights.expand(size, -1))


def bell(sigma: float, radius: int) -> Float[Tensor, " taps"]:
    """Return the weights of a Gaussian, with sum 1."""
    if radius == 0:
        return torch.ones(1, dtype=torch.float64)
    at = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 / (sigma * sigma) * at**2)
    return weights / weights.sum()


def gaussian(
    size: int, sigma: float, border: Border = clamp_to_border, truncate: float = 4.0
) -> Matrix:
    """Return SciPy's Gaussian filter along one axis; the default border is scikit-image's."""
    return band(bell(sigma, int(truncate * sigma + 0.5)), size, border)


def zoom(size: int, factor: float) -> Matrix:
    """Return SciPy's linear `zoom` of an axis as a matrix, cut to the center."""
    part = math.ceil(size / factor)
    grown = round(part * factor)
    start, cut = (size - part) // 2, (grown - size) // 2
    at = (torch.arange(size, dtype=torch.float64) + cut) * ((part - 1) / max(grown - 1, 1))
    apart = at[:, None] + start - torch.arange(size)
    return (1 - apart.abs()).clamp(min=0)


def mix(
    images: Float[Tensor, "*batch height width"],
    down: Float[Tensor, "tall height"],
    across: Float[Tensor, "wide width"] | None = None,
) -> Float[Tensor, "*batch tall wide"]:
    """Multiply rows by one matrix and columns by another, or by the same."""
    down = down.to(images.device)
    across = down if across is None else across.to(images.device)
    return down @ (images @ across.mT)


def pick(
    images: Num[Tensor, "batch channels size size"],
    rows: Int[Tensor, " batch #out #across"],
    columns: Int[Tensor, " batch #out #across"],
) -> Num[Tensor, "batch channels out across"]:
    """Gather pixels at rows and columns of each image."""
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[batch, rows, columns].permute(0, 3, 1, 2)


def sample(
    images: Float[Tensor, "batch 3 size size"],
    rows: Float[Tensor, "batch size size"],
    columns: Float[Tensor, "batch size size"],
    border: Border,
) -> Float[Tensor, "batch 3 size size"]:
    """Interpolate bilinearly between pixels."""
    size = images.shape[-1]
    top, left = rows.floor(), columns.floor()
    down, across = (rows - top)[:, None], (columns - left)[:, None]
    total = torch.zeros_like(images)
    for i in (0, 1):
        for j in (0, 1):
            at = border(top.long() + i, size), border(left.long() + j, size)
            weight = (down if i else 1 - down) * (across if j else 1 - across)
            total += weight * pick(images, *at)
    return total


def streak(
    images: UInt8[Tensor, "batch channels size size"],
    angle: Float[Tensor, " batch"],
    radius: int,
    sigma: float,
) -> UInt8[Tensor, "batch channels size size"]:
    """Apply ImageMagick's motion blur: half a Gaussian along `angle` degrees, at whole pixels.

    The result is rounded, not truncated, because ImageMagick returns 8 bits.
    """
    size = images.shape[-1]
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    whole = sum(weights)
    at = torch.arange(size, device=images.device)
    turn = torch.deg2rad(angle)
    total = torch.zeros(images.shape, dtype=torch.float64, device=images.device)
    for i, weight in enumerate(weights):
        if weight < 1e-9:  # the tail of a narrow Gaussian: below 1e-6 of a level
            break
        rows, columns = (
            clamp_to_border(at + (i * part - 0.5).ceil().long()[:, None], size)
            for part in (turn.sin(), turn.cos())
        )
        total += (weight / whole) * pick(images, rows[:, :, None], columns[:, None]).double()
    return stored(total, 0.5)
