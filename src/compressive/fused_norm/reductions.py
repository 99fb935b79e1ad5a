"""Triton kernels for the sums over a batch that batch norm needs; import only if Triton is there.

An activation in channels_last memory format is a matrix of `rows` = batch * height * width lines of
`channels` values. Each program reads tiles of whole lines or parts of lines, at a distance, and
writes one row of partial results. A second kernel adds these rows. There are no atomics, so that
results do not depend on the order of programs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


class ReductionTile(NamedTuple):
    """How much one program reads at once; the product of rows and columns is 8 per thread."""

    columns: int = 128  # at most; 8 values are 16 bytes, the longest load of a thread
    unroll: int = 4  # tiles that are read before any is used
    warps: int = 4
    programs: int = 1056  # eight for each of the 132 processors of an H200

    def block(self, channels: int) -> tuple[int, int]:
        """Return rows and columns of a tile."""
        columns = min(self.columns, triton.next_power_of_2(channels))
        return max(256 * self.warps // columns, 1), columns


MOMENTS_TILE = ReductionTile(columns=64)
GRADIENT_TILE = ReductionTile()


@triton.jit
def _moments_kernel(
    x,
    center,
    partial,
    rows,
    channels,
    parts,
    is_even: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    unroll: tl.constexpr,
):
    """Write sums of deviations from `center` and of their squares to partial[:, part]."""
    part = tl.program_id(0)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < channels
    line = tl.arange(0, height)
    # All programs compute the same center from a few rows of the whole batch. It is near the mean,
    # so that no digits cancel when the variance is computed from the sums.
    sample = x + (line * (rows // height)).to(tl.int64)[:, None] * channels + column[None, :]
    middle = tl.sum(tl.load(sample, mask=inside[None, :], other=0.0).to(tl.float32), 0) / height
    if part == 0:
        tl.store(center + column, middle, mask=inside)
    place = line[:, None] * channels + column[None, :]
    chunk: tl.constexpr = height * unroll
    total = tl.zeros((height, width), tl.float32)
    squares = tl.zeros((height, width), tl.float32)
    start = part * chunk
    while start < rows:
        begin = x + tl.cast(start, tl.int64) * channels
        for step in tl.static_range(unroll):  # pyright: ignore[reportGeneralTypeIssues]
            here = begin + step * height * channels + place
            if is_even:
                deviation = tl.load(here).to(tl.float32) - middle[None, :]
            else:
                both = ((start + step * height + line) < rows)[:, None] & inside[None, :]
                value = tl.load(here, mask=both, other=0.0).to(tl.float32)
                deviation = tl.where(both, value - middle[None, :], 0.0)
            total += deviation
            squares += deviation * deviation
        start += parts * chunk
    target = partial + part * channels + column
    tl.store(target, tl.sum(total, 0), mask=inside)
    tl.store(target + parts * channels, tl.sum(squares, 0), mask=inside)


@triton.jit
def _gradient_kernel(
    grad,
    x,
    mean,
    inverse,
    scale,
    bias,
    partial,
    rows,
    channels,
    parts,
    has_relu: tl.constexpr,
    is_even: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    unroll: tl.constexpr,
):
    """Write sums of gradients and of gradients times normalized x to partial[:, part]."""
    part = tl.program_id(0)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < channels
    center = tl.load(mean + column, mask=inside, other=0.0)[None, :]
    slope, offset = center, center
    if has_relu:
        slope = tl.load(scale + column, mask=inside, other=0.0)[None, :]
        offset = tl.load(bias + column, mask=inside, other=0.0)[None, :]
    line = tl.arange(0, height)
    place = line[:, None] * channels + column[None, :]
    chunk: tl.constexpr = height * unroll
    total = tl.zeros((height, width), tl.float32)
    products = tl.zeros((height, width), tl.float32)
    start = part * chunk
    while start < rows:
        begin = start.to(tl.int64) * channels
        for step in tl.static_range(unroll):  # pyright: ignore[reportGeneralTypeIssues]
            here = begin + step * height * channels + place
            if is_even:
                slant = tl.load(grad + here).to(tl.float32)
                deviation = tl.load(x + here).to(tl.float32) - center
            else:
                both = ((start + step * height + line) < rows)[:, None] & inside[None, :]
                slant = tl.load(grad + here, mask=both, other=0.0).to(tl.float32)
                deviation = tl.load(x + here, mask=both, other=0.0).to(tl.float32) - center
            if has_relu:
                slant = tl.where(deviation * slope + offset > 0, slant, 0.0)
            total += slant
            products += slant * deviation
        start += parts * chunk
    target = partial + part * channels + column
    tl.store(target, tl.sum(total, 0), mask=inside)
    unit = tl.load(inverse + column, mask=inside, other=0.0)
    tl.store(target + parts * channels, tl.sum(products, 0) * unit, mask=inside)


@triton.jit
def _add_parts_kernel(partial, sums, channels, parts, height: tl.constexpr, width: tl.constexpr):
    """Add the rows of partial[i] to sums[i]; the second program id is i."""
    column = tl.program_id(0) * width + tl.arange(0, width)
    inside = column < channels
    total = tl.zeros((height, width), tl.float32)
    begin = partial + tl.program_id(1) * parts * channels
    start = tl.program_id(0) * 0
    while start < parts:
        part = start + tl.arange(0, height)
        both = (part < parts)[:, None] & inside[None, :]
        total += tl.load(begin + part[:, None] * channels + column[None, :], mask=both, other=0.0)
        start += height
    tl.store(sums + tl.program_id(1) * channels + column, tl.sum(total, 0), mask=inside)


_MERGE: dict[str, int] = {"height": 128, "width": 8}  # 8 values are one sector of 32 bytes


class _Grid(NamedTuple):
    rows: int
    channels: int
    height: int
    width: int
    parts: int
    blocks: int  # of columns
    is_even: bool


def _grid(x: Tensor, tile: ReductionTile) -> _Grid:
    channels = x.shape[1]
    rows = x.numel() // channels
    height, width = tile.block(channels)
    blocks = triton.cdiv(channels, width)
    chunk = height * tile.unroll
    parts = max(min(tile.programs // blocks, triton.cdiv(rows, chunk)), 1)
    is_even = rows % chunk == 0 and channels % width == 0
    return _Grid(rows, channels, height, width, parts, blocks, is_even)


def launcher(kernel: Any) -> Any:
    """Return what torch.compile can trace; Triton's interpreter has other kernels."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def add_parts(partial: Tensor) -> Tensor:
    """Return the sums of partial[0] and partial[1] over parts: [2, channels]."""
    _, parts, channels = partial.shape
    sums = partial.new_empty((2, channels))
    launcher(_add_parts_kernel)[(triton.cdiv(channels, _MERGE["width"]), 2)](
        partial, sums, channels, parts, **_MERGE, num_warps=4
    )
    return sums


def launch_moments(x: Tensor, tile: ReductionTile) -> tuple[Tensor, Tensor]:
    """Return a center per channel, and the sums of deviations from it and of their squares."""
    grid = _grid(x, tile)
    rows, channels, parts = grid.rows, grid.channels, grid.parts
    center = x.new_empty(channels, dtype=torch.float32)
    partial = x.new_empty((2, parts, channels), dtype=torch.float32)
    launcher(_moments_kernel)[(parts, grid.blocks)](
        x,
        center,
        partial,
        rows,
        channels,
        parts,
        is_even=grid.is_even,
        height=grid.height,
        width=grid.width,
        unroll=tile.unroll,
        num_warps=tile.warps,
    )
    return center, add_parts(partial)


def launch_gradient_sums(
    grad: Tensor,
    x: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    has_relu: bool,
    tile: ReductionTile,
) -> Tensor:
    """Return sums of gradients, and of gradients times normalized x, per channel: [2, channels]."""
    grid = _grid(x, tile)
    channels, parts = grid.channels, grid.parts
    partial = x.new_empty((2, parts, channels), dtype=torch.float32)
    launcher(_gradient_kernel)[(parts, grid.blocks)](
        grad,
        x,
        *rows,
        partial,
        grid.rows,
        channels,
        parts,
        has_relu=has_relu,
        is_even=grid.is_even,
        height=grid.height,
        width=grid.width,
        unroll=tile.unroll,
        num_warps=tile.warps,
    )
    return add_parts(partial)


@triton_op("compressive::batch_moments", mutates_args={})
def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of a channels_last tensor."""
    center, sums = launch_moments(x, MOMENTS_TILE)
    offset, square = (sums / (x.numel() // x.shape[1])).unbind()
    return center + offset, (square - offset * offset).clamp(min=0)


@triton_op("compressive::batch_gradient_sums", mutates_args={})
def batch_gradient_sums(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    scale: Tensor,
    bias: Tensor,
    has_relu: bool,
) -> Tensor:
    """Return sums of gradients, and of gradients times normalized x, per channel: [2, channels].

    has_relu: whether ReLU follows; gradients count where (x - mean) * scale + bias > 0.
    """
    return launch_gradient_sums(grad, x, (mean, inverse, scale, bias), has_relu, GRADIENT_TILE)
