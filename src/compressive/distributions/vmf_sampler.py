"""The angle between a von Mises-Fisher sample and its mean direction.

A sample is z = cos(theta) mu + sin(theta) u with u uniform on the unit sphere of the tangent
space, and theta of density f(theta) ~ sin(theta)^(n-2) exp(kappa cos(theta)) on [0, pi].

A standard normal vector, projected onto the tangent space, has a uniform direction and,
independently, a length r of the chi distribution with n - 1 degrees of freedom. So z needs no
further randomness and no rejection: theta is the monotone function of r that maps the chi
distribution to f ("radial transport"). It is smooth, and nearly r / sqrt(kappa) at large kappa.

- `angle` solves F(theta) = F_chi(r) for any kappa, which may differ per sample, with a fixed number
  of Halley steps on an integral of fixed size. It differentiates implicitly in kappa.
- `transport` does the same once for a fixed kappa and fits a polynomial, which costs a few
  multiplications per sample. It returns None if no short polynomial is accurate to 1e-10.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from compressive.checks import in_func_transform, outside_func_transforms
from compressive.platforms.float64 import to_float64

# Chosen by tests/distributions/test_vmf_sampler.py: over n = 2 .. 65536, kappa = 0 .. 1e8 and all
# quantiles from 1e-12 to 1 - 1e-12, |F(theta) - F_chi(r)| < 1e-11, the rounding at n = 65536.
_NODES = 64
_HALLEY_STEPS = 4
_MAX_DEGREE = 16
_REACH = 10.5
_MIN_POSITIVE = 1e-300


def angle(
    r: Float[Tensor, "*sample"],
    n: int,
    kappa: Float[Tensor, "*#sample"],
    log_height: Float[Tensor, "*#sample"],
    mean_cosine: Float[Tensor, "*#sample"],
) -> Float[Tensor, "*sample"]:
    """Return theta with F(theta) = F_chi(r), chi with n - 1 degrees of freedom, in float64.

    The result is differentiable once in kappa (theta at fixed probability) and constant in r.
    `log_height` is log f(theta) without its terms in theta: log C + kappa + the log area of the
    sphere in R^(n-1). `mean_cosine` is A.
    """
    kappa = to_float64(kappa)
    fixed, r, log_height, mean_cosine = (
        to_float64(x).detach() for x in (kappa, r, log_height, mean_cosine)
    )
    with torch.no_grad():
        side = _Side.of(r, n, fixed, log_height)
        theta = side.solve(r)
    if not kappa.requires_grad and not in_func_transform():
        return theta
    with torch.no_grad():
        slope = side.slope(theta, mean_cosine)
    theta = _Implicit.apply(kappa, theta, slope)
    assert isinstance(theta, Tensor)
    return theta


class _Implicit(Function):
    """Implicit reparameterization: d theta / d kappa = -(dF / d kappa) / f at fixed F."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kappa: Tensor, theta: Tensor, slope: Tensor) -> Tensor:
        return theta.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        kappa, _, slope = inputs
        ctx.kappa_shape = kappa.shape
        ctx.save_for_backward(slope)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slope,) = ctx.saved_tensors
        return differentiable_once((grad * slope).sum_to_size(ctx.kappa_shape)), None, None


class _Once(Function):
    """The identity; its own derivative is an error."""

    # torch's once_differentiable does not work with torch.func: second derivatives would be 0.

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise RuntimeError("samples of VonMisesFisher are differentiable once, not twice")


def differentiable_once(gradient: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return a gradient from a backward pass; a second derivative through it raises an error."""
    if torch.compiler.is_compiling():
        return gradient
    result = _Once.apply(gradient)
    assert isinstance(result, Tensor)
    return result


class _Side(NamedTuple):
    """The tail of each sample with (roughly) less than half of the mass, which keeps its digits."""

    # The unknown is the distance of theta from a pole: 0 for the lower tail. For the upper tail it
    # is pi, or a nearer point if all mass is near 0 and a difference from pi would lose digits.

    n: int
    kappa: Tensor
    log_height: Tensor  # log f(theta) without its terms in theta
    lower: Tensor  # which tail
    mass: Tensor  # probability of the tail
    end: Tensor  # beyond it the density is below e^-55 of the mode's
    pole: Tensor

    @classmethod
    def of(cls, r: Tensor, n: int, kappa: Tensor, log_height: Tensor) -> "_Side":
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
        """Run Halley's iteration for log F as a function of the log distance to the pole."""
        per_r = _squared_chord_per_r(self.n - 1, self.kappa)
        start = 2 * torch.atan(r * torch.sqrt(per_r / (4 - (self.n - 1) * per_r)))
        distance = (start - self.pole).abs().clamp(min=_MIN_POSITIVE)
        sign = torch.where(self.lower, 1.0, -1.0)
        for _ in range(_HALLEY_STEPS):
            theta = self.pole + sign * distance
            tail = self.integral(theta).clamp(min=_MIN_POSITIVE)
            error = torch.log(tail / self.mass)
            rate = (distance * torch.exp(self.log_density(theta)) / tail).clamp(min=_MIN_POSITIVE)
            bend = 1 + sign * distance * self.log_density_slope(theta) - rate
            step = error / rate
            step = step / (1 - 0.5 * step * bend).clamp(min=0.5)
            distance = (distance * torch.exp(-step.clamp(-30, 30))).clamp(_MIN_POSITIVE, math.pi)
        return self.pole + sign * distance

    def slope(self, theta: Tensor, mean_cosine: Tensor) -> Tensor:
        """Return d theta / d kappa at fixed probability: -integral of (cos - A) f, over f."""
        sign = torch.where(self.lower, -1.0, 1.0)
        density = torch.exp(self.log_density(theta)).clamp(min=_MIN_POSITIVE)
        return sign * self.integral(theta, mean_cosine) / density

    def log_density(self, theta: Tensor) -> Tensor:
        chord = torch.sin(theta / 2)
        log_ring = (self.n - 2) * torch.log(torch.sin(theta).clamp(min=_MIN_POSITIVE))
        return self.log_height + log_ring - 2 * self.kappa * chord * chord

    def log_density_slope(self, theta: Tensor) -> Tensor:
        return (self.n - 2) / torch.tan(theta) - self.kappa * torch.sin(theta)

    def integral(self, theta: Tensor, mean_cosine: Tensor | None = None) -> Tensor:
        """Integrate f from the tail's end to theta, or (cos - A) f if A is given."""
        at, weights = _fejer(self.end, theta)
        kappa, log_height = self.kappa.unsqueeze(-1), self.log_height.unsqueeze(-1)
        density = torch.exp(self._replace(kappa=kappa, log_height=log_height).log_density(at))
        if mean_cosine is not None:
            density = density * (torch.cos(at) - mean_cosine.unsqueeze(-1))
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
    # Closed forms, so that no table is copied to the device.
    phase = (torch.arange(_NODES, dtype=stop.dtype, device=stop.device) + 0.5) * (math.pi / _NODES)
    k = torch.arange(1, _NODES // 2 + 1, dtype=stop.dtype, device=stop.device)
    waves = torch.cos(2 * phase.unsqueeze(-1) * k) / (4 * k * k - 1)
    weights = (2 / _NODES) * (1 - 2 * waves.sum(-1))
    half = ((stop - start) / 2).unsqueeze(-1)
    return start.unsqueeze(-1) + half * (1 + torch.cos(phase)), half.abs() * weights


class Transport(NamedTuple):
    """1 - cos(theta) = r^2 q(r), q a polynomial in (r - center) / width, as Python floats."""

    center: float
    width: float
    coefficients: tuple[float, ...]  # highest power first


def carry(fit: Transport, r: Float[Tensor, "*sample"]) -> Float[Tensor, "*sample"]:
    """Return q(r) = (1 - cos(theta)) / r^2; it is constant outside the fitted range."""
    x = ((r - fit.center) / fit.width).clamp(-1, 1)
    q = torch.full_like(x, fit.coefficients[0])
    for coefficient in fit.coefficients[1:]:
        q = q * x + coefficient
    return q


@lru_cache(maxsize=256)
def transport(n: int, kappa: float, log_height: float) -> Transport | None:
    """Fit the radial transport of a fixed kappa; return None if no short polynomial fits."""
    # The range covers r from quantile 1e-13 to 1 - 1e-13 (Wilson and Hilferty's approximation). The
    # result is the shortest polynomial with a relative error of 1 - cos(theta) of at most 1e-10.
    m = n - 1
    spread = 7.35 * math.sqrt(2 / (9 * m))
    low, high = (math.sqrt(m * max(1 - 2 / (9 * m) + sign * spread, 0.0) ** 3) for sign in (-1, 1))
    center, width = (high + low) / 2, (high - low) / 2

    def exact(x: Tensor) -> Tensor:
        r = center + width * x
        side = _Side.of(r, n, torch.full_like(r, kappa), torch.full_like(r, log_height))
        return 2 * (torch.sin(side.solve(r) / 2) / r) ** 2

    # Interpolate at Chebyshev points of twice the largest degree, then truncate. The dropped
    # coefficients bound the error, and a least-squares fit would not be much better.
    count = 2 * _MAX_DEGREE
    with torch.no_grad(), outside_func_transforms():  # numbers only, also inside of torch.func
        phase = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / count)
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
