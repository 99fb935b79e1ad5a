"""Bessel functions of the von Mises-Fisher distribution, accurate to the last digits.

Everything follows from one function of the concentration kappa in dimension n, the log density
at the mode, M(kappa) = log C_n(kappa) + kappa, and its derivatives:

    M' = 1 - A,  A = I_{n/2}(kappa) / I_{n/2-1}(kappa) = E[mu.z],  A' = Var[mu.z],  A'' = skew.

Unlike log C, M does not grow with kappa, so densities, entropies and divergences computed from it
keep their digits at kappa = 1e8. With nu = n/2 - 1 and s = sqrt(nu^2 + kappa^2):

- s >= 32: Debye's uniform expansion, as a series for log U in 1/s and t^2 = (nu/s)^2, every
  derivative term by term and without a difference of nearly equal numbers;
- s < 32: the same expansion at a higher order nu + m, reduced to nu by the continued fraction
  A_nu / kappa = 1 / (2 (nu + 1) + kappa^2 A_{nu+1} / kappa), all of whose terms are positive.

The second case takes hundreds of operations, so for nu < 32 a tensor of kappas is looked up in a
table of polynomials, computed from both cases once for each nu. A number kappa needs no table.

All computations are in float64 and rounded once, whatever the dtype. kappa has one value per
distribution, not one per coordinate, so the cost is small compared to sampling.
"""

import math
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from compressive.distributions.cells import (
    centers_of_cells,
    interpolation,
    known_while_compiling,
    locate,
    plain_tensors,
    powers_of,
)
from compressive.platforms.float64 import to_float64

# The smallest s for Debye's expansion, and its number of terms. The relative error of A'' at the
# seam is below 1e-14 (checked in tests/distributions/test_special.py).
_SEAM = 32.0
_TERMS = 14
# The table for a tensor of kappas: its error is below the rounding of the values it is made of.
_CELLS, _TABLE_POWERS, _OFFSET = 256, 6, 3.5
_TABULATED = ("M", "A", "1-A", "A'", "A''")


def log_normalizer(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return log C_n(kappa); the density on the unit sphere of R^n is C_n exp(kappa mu.z)."""
    return _derivative(kappa, n / 2 - 1, "log C")


def log_mode_density(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return log C_n(kappa) + kappa, the log density at the mode z = mu."""
    return _derivative(kappa, n / 2 - 1, "M")


def mean_resultant_length(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return A_n(kappa) = E[mu.z], in [0, 1): the length of the mean of z."""
    return _derivative(kappa, n / 2 - 1, "A")


def spherical_variance(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return 1 - A_n(kappa), in (0, 1], without cancellation."""
    return _derivative(kappa, n / 2 - 1, "1-A")


def cosine_variance(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return A_n'(kappa) = Var[mu.z]."""
    return _derivative(kappa, n / 2 - 1, "A'")


def log_bessel_i(nu: float, kappa: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return log I_nu(kappa), the modified Bessel function of the first kind, for any nu >= 0."""
    if not nu >= 0:
        raise ValueError(f"nu must be 0 or more, got {nu}")
    k = to_float64(kappa)
    log_power = nu * torch.log(k) if nu else 0.0
    log_i = log_power - (nu + 1) * math.log(2 * math.pi) - _derivative(k, nu, "log C")
    return log_i.to(torch.promote_types(kappa.dtype, torch.float32)).to(kappa.device)


def log_area(n: int) -> float:
    """Return the log area of the unit sphere in R^n: the entropy of the uniform distribution."""
    return math.log(2) + n / 2 * math.log(math.pi) - math.lgamma(n / 2)


class Constants(NamedTuple):
    """Values of the functions at a fixed kappa, as Python floats."""

    log_normalizer: float
    log_mode_density: float
    mean_resultant_length: float
    spherical_variance: float
    cosine_variance: float


@lru_cache(maxsize=1024)
def constants(kappa: float, n: int) -> Constants:
    """Return the functions' values at kappa, cached."""
    k = torch.tensor(kappa, dtype=torch.float64, device="cpu")
    names = ("log C", "M", "A", "1-A", "A'")
    return Constants(*(evaluate_directly(k, n / 2 - 1, name).item() for name in names))


# The derivative of each function, with its sign.
_NEXT = {"log C": ("A", -1), "M": ("1-A", 1), "A": ("A'", 1), "1-A": ("A'", -1), "A'": ("A''", 1)}


class _Derivative(Function):
    """One link of the chain M -> 1 - A -> A' -> A''; each backward is the next forward."""

    # Input and output are float64: torch 2.11 compiles a no-op cast inside a Function to a zero
    # gradient.

    generate_vmap_rule = True

    @staticmethod
    def forward(kappa: Tensor, nu: float, which: str) -> Tensor:
        return evaluate_directly(kappa, nu, which) if nu >= _SEAM else _look_up(kappa, nu, which)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        kappa, ctx.nu, ctx.which = inputs
        ctx.save_for_backward(kappa)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (kappa,) = ctx.saved_tensors
        if ctx.which not in _NEXT:
            raise NotImplementedError("the vMF normalizer is differentiable up to third order")
        which, sign = _NEXT[ctx.which]
        return sign * grad * _derivative(kappa, ctx.nu, which), None, None


def _derivative(kappa: Tensor, nu: float, which: str) -> Tensor:
    result = _Derivative.apply(to_float64(kappa), nu, which)
    assert isinstance(result, Tensor)
    return result.to(torch.promote_types(kappa.dtype, torch.float32)).to(kappa.device)


def _look_up(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Return what `evaluate_directly` returns, from polynomials in t, from 1 at kappa = 0 to 0."""
    if which == "log C":
        return _look_up(kappa, nu, "M") - kappa
    scale = nu + _OFFSET
    t = scale / (scale + kappa)
    index, x = locate(_CELLS * t, _CELLS)
    cell = F.embedding(index, _function_cells(nu, kappa.device)[_TABULATED.index(which)])
    smooth = (powers_of(x.unsqueeze(-1), _TABLE_POWERS) @ cell.unsqueeze(-1))[..., 0, 0]
    if which == "M":
        return smooth - (nu + 0.5) * torch.log(t)
    return smooth * _tail_factor(kappa, t, which)


def _tail_factor(kappa: Tensor, t: Tensor, which: str) -> Tensor:
    """Return how a function goes to 0; relative to it, the function is smooth and positive."""
    return {"A": kappa * t, "1-A": t, "A'": t * t, "A''": -kappa * t**4}[which]


@known_while_compiling
def _function_cells(nu: float, device: torch.device) -> Float[Tensor, "function cell power"]:
    return function_cells(nu, device)


@cache  # without a limit: a CUDA graph may use the memory of any table
def function_cells(nu: float, device: torch.device) -> Float[Tensor, "function cell power"]:
    """Return the coefficients of M, A, 1-A, A' and A'' in each cell of t, computed in 20 ms."""
    with plain_tensors():
        nodes, fit = interpolation(_TABLE_POWERS)
        t = (centers_of_cells(_CELLS).unsqueeze(-1) + nodes) / _CELLS
        kappa = (nu + _OFFSET) * (1 - t) / t
        found: list[Tensor] = []
        for which in _TABULATED:
            values = evaluate_directly(kappa, nu, which)
            if which == "M":
                values = values + (nu + 0.5) * torch.log(t)
            else:
                values = values / _tail_factor(kappa, t, which)
            # Only differences are fitted, because the rounding of the matrix is relative to them.
            coefficients = (values - values[:, :1]) @ fit.mT
            coefficients[:, :1] += values[:, :1]
            found.append(coefficients)
        return torch.stack(found).to(device)


def evaluate_directly(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Return one of log C, M, A, 1-A, A', A'', for kappa in float64 and without a table."""
    if which == "log C":
        return evaluate_directly(kappa, nu, "M") - kappa
    value = _debye(kappa, nu, which)
    if nu >= _SEAM:
        return value
    # The clamp keeps the values that `where` discards finite.
    below = _descend(kappa.clamp(max=_SEAM), nu, which)
    return torch.where(kappa * kappa + nu * nu < _SEAM**2, below, value)


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
    steps = math.ceil(_SEAM - nu)
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
    nearest = max(nu, _SEAM)
    terms = 1
    while terms < _TERMS and math.gamma(terms) / (2 * nearest) ** terms > 1e-16:
        terms += 1
    powers = [0.0] * (3 * terms + 1)
    for k in range(1, terms + 1):
        for j in range(k + 1):
            m = k + 2 * j
            weight = (1, m, m * (m + 2), m * (m + 2) * (m + 4))[order]
            powers[m] += weight * _LOG_U[k][j] * nu ** (2 * j)
    total = torch.zeros_like(s)
    for coefficient in reversed(powers[1:]):
        total = (total + coefficient) / s
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
