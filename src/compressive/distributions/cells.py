"""Functions as polynomials in the cells of a grid: the parts that all tables share."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from compressive.checks import outside_func_transforms


def locate(position: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the cell of each position, and the position relative to the center of the cell."""
    index = position.long().clamp(0, count - 1)  # a valid index also for NaN
    return index, position - (index + 0.5)


def powers_of(x: Tensor, count: int) -> Tensor:
    """Return 1, x, ..., x^(count - 1) on a new last axis."""
    return torch.linalg.vander(x, N=count)


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


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Compute numbers only, also inside of torch.func, inference mode and torch.export."""
    # Modes of dispatch would make a table of tensors without values, which is kept.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        outside_func_transforms(),
        _disable_current_modes(),
    ):
        yield


def known_while_compiling(function: Callable) -> Callable:
    """Let torch.compile call this function while tracing and treat the result as a constant."""
    # torch.compiler.assume_constant_result does the same, but imports the compiler (6 seconds).
    function.__dict__["_dynamo_marked_constant"] = True
    return function
