"""Bessel functions of the von Mises-Fisher distribution, from series and continued fractions.

With nu = n/2 - 1 and s = sqrt(nu^2 + kappa^2):

- s >= 32: Debye's uniform expansion, as a series for log U in 1/s and t^2 = (nu/s)^2. Derivatives
  are taken term by term, without differences of nearly equal numbers.
- s < 32: The same expansion at a higher order nu + m, reduced to nu by the continued fraction
  A_nu / kappa = 1 / (2 (nu + 1) + kappa^2 A_{nu+1} / kappa), all of whose terms are positive.

`special` defines the functions.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from compressive.distributions.cells import affine

# The smallest s for Debye's expansion, and its number of terms. The relative error of A'' at the
# seam is below 1e-14 (checked in tests/distributions/test_special.py).
SEAM = 32.0
_TERMS = 14


def evaluate_directly(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Return one of log C, M, A, 1-A, A', A'', for kappa in float64 and without a table."""
    if which == "log C":
        return evaluate_directly(kappa, nu, "M") - kappa
    value = _debye(kappa, nu, which)
    if nu >= SEAM:
        return value
    # The clamp keeps the values that `where` discards finite.
    below = _descend(kappa.clamp(max=SEAM), nu, which)
    return torch.where(kappa * kappa + nu * nu < SEAM**2, below, value)


def _debye(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Return Debye's expansion of M, A, 1-A, A' or A'', for nu^2 + kappa^2 >= 32^2."""
    s = torch.sqrt(kappa * kappa + nu * nu).clamp(min=1.0)  # clamps only discarded values
    if which == "M":
        growth = nu * torch.log((nu + s) / (2 * math.pi)) + 0.5 * torch.log(s / (2 * math.pi))
        return growth - nu * nu / (s + kappa) - _series(s, nu, 0)
    sigma2, tau = 1 / (s * s), (nu / s) ** 2
    if which == "A":
        return kappa * (1 / (nu + s) - sigma2 * (0.5 + _series(s, nu, 1)))
    if which == "1-A":
        rest = kappa * sigma2 * (0.5 + _series(s, nu, 1))
        return (nu + nu * nu / (s + kappa)) / (nu + s) + rest
    if which == "A'":
        rest = 0.5 - tau - _series(s, nu, 1) + (1 - tau) * _series(s, nu, 2)
        return nu / (s * (nu + s)) + sigma2 * rest
    rest = 4 * tau - 1 + 3 * _series(s, nu, 2) - (1 - tau) * _series(s, nu, 3)
    return kappa * (sigma2 * sigma2 * rest - nu * (nu + 2 * s) / (s**3 * (nu + s) ** 2))


def _descend(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Evaluate the same functions for small nu and kappa, from Debye at nu + m down to nu."""
    # Each step computes a = A / kappa as a function of x = kappa^2, and its two derivatives only if
    # they are needed: on a GPU each operation costs a launch.
    steps = math.ceil(SEAM - nu)
    top = nu + steps
    x = kappa * kappa
    s = torch.sqrt(x + top * top)
    sigma = 1 / s
    a = 1 / (top + s) - sigma**2 * (0.5 + _series(s, top, 1))
    differentiate = which in ("A'", "A''")
    a_x = a_xx = product = torch.ones_like(kappa)
    if differentiate:
        a_x = 0.5 * sigma**4 * (1 + _series(s, top, 2)) - 0.5 * sigma / (top + s) ** 2
        a_xx = 0.25 * sigma**2 / (top + s) ** 2 * (sigma + 2 / (top + s))
        a_xx = a_xx - sigma**6 * (1 + 0.25 * _series(s, top, 3))
    for step in range(1, steps + 1):
        previous = a
        a = 1 / (2 * (top - step + 1) + x * previous)
        if differentiate:
            slope = previous + x * a_x
            bend = 2 * a_x + x * a_xx
            a_x, a_xx = -a * a * slope, a * a * (2 * a * slope * slope - bend)
        if which == "M":
            product = product * (2 * math.pi * a)
    if which == "M":
        return _debye(kappa, top, "M") + torch.log(product)
    if which == "A":
        return kappa * a
    if which == "1-A":
        return 1 - kappa * a
    if which == "A'":
        return a + 2 * x * a_x
    return 2 * kappa * (3 * a_x + 2 * x * a_xx)


def _series(s: Tensor, nu: float, order: int) -> Tensor:
    """Return sum_kj c_kj s^-k (nu/s)^2j; `order` factors of m (m+2) (m+4) per term, m = k + 2j."""
    # nu is a number, so this is one polynomial in 1/s. Larger nu need fewer terms.
    nearest = max(nu, SEAM)
    terms = 1
    while terms < _TERMS and math.gamma(terms) / (2 * nearest) ** terms > 1e-16:
        terms += 1
    powers = [0.0] * (3 * terms + 1)
    for k in range(1, terms + 1):
        for j in range(k + 1):
            m = k + 2 * j
            weight = (1, m, m * (m + 2), m * (m + 2) * (m + 4))[order]
            powers[m] += weight * _LOG_U[k][j] * nu ** (2 * j)
    # Horner's rule in 1/s^2, two coefficients at a time: half as many operations as in 1/s.
    powers += [0.0] * (len(powers) % 2)
    sigma = s.reciprocal()
    squared = sigma * sigma
    total = affine(sigma, powers[-1], powers[-2])
    for even, odd in zip(powers[-4::-2], powers[-3::-2], strict=True):
        total = torch.addcmul(affine(sigma, odd, even), total, squared)
    return total


def _log_debye_series(terms: int) -> list[list[float]]:
    """Return c_kj of log U = sum c_kj sigma^k tau^j, from the recurrence of U (DLMF 10.41.9)."""
    u = [[Fraction(1)]]
    for k in range(terms):
        following = [Fraction(0)] * (k + 2)
        for j, c in enumerate(u[k]):  # t^m, m = k + 2 j, contributes to t^(m+1) and t^(m+3)
            m = k + 2 * j
            following[j] += c * (Fraction(m, 2) + Fraction(1, 8 * (m + 1)))
            following[j + 1] -= c * (Fraction(m, 2) + Fraction(5, 8 * (m + 3)))
        u.append(following)
    log_u: list[list[Fraction]] = [[Fraction(0)]]
    for k in range(1, terms + 1):  # k U_k = sum_i i L_i U_(k-i)
        row = list(u[k])
        for i in range(1, k):
            for a, left in enumerate(log_u[i]):
                for b, right in enumerate(u[k - i]):
                    row[a + b] -= Fraction(i, k) * left * right
        log_u.append(row)
    return [[float(c) for c in row] for row in log_u]


_LOG_U = _log_debye_series(_TERMS)  # 120 numbers in 10 ms; a table could contain typos
