"""The angle of a von Mises-Fisher sample as a function of a chi variable, by exact integrals.

The angle theta to the mean direction has the density f(theta) ~ sin(theta)^(n-2) exp(kappa
cos(theta)) on [0, pi]. `Tail` solves F(theta) = F_chi(r), chi with n - 1 degrees of freedom, with
a fixed number of Halley steps on an integral of fixed size, about 10 microseconds per angle. The
tables of `vmf_sampler` and the polynomials of `radial_polynomial` come from it; nothing is solved
while sampling.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Chosen by tests/distributions/test_vmf_sampler.py: over n = 2 .. 65536, kappa = 0 .. 1e8 and all
# quantiles from 1e-12 to 1 - 1e-12, |F(theta) - F_chi(r)| < 1e-11, the rounding at n = 65536.
_NODES = 64
_HALLEY_STEPS = 4
_REACH = 10.5
_MIN_POSITIVE = 1e-300


class Tail(NamedTuple):
    """For each sample, the tail of theta's distribution with about half of the mass or less."""

    # The probability of a small tail keeps its digits; one minus it would not. The unknown is the
    # distance of theta from a pole. The pole is 0 for the lower tail. For the upper tail it is pi,
    # or a nearer point if all mass is near 0 and a difference from pi would lose digits.

    n: int
    kappa: Tensor
    log_height: Tensor  # log f(theta) without its terms in theta
    lower: Tensor  # which tail
    mass: Tensor  # probability of the tail
    end: Tensor  # beyond it the density is below e^-55 of the mode's
    pole: Tensor

    @classmethod
    def of(cls, r: Tensor, n: int, kappa: Tensor, log_height: Tensor) -> "Tail":
        """Choose the tail of each r; `log_height` is M + the log area of the sphere in R^(n-1)."""
        lower = r * r < (n - 1) * (1 - 2 / (9 * (n - 1))) ** 3  # near the median
        # In the chord c = 2 sin(theta/2), log f is concave with curvature at least
        # kappa + 1.49 (n - 2) everywhere, so `_REACH` such widths from the mode are enough.
        mode = torch.sqrt((n - 2) * _squared_chord_per_r(n - 2, kappa))
        reach = _REACH / torch.sqrt(kappa + 1.49 * (n - 2)).clamp(min=_MIN_POSITIVE)
        first = 2 * torch.asin((mode - reach).clamp(min=0) / 2)
        last = 2 * torch.asin((mode + reach).clamp(max=2) / 2)
        end = torch.where(lower, first, last)
        pole = torch.where(lower, torch.zeros_like(last), (2 * last).clamp(max=math.pi))
        return cls(n, kappa, log_height, lower, _chi_tail(r, n, lower), end, pole)

    def solve(self, r: Tensor) -> Tensor:
        """Return theta."""
        return self._theta(self._distance(r))

    def log_half_tangent(self, r: Tensor) -> Tensor:
        """Return log tan(theta/2), also accurate where theta is pi to all digits."""
        distance = self._distance(r)
        below = torch.log(torch.tan(self._theta(distance) / 2))
        return torch.where(self.pole == math.pi, -torch.log(torch.tan(distance / 2)), below)

    def _theta(self, distance: Tensor) -> Tensor:
        return self.pole + torch.where(self.lower, 1.0, -1.0) * distance

    def _distance(self, r: Tensor) -> Tensor:
        """Run Halley's iteration for log F as a function of the log distance to the pole."""
        per_r = _squared_chord_per_r(self.n - 1, self.kappa)
        start = 2 * torch.atan(r * torch.sqrt(per_r / (4 - (self.n - 1) * per_r)))
        distance = (start - self.pole).abs().clamp(min=_MIN_POSITIVE)
        sign = torch.where(self.lower, 1.0, -1.0)
        for _ in range(_HALLEY_STEPS):
            theta = self._theta(distance)
            tail = self.integral(theta).clamp(min=_MIN_POSITIVE)
            error = torch.log(tail / self.mass)
            rate = (distance * torch.exp(self.log_density(theta)) / tail).clamp(min=_MIN_POSITIVE)
            bend = 1 + sign * distance * self.log_density_slope(theta) - rate
            step = error / rate
            step = step / (1 - 0.5 * step * bend).clamp(min=0.5)
            distance = (distance * torch.exp(-step.clamp(-30, 30))).clamp(_MIN_POSITIVE, math.pi)
        return distance

    def log_density(self, theta: Tensor) -> Tensor:
        """Return log f(theta)."""
        chord = torch.sin(theta / 2)
        log_ring = (self.n - 2) * torch.log(torch.sin(theta).clamp(min=_MIN_POSITIVE))
        return self.log_height + log_ring - 2 * self.kappa * chord * chord

    def log_density_slope(self, theta: Tensor) -> Tensor:
        """Return d log f / d theta."""
        return (self.n - 2) / torch.tan(theta) - self.kappa * torch.sin(theta)

    def integral(self, theta: Tensor) -> Tensor:
        """Integrate f from the tail's end to theta."""
        at, weights = _fejer(self.end, theta)
        kappa, log_height = self.kappa.unsqueeze(-1), self.log_height.unsqueeze(-1)
        density = torch.exp(self._replace(kappa=kappa, log_height=log_height).log_density(at))
        return (density * weights).sum(-1)


def _chi_tail(r: Tensor, n: int, lower: Tensor) -> Tensor:
    """Return the probability below or above r of chi with n - 1 degrees of freedom."""
    # torch.special.gammainc has errors of 1e-9 for 40 to 400 degrees of freedom (torch 2.15).
    mode = math.sqrt(n - 2)
    end = torch.where(lower, max(mode - _REACH, 0.0), mode + _REACH).to(r.dtype)
    at, weights = _fejer(end, r)
    height = (n - 3) / 2 * math.log(2) + math.lgamma((n - 1) / 2)
    log_density = (n - 2) * torch.log(at.clamp(min=_MIN_POSITIVE)) - at * at / 2 - height
    return (torch.exp(log_density) * weights).sum(-1).clamp(min=_MIN_POSITIVE)


def _squared_chord_per_r(m: int, kappa: Tensor) -> Tensor:
    """Return c^2 / m for the chord c that maximizes c^m (1 - c^2/4)^(m/2) exp(-kappa c^2/2)."""
    # It is 2 (1 - w) / m with kappa (1 - w^2) = m w, in a form without cancellation.
    root = torch.sqrt(m * m + 4 * kappa * kappa)
    share = 1 + m / (root + 2 * kappa).clamp(min=_MIN_POSITIVE)
    return 2 * share / (m + root).clamp(min=_MIN_POSITIVE)


def _fejer(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and positive weights of Fejer's first rule, on a new last axis."""
    phase = (torch.arange(_NODES, dtype=stop.dtype, device=stop.device) + 0.5) * (math.pi / _NODES)
    k = torch.arange(1, _NODES // 2 + 1, dtype=stop.dtype, device=stop.device)
    waves = torch.cos(2 * phase.unsqueeze(-1) * k) / (4 * k * k - 1)
    weights = (2 / _NODES) * (1 - 2 * waves.sum(-1))
    half = ((stop - start) / 2).unsqueeze(-1)
    return start.unsqueeze(-1) + half * (1 + torch.cos(phase)), half.abs() * weights


def radius_range(n: int) -> tuple[float, float]:
    """Return quantiles 1e-13 and 1 - 1e-13 of r, by Wilson and Hilferty's approximation."""
    m = n - 1
    spread = 7.35 * math.sqrt(2 / (9 * m))
    low, high = (math.sqrt(m * max(1 - 2 / (9 * m) + sign * spread, 0.0) ** 3) for sign in (-1, 1))
    return low, high
