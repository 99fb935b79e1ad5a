"""Piecewise polynomials on a grid of equal cells: the parts that all tables share."""

import math

import torch
from torch import Tensor


def locate(position: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the cell of each position, and the position relative to the center of the cell."""
    index = position.long().clamp(0, count - 1)  # a valid index also for NaN
    return index, position - (index + 0.5)


def powers_of(x: Tensor, count: int) -> Tensor:
    """Return 1, x, ..., x^(count - 1) on a new last axis."""
    return torch.linalg.vander(x, N=count)


def affine(x: Tensor, factor: float, offset: float) -> Tensor:
    """Return factor * x + offset as one operation, which is one launch on a GPU."""
    return torch.rsub(x, offset, alpha=-factor)


def kappa_to_t(kappa: Tensor, scale: float) -> Tensor:
    """Return t = scale / (scale + kappa), which is 1 at kappa = 0 and 0 at infinity."""
    return affine(kappa, 1 / scale, 1.0).reciprocal()


def t_to_kappa(t: Tensor, scale: float) -> Tensor:
    """Return the kappa of each t, the inverse of `kappa_to_t`."""
    return scale * (1 - t) / t


def centers_of_cells(count: int) -> Tensor:
    """Return the positions of the centers, as float64 on the CPU."""
    return torch.arange(count, dtype=torch.float64, device="cpu") + 0.5


def interpolation(count: int) -> tuple[Tensor, Tensor]:
    """Return Chebyshev points around 0, and the matrix from values there to coefficients."""
    nodes = torch.cos(chebyshev_phases(count)) / 2
    return nodes, torch.linalg.inv(powers_of(nodes, count))


def chebyshev_phases(count: int) -> Tensor:
    """Return the angles whose cosines are Chebyshev points, as float64 on the CPU."""
    return (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / count)
