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

# With these, the error of the interpolation is below the rounding error of the tabulated values.
_CELLS, _TABLE_POWERS, _OFFSET = 256, 6, 3.5
_TABULATED = ("M", "A", "1-A", "A'", "A''")


def can_look_up(kappa: Tensor, nu: float) -> bool:
    """Return whether `look_up` may be used for this kappa and order nu."""
    # There are 64 tables: for integer and half-integer orders below 32. In torch.export and
    # torch.jit.trace, tensors may have no values, and a table made from them would be kept.
    is_plain = type(kappa) in (Tensor, nn.Parameter) and not torch.jit.is_tracing()
    return nu < SEAM and float(2 * nu).is_integer() and is_plain


def look_up(kappa: Tensor, nu: float, which: str) -> Tensor:
    """Return the same as `evaluate_directly`, from a table of polynomials in `kappa_to_t`.

    Unlike there, kappa may be negative: a learned kappa can be if values are not checked.
    """
    size = kappa.abs()
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
    """Return a factor that decays like the function; the table holds the smooth quotient."""
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
