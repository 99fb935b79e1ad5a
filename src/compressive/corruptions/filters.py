"""Linear filters that the corruptions share, in float64 on batches of square images.

In float64 a filter's rounding is far below what decides a level of uint8: neither the device nor
the batch's size changes an image.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Num, UInt8
from torch import Tensor

Pixels = UInt8[Tensor, "batch 3 size size"]
Matrix = Float[Tensor, "out size"]


def stored(levels: Num[Tensor, "*shape"], slack: float = 0.0) -> UInt8[Tensor, "*shape"]:
    """Levels from 0 to 255 as NumPy's cast stores them: clipped, then truncated.

    What a filter makes of a flat area is a whole number but for rounding; `slack` saves it.
    """
    return (levels + slack).clamp(0, 255).to(torch.uint8)


def over(levels: Float[Tensor, "*shape"], divisor: float) -> Float[Tensor, "*shape"]:
    """The quotient as IEEE rounds it, on any device.

    CUDA multiplies by the reciprocal of a Python number, and a whole level may fall below itself.
    """
    return levels / levels.new_full((), divisor)


SLACK = 1e-9  # far above the rounding of float64, far below a level


def nearest(at: Tensor, size: int) -> Tensor:
    """Positions beyond the border moved onto it: a a | a b c | c c."""
    return at.clamp(0, size - 1)


def reflect(at: Tensor, size: int) -> Tensor:
    """Positions beyond the border mirrored, the border twice: b a | a b c | c b."""
    at = at % (2 * size)
    return torch.minimum(at, 2 * size - 1 - at)


def reflect_101(at: Tensor, size: int) -> Tensor:
    """Positions beyond the border mirrored, the border once: c b | a b c | b a."""
    period = max(2 * size - 2, 1)
    at = at % period
    return torch.minimum(at, period - at).clamp(max=size - 1)


Border = Callable[[Tensor, int], Tensor]


def band(taps: Sequence[float] | Tensor, size: int, border: Border) -> Matrix:
    """A filter along one axis as a matrix; the middle tap lies on the pixel itself. On the CPU."""
    weights = torch.as_tensor(taps, dtype=torch.float64)
    half = len(weights) // 2
    at = torch.arange(size)[:, None] + torch.arange(-half, half + 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, border(at, size), weights.expand(size, -1))


def bell(sigma: float, radius: int) -> Float[Tensor, " taps"]:
    """Weights of a Gaussian, of sum 1."""
    if radius == 0:
        return torch.ones(1, dtype=torch.float64)
    at = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 / (sigma * sigma) * at**2)
    return weights / weights.sum()


def gaussian(size: int, sigma: float, border: Border = nearest, truncate: float = 4.0) -> Matrix:
    """SciPy's Gaussian filter along one axis; its default border here is scikit-image's."""
    return band(bell(sigma, int(truncate * sigma + 0.5)), size, border)


def zoom(size: int, factor: float) -> Matrix:
    """The middle of an axis magnified by SciPy's linear `zoom`: ends on ends, the rest cut off."""
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
    """Rows mixed by one matrix and columns by another, or by the same."""
    down = down.to(images.device)
    across = down if across is None else across.to(images.device)
    return down @ (images @ across.mT)


def pick(
    images: Num[Tensor, "batch channels size size"],
    rows: Int[Tensor, " batch #out #across"],
    columns: Int[Tensor, " batch #out #across"],
) -> Num[Tensor, "batch channels out across"]:
    """Pixels at each image's own rows and columns."""
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[batch, rows, columns].permute(0, 3, 1, 2)


def sample(
    images: Float[Tensor, "batch 3 size size"],
    rows: Float[Tensor, "batch size size"],
    columns: Float[Tensor, "batch size size"],
    border: Border,
) -> Float[Tensor, "batch 3 size size"]:
    """Values between pixels, bilinear."""
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
    """ImageMagick's motion blur: half a Gaussian laid along `angle`, in degrees, whole pixels.

    Rounded, not truncated: ImageMagick hands on 8 bits.
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
            nearest(at + (i * part - 0.5).ceil().long()[:, None], size)
            for part in (turn.sin(), turn.cos())
        )
        total += (weight / whole) * pick(images, rows[:, :, None], columns[:, None]).double()
    return stored(total, 0.5)
