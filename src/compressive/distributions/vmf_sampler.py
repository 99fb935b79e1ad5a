"""The angle between a von Mises-Fisher sample and its mean direction.

A sample is z = cos(theta) mu + sin(theta) u with u uniform on the unit sphere of the tangent
space, and theta of density f(theta) ~ sin(theta)^(n-2) exp(kappa cos(theta)) on [0, pi].

A standard normal vector, projected onto the tangent space, has a uniform direction and,
independently, a length r of the chi distribution with n - 1 degrees of freedom. So z needs no
further randomness and no rejection: theta is the monotone function of r that maps the chi
distribution to f ("radial transport"). It is smooth, and nearly r / sqrt(kappa) at large kappa.

- `turn` looks it up for any kappa, which may differ per sample. Each n has a table of polynomials
  in r and kappa. Their derivative in kappa is the implicit reparameterization gradient.
- `turn_fixed` looks it up in a table of polynomials in r, made for one kappa.
- `turn_in_space` is the closed form for n = 3. No other n has one.

`radial_solver` computes the polynomials once, in float64. `radial_polynomial` has the fastest case,
a single polynomial for one kappa.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from compressive.checks import in_func_transform
from compressive.distributions import special
from compressive.distributions.cells import (
    affine,
    centers_of_cells,
    interpolation,
    kappa_to_t,
    locate,
    powers_of,
    t_to_kappa,
)
from compressive.distributions.debye import evaluate_directly
from compressive.distributions.radial_solver import Tail, radius_range
from compressive.distributions.tracing import without_tracing
from compressive.platforms.float64 import to_float64

_POWERS = 8  # of r and of t in a cell of the table
_ROWS_PER_BLOCK = 16_384  # samples whose powers fit into the cache of a processor


class TableGrid(NamedTuple):
    """The cells of a table: `size` intervals of r from `low` to `high`, and of t from 0 to 1."""

    # The table holds g = log(tan(theta/2) / (r sqrt(t))) with t = `kappa_to_t`. It is smooth
    # for all r and kappa, including kappa = 0 (t = 1) and infinity (t = 0), and the tangent of the
    # half angle keeps its digits near both poles.

    size: int
    low: float
    high: float
    scale: float


def table_grid(n: int) -> TableGrid:
    """Return the cells for dimension n."""
    # Near theta = pi the function bends, more sharply for smaller n. At large n the density is
    # high, so that errors of theta matter more. These counts keep the error of the distribution
    # function below 1e-10 (tests/distributions/test_vmf_sampler.py).
    count = 32 if n < 4 else 8 if 16 <= n <= 1024 else 16
    return TableGrid(count, *radius_range(n), (n - 1) / 2 + 3)


def turn(
    r: Float[Tensor, "*sample 1"],
    n: int,
    kappa: Float[Tensor, "*#sample 1"],
    cells: Float[Tensor, "cells coefficients"],
    *,
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return cos(theta), sin(theta) / r, and d log tan(theta/2) / d kappa, in float64.

    `cells` are `table_cells` of n. The last result is None unless `differentiate`.
    """
    on_cpu = r.device.type == "cpu" and not torch.compiler.is_compiling()
    if not on_cpu or r.numel() <= _ROWS_PER_BLOCK or in_func_transform():
        return _turn_block(r, n, kappa, cells, differentiate)
    pairs = zip(
        r.reshape(-1, 1).split(_ROWS_PER_BLOCK),
        kappa.expand(r.shape).reshape(-1, 1).split(_ROWS_PER_BLOCK),
        strict=True,
    )
    parts = [
        _turn_block(r_part, n, kappa_part, cells, differentiate) for r_part, kappa_part in pairs
    ]
    cosine, scale, *slope = (
        torch.cat(part).view(r.shape) for part in zip(*parts, strict=True) if part[0] is not None
    )
    return cosine, scale, slope[0] if slope else None


def _turn_block(
    r: Tensor, n: int, kappa: Tensor, cells: Tensor, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    grid = table_grid(n)
    r, t = to_float64(r), kappa_to_t(to_float64(kappa), grid.scale)
    # x and y are the positions of r and t in their cells. They share a tensor, because on a GPU
    # each operation costs a launch.
    positions = torch.stack((_radius_position(r, grid), (grid.size * t).expand_as(r)))
    index, x_and_y = locate(positions, grid.size)
    x_powers, y_powers = powers_of(x_and_y, _POWERS).unbind()
    in_y = _sum_over_x(torch.add(index[1], index[0], alpha=grid.size), x_powers, cells)
    half_tangent = torch.exp((y_powers @ in_y).squeeze(-1)) * torch.sqrt(t)
    slope = None
    if differentiate:
        order = torch.arange(1, _POWERS, dtype=t.dtype, device=t.device)
        along_y = ((y_powers[..., :-1] * order) @ in_y[..., 1:, :]).squeeze(-1)  # dg/dy
        # d log tan(theta/2) / dt = 1 / (2 t) + size dg/dy, and dt / dkappa = -t^2 / scale.
        slope = t * affine(t * along_y, -grid.size / grid.scale, -0.5 / grid.scale)
    return *_from_half_tangent(r, half_tangent), slope


def _sum_over_x(cell: Tensor, powers: Tensor, cells: Tensor) -> Tensor:
    """Return the coefficients of 1, y, ..., y^7 in each sample's cell, of shape (..., 8, 1)."""
    if cell.device.type == "cpu" and not (torch.compiler.is_compiling() or in_func_transform()):
        # The same sums in the same order, without a copy of 64 coefficients per sample.
        rows = torch.add(torch.arange(_POWERS, device="cpu"), cell.reshape(-1, 1), alpha=_POWERS)
        weights = powers.reshape(-1, _POWERS)
        table = cells.view(-1, _POWERS)
        found = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
        return found.view(*cell.shape[:-1], _POWERS, 1)
    chosen = F.embedding(cell.squeeze(-1), cells).unflatten(-1, (_POWERS, _POWERS))
    return chosen.mT @ powers.mT


def turn_fixed(
    r: Float[Tensor, "*sample 1"], n: int, cells: Float[Tensor, "cells coefficients"]
) -> tuple[Tensor, Tensor]:
    """Return cos(theta) and sin(theta) / r in float64; `cells` are `fixed_cells` of n and kappa."""
    r = to_float64(r)
    grid = table_grid(n)
    i, x = locate(_radius_position(r, grid), grid.size)
    cell = F.embedding(i.squeeze(-1), cells).unsqueeze(-1)
    return _from_half_tangent(r, torch.exp((powers_of(x, _POWERS) @ cell).squeeze(-1)))


def turn_in_space(
    r: Float[Tensor, "*sample 1"], kappa: Float[Tensor, "..."], *, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the results of `turn` for n = 3.

    With p = exp(-r^2/2), the probability of a larger angle, 1 - cos(theta) = s / kappa for
    exp(-s) = p + (1 - p) exp(-2 kappa).
    """
    r, kappa = to_float64(r).clamp(min=1e-100), to_float64(kappa)
    kappa = kappa.clamp(min=1e-10)  # the difference from kappa = 0 is below 1e-10
    exponent, twice = -0.5 * r * r, 2 * kappa
    p, one_minus_p = torch.exp(exponent), -torch.expm1(exponent)
    rest = one_minus_p * torch.exp(-twice)
    total = p + rest
    log_total = torch.log1p(one_minus_p * torch.expm1(-twice))
    near = -torch.where(total > 0.5, log_total, torch.log(total))  # s; each keeps its digits
    # far is 2 kappa - s, whose difference would lose digits at the opposite pole.
    far = torch.log1p(p * torch.expm1(twice.clamp(max=40)))
    far = torch.where(twice < 40, far, twice - near)
    slope = None
    if differentiate:
        slope = (rest / near - p / far) / total
    return 1 - near / kappa, torch.sqrt(near * far) / (kappa * r), slope


def _from_half_tangent(r: Tensor, per_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos(theta) and sin(theta) / r from tan(theta/2) / r."""
    twice = affine((r * per_r).square(), 0.5, 0.5).reciprocal()  # 1 + cos(theta)
    return twice - 1, twice * per_r


def _radius_position(r: Tensor, grid: TableGrid) -> Tensor:
    """Return the position of r on its axis, in cells; it is constant outside of the range."""
    per_cell = grid.size / (grid.high - grid.low)
    return affine(r, per_cell, -grid.low * per_cell).clamp(0, grid.size)


@cache  # without a limit: a CUDA graph may use the memory of any table
def table_cells(n: int, device: torch.device) -> Float[Tensor, "cells coefficients"]:
    """Return the coefficients of each cell in r and t, computed in 0.3 s (n = 2: 1 s)."""
    grid = table_grid(n)
    with without_tracing():
        nodes, fit = interpolation(_POWERS)
        t = (centers_of_cells(grid.size).unsqueeze(-1) + nodes).flatten() / grid.size
        g = _fitted_in_r(n, t_to_kappa(t, grid.scale), 0.5 * torch.log(t))
        found = torch.einsum("ipjb,qb->ijpq", g.unflatten(-1, (grid.size, _POWERS)), fit)
        return found.reshape(grid.size**2, _POWERS**2).to(device)


@cache
def fixed_cells(n: int, kappa: float, device: torch.device) -> Float[Tensor, "cells coefficients"]:
    """Return the coefficients in r of each cell at one kappa."""
    with without_tracing():
        values = torch.tensor([kappa], dtype=torch.float64, device="cpu")
        return _fitted_in_r(n, values, torch.zeros_like(values)).squeeze(-1).to(device)


def _fitted_in_r(n: int, kappa: Tensor, offset: Tensor) -> Tensor:
    """Return coefficients of log(tan(theta/2) / r) - offset, of shape (cell, power, kappa)."""
    grid = table_grid(n)
    nodes, fit = interpolation(_POWERS)
    position = (centers_of_cells(grid.size).unsqueeze(-1) + nodes).view(-1, 1)
    r = grid.low + (grid.high - grid.low) / grid.size * position
    log_height = evaluate_directly(kappa, n / 2 - 1, "M") + special.log_area(n - 1)
    g = [  # in pieces that fit into the processor's cache
        Tail.of(r, n, k, height).log_half_tangent(r)
        for k, height in zip(kappa.split(8), log_height.split(8), strict=True)
    ]
    values = torch.cat(g, -1) - torch.log(r) - offset
    return fit @ values.unflatten(0, (grid.size, _POWERS))
