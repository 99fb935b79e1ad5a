"""Bessel functions of a tensor of kappas, looked up in tables of polynomials."""

from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.distributions.cells import (
    centers_of_cells,
    interpolation,
    kappa_to_t,
    locate,
    powers_of,
    t_to_kappa,
)
from compressive.distributions.debye import SEAM, evaluate_directly
from compressive.distributions.tracing import traced_as_constant, without_tracing

# The error of a table is below the rounding of the values it is made of.
_CELLS, _TABLE_POWERS, _OFFSET = 256, 6, 3.5
_TABULATED = ("M", "A", "1-A", "A'", "A''")


def can_look_up(kappa: Tensor, nu: float) -> bool:
    """Return whether a table replaces hundreds of operations here, and may be kept for later."""
    # Others than integers and halves, of which there are 64, would each need a table. Tensors
    # without values, as in torch.export, and torch.jit.trace would make a table without values.
    is_plain = type(kappa) in (Tensor, nn.Parameter) and not torch.jit.is_tracing()
    return nu < SEAM and float(2 * nu).is_integer() and is_plain


def look_up(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Return what `evaluate_directly` returns, from polynomials in t.

    t = scale / (scale + |kappa|) falls from 1 at kappa = 0 to 0 at infinity.
    """
    size = kappa.abs()  # a learned kappa may become negative where values are not checked
    t = kappa_to_t(size, nu + _OFFSET)
    index, x = locate(_CELLS * t, _CELLS)
    row = _TABULATED.index("M" if which == "log C" else which)
    cell = F.embedding(index, _constant_bessel_table(nu, kappa.device)[row])
    smooth = (powers_of(x.unsqueeze(-1), _TABLE_POWERS) @ cell.unsqueeze(-1))[..., 0, 0]
    if which in ("log C", "M"):
        m = torch.sub(smooth, torch.log(t), alpha=nu + 0.5)
        return m - size if which == "log C" else m + (kappa - size)
    value = smooth * _decay(kappa, t, which)
    return torch.where(kappa < 0, 2 - value, value) if which == "1-A" else value


def _decay(kappa: Tensor, t: Tensor, which: str) -> Tensor:
    """Return the factor with a function's decay; their quotient is smooth and positive."""
    return {"A": kappa * t, "1-A": t, "A'": t * t, "A''": -kappa * t**4}[which]


@traced_as_constant
def _constant_bessel_table(nu: float, device: torch.device) -> Float[Tensor, "function cell power"]:
    return bessel_table(nu, device)


@cache  # without a limit: a CUDA graph may use the memory of any table
def bessel_table(nu: float, device: torch.device) -> Float[Tensor, "function cell power"]:
    """Return the coefficients of M, A, 1-A, A' and A'' in each cell of t, computed in 20 ms."""
    with without_tracing():
        nodes, fit = interpolation(_TABLE_POWERS)
        t = (centers_of_cells(_CELLS).unsqueeze(-1) + nodes) / _CELLS
        kappa = t_to_kappa(t, nu + _OFFSET)
        found: list[Tensor] = []
        for which in _TABULATED:
            values = evaluate_directly(kappa, nu, which)
            if which == "M":
                values = values + (nu + 0.5) * torch.log(t)
            else:
                values = values / _decay(kappa, t, which)
            # Only differences are fitted, because the rounding of the matrix is relative to them.
            coefficients = (values - values[:, :1]) @ fit.mT
            coefficients[:, :1] += values[:, :1]
            found.append(coefficients)
        return torch.stack(found).to(device)
