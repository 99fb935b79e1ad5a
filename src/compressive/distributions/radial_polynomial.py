"""The angle of a von Mises-Fisher sample as one polynomial, for a fixed kappa.

It costs a few multiplications per sample. It exists if n is 40 or more, or if kappa is well
above n. Otherwise `vmf_sampler` uses several polynomials, each for a part of the range.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.distributions.cells import chebyshev_phases
from compressive.distributions.radial_solver import Tail, radius_range
from compressive.distributions.tracing import without_tracing

_MAX_DEGREE = 16


class Transport(NamedTuple):
    """A fit of 1 - cos(theta) = r^2 q(r), where q is a polynomial in (r - center) / width."""

    center: float
    width: float
    coefficients: tuple[float, ...]  # highest power first


def carry(fit: Transport, r: Float[Tensor, "*sample"]) -> Float[Tensor, "*sample"]:
    """Return q(r) = (1 - cos(theta)) / r^2; it is constant outside the fitted range."""
    x = ((r - fit.center) / fit.width).clamp(-1, 1)
    q = torch.full_like(x, fit.coefficients[0])
    for coefficient in fit.coefficients[1:]:
        q = q * x + coefficient
    # This view changes nothing, but torch.compile stores q for it. On the CPU it would evaluate q
    # again for every 16 coordinates of a sample: 10 % of the time of sample and density.
    return q.as_strided(q.shape, q.stride())


@lru_cache(maxsize=256)
def transport(n: int, kappa: float, log_height: float) -> Transport | None:
    """Fit the radial transport of a fixed kappa; return None if no short polynomial fits."""
    # The shortest polynomial with a relative error of 1 - cos(theta) of at most 1e-10.
    low, high = radius_range(n)
    center, width = (high + low) / 2, (high - low) / 2

    def exact(x: Tensor) -> Tensor:
        r = center + width * x
        tail = Tail.of(r, n, torch.full_like(r, kappa), torch.full_like(r, log_height))
        return 2 * (torch.sin(tail.solve(r) / 2) / r) ** 2

    # Interpolate at Chebyshev points of twice the largest degree, then truncate. The dropped
    # coefficients bound the error, and a least-squares fit would not be much better.
    count = 2 * _MAX_DEGREE
    with without_tracing():
        phase = chebyshev_phases(count)
        values = exact(torch.cos(phase))
        orders = torch.arange(count, dtype=torch.float64, device="cpu")
        chebyshev = 2 / count * torch.cos(orders.unsqueeze(-1) * phase) @ values
        chebyshev[0] /= 2
        tail = chebyshev.abs().flip(0).cumsum(0).flip(0)  # tail[d] = error of degree d - 1
        good = (tail[1 : _MAX_DEGREE + 2] <= 1e-10 * values.min()).nonzero()
        if len(good) == 0:
            return None
        powers = _monomials(chebyshev[: int(good[0]) + 1].tolist())
    return Transport(center, width, tuple(reversed(powers)))


def _monomials(chebyshev: list[float]) -> list[float]:
    """Return the coefficients of 1, x, x^2, ... of a sum of Chebyshev polynomials."""
    total = [0.0] * len(chebyshev)
    previous, current = [0.0], [1.0]  # T_{-1} is set to 0 for the first step
    for order, c in enumerate(chebyshev):
        for power, value in enumerate(current):
            total[power] += c * value
        scale = 2.0 if order else 1.0
        following = [0.0] + [scale * value for value in current]
        for power, value in enumerate(previous):
            following[power] -= value
        previous, current = current, following
    return total
