"""Bessel functions of the von Mises-Fisher distribution, accurate to the last digits.

Everything follows from one function of the concentration kappa in dimension n, the log density
at the mode, M(kappa) = log C_n(kappa) + kappa, and its derivatives:

    M' = 1 - A,  A = I_{n/2}(kappa) / I_{n/2-1}(kappa) = E[mu.z],  A' = Var[mu.z],  A'' = skew.

Unlike log C, M does not grow with kappa, so densities, entropies and divergences computed from it
keep their digits at kappa = 1e8. `debye` computes them. For n < 66 this takes hundreds of
operations, so a tensor of kappas is looked up in a table of polynomials, computed once for each n
(`bessel_table`). If kappa is a number, its values are computed once, without a table.

All computations are in float64 and rounded once, whatever the dtype. kappa has one value per
distribution, not one per coordinate, so the cost is small compared to sampling.
"""

import math
import operator
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from compressive.distributions.bessel_table import can_look_up, look_up
from compressive.distributions.debye import evaluate_directly
from compressive.platforms.float64 import to_float64


def log_normalizer(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return log C_n(kappa); the density on the unit sphere of R^n is C_n exp(kappa mu.z)."""
    return _derivative(kappa, _bessel_order(n), "log C")


def log_mode_density(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return log C_n(kappa) + kappa, the log density at the mode z = mu."""
    return _derivative(kappa, _bessel_order(n), "M")


def mean_resultant_length(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return A_n(kappa) = E[mu.z], in [0, 1): the length of the mean of z."""
    return _derivative(kappa, _bessel_order(n), "A")


def spherical_variance(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return 1 - A_n(kappa), in (0, 1], without cancellation."""
    return _derivative(kappa, _bessel_order(n), "1-A")


def cosine_variance(kappa: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return A_n'(kappa) = Var[mu.z]."""
    return _derivative(kappa, _bessel_order(n), "A'")


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
        evaluate = look_up if can_look_up(kappa, nu) else evaluate_directly
        return evaluate(kappa, nu, which)

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


def _bessel_order(n: int) -> float:
    """Return the order nu = n/2 - 1 of the Bessel function, a constant for torch.compile."""
    return operator.index(n) / 2 - 1


def _derivative(kappa: Tensor, nu: float, which: str) -> Tensor:
    result = _Derivative.apply(to_float64(kappa), nu, which)
    assert isinstance(result, Tensor)
    return result.to(torch.promote_types(kappa.dtype, torch.float32)).to(kappa.device)
