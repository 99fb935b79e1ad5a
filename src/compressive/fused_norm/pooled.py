"""Triton kernels for the stem of a ResNet: batch norm, ReLU and a 3x3 max-pool of stride 2.

The activation between ReLU and pool has four times the size of the result. It is neither written
nor read: the pool stores which of the nine values was largest, and the backward pass reads these
numbers. A window without a positive value has the number 9 and gets no gradient.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from compressive.fused_norm.reductions import ReductionTile, add_parts, launcher

POOL_TILE = ReductionTile(columns=64)


class Pool(NamedTuple):
    """Sizes of a pool. Window i has the rows 2 i - before, ... , 2 i - before + 2."""

    before: int
    height: int
    width: int
    out_height: int
    out_width: int


@triton.jit
def _pool_kernel(
    x,
    mean,
    scale,
    bias,
    pooled,
    index,
    windows,
    channels,
    before,
    height,
    width,
    out_height,
    out_width,
    lines: tl.constexpr,
    columns: tl.constexpr,
):
    """Normalize, apply ReLU and pool; write the largest value of each window and its place."""
    window = tl.program_id(0) * lines + tl.arange(0, lines)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    has_channel = (column < channels)[None, :]
    middle = tl.load(mean + column, mask=column < channels, other=0.0)[None, :]
    slope = tl.load(scale + column, mask=column < channels, other=0.0)[None, :]
    offset = tl.load(bias + column, mask=column < channels, other=0.0)[None, :]
    is_window = window < windows
    row = window // out_width
    left = 2 * (window % out_width) - before
    top = 2 * (row % out_height) - before
    image = (row // out_height).to(tl.int64)
    largest = tl.zeros((lines, columns), tl.float32)
    place = tl.full((lines, columns), 9, tl.int32)
    for step in tl.static_range(9):  # pyright: ignore[reportGeneralTypeIssues]
        y = top + step // 3
        z = left + step % 3
        inside = is_window & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        here = ((image * height + y) * width + z)[:, None] * channels + column[None, :]
        value = tl.load(x + here, mask=inside[:, None] & has_channel, other=0.0)
        value = (value.to(tl.float32) - middle) * slope + offset
        # Compare rounded values, as a pool of stored activations does.
        value = value.to(x.dtype.element_ty).to(tl.float32)
        is_larger = ((value > largest) | (value != value)) & inside[:, None]
        largest = tl.where(is_larger, value, largest)
        place = tl.where(is_larger, step, place)
    target = window.to(tl.int64)[:, None] * channels + column[None, :]
    both = is_window[:, None] & has_channel
    tl.store(pooled + target, largest.to(pooled.dtype.element_ty), mask=both)
    tl.store(index + target, place.to(tl.int8), mask=both)


@triton.jit
def _window_gradient(grad, index, image, y, z, column, both, channels, out_height, out_width):
    """Return gradient and place of a window; zero outside of the result."""
    inside = both & ((y >= 0) & (y < out_height) & (z >= 0) & (z < out_width))[:, None]
    here = ((image * out_height + y) * out_width + z)[:, None] * channels + column[None, :]
    slant = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(index + here, mask=inside, other=9).to(tl.int32)
    return slant, place


@triton.jit
def _pool_gradient_kernel(
    grad,
    index,
    x,
    mean,
    factors,
    target,
    quads,
    channels,
    parts,
    before,
    height,
    width,
    out_height,
    out_width,
    quad_height,
    quad_width,
    has_sums: tl.constexpr,
    lines: tl.constexpr,
    columns: tl.constexpr,
):
    """Write sums for batch norm to target[:, part], or the gradient of x to target.

    A quad is two by two values of x. Four windows contain them: the one at the same place, above,
    left, and both. factors: 1 / std for sums; else scale, and what is subtracted: a constant and a
    slope.
    """
    part = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    has_channel = column < channels
    middle = tl.load(mean + column, mask=has_channel, other=0.0)[None, :]
    scale, offset, slope = middle, middle, middle
    if not has_sums:
        scale = tl.load(factors + column, mask=has_channel, other=0.0)[None, :]
        offset = tl.load(factors + channels + column, mask=has_channel, other=0.0)[None, :]
        slope = tl.load(factors + 2 * channels + column, mask=has_channel, other=0.0)[None, :]
    total = tl.zeros((lines, columns), tl.float32)
    products = tl.zeros((lines, columns), tl.float32)
    start = part * lines
    while start < quads:
        quad = start + tl.arange(0, lines)
        both = (quad < quads)[:, None] & has_channel[None, :]
        row = quad // quad_width
        z = quad % quad_width
        y = row % quad_height
        image = (row // quad_height).to(tl.int64)
        g0, i0 = _window_gradient(
            grad, index, image, y, z, column, both, channels, out_height, out_width
        )
        g1, i1 = _window_gradient(
            grad, index, image, y - 1, z, column, both, channels, out_height, out_width
        )
        g2, i2 = _window_gradient(
            grad, index, image, y, z - 1, column, both, channels, out_height, out_width
        )
        g3, i3 = _window_gradient(
            grad, index, image, y - 1, z - 1, column, both, channels, out_height, out_width
        )
        for down in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            for right in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
                slant = tl.where(i0 == 3 * down + right, g0, 0.0)
                if down == 0:
                    slant += tl.where(i1 == 6 + right, g1, 0.0)
                if right == 0:
                    slant += tl.where(i2 == 3 * down + 2, g2, 0.0)
                if down + right == 0:
                    slant += tl.where(i3 == 8, g3, 0.0)
                h = 2 * y + down - before
                w = 2 * z + right - before
                inside = both & ((h >= 0) & (h < height) & (w >= 0) & (w < width))[:, None]
                here = ((image * height + h) * width + w)[:, None] * channels + column[None, :]
                deviation = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) - middle
                if has_sums:
                    total += slant
                    products += slant * deviation
                else:
                    value = (slant - offset - deviation * slope) * scale
                    tl.store(target + here, value.to(target.dtype.element_ty), mask=inside)
        start += parts * lines
    if has_sums:
        here = target + part * channels + column
        unit = tl.load(factors + column, mask=has_channel, other=0.0)
        tl.store(here, tl.sum(total, 0), mask=has_channel)
        tl.store(here + parts * channels, tl.sum(products, 0) * unit, mask=has_channel)


def _empty(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty channels_last tensor; torch.compile would fill that of torch.empty_like."""
    _, channels, height, width = shape
    strides = (channels * height * width, 1, width * channels, channels)
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)


@triton_op("compressive::pooled_norm", mutates_args={})
def pooled_norm(
    x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the pool of relu((x - mean) * scale + bias) and the place of each largest value."""
    pool, (batch, channels) = Pool(*sizes), x.shape[:2]
    shape = (batch, channels, pool.out_height, pool.out_width)
    pooled, index = _empty(x, shape, x.dtype), _empty(x, shape, torch.int8)
    windows = batch * pool.out_height * pool.out_width
    lines, columns = POOL_TILE.block(channels)
    launcher(_pool_kernel)[(triton.cdiv(windows, lines), triton.cdiv(channels, columns))](
        x,
        mean,
        scale,
        bias,
        pooled,
        index,
        windows,
        channels,
        *pool,
        lines=lines,
        columns=columns,
        num_warps=4,
    )
    return pooled, index


@triton_op("compressive::pooled_gradient_sums", mutates_args={})
def pooled_gradient_sums(
    grad: Tensor, index: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, sizes: list[int]
) -> Tensor:
    """Return sums of gradients, and of gradients times normalized x, per channel: [2, channels]."""
    lines, _ = POOL_TILE.block(x.shape[1])
    parts = max(min(POOL_TILE.programs, triton.cdiv(_quads(x, Pool(*sizes)), lines)), 1)
    partial = x.new_empty((2, parts, x.shape[1]), dtype=torch.float32)
    _launch_gradient(grad, index, x, mean, inverse, partial, Pool(*sizes), parts, True)
    return add_parts(partial)


@triton_op("compressive::pooled_gradient", mutates_args={})
def pooled_gradient(
    grad: Tensor, index: Tensor, x: Tensor, mean: Tensor, factors: Tensor, sizes: list[int]
) -> Tensor:
    """Return the gradient of x; factors has scale, offset and slope of each channel."""
    target = _empty(x, tuple(x.shape), x.dtype)
    lines, _ = POOL_TILE.block(x.shape[1])
    parts = triton.cdiv(_quads(x, Pool(*sizes)), lines)
    _launch_gradient(grad, index, x, mean, factors, target, Pool(*sizes), parts, False)
    return target


def _quads(x: Tensor, pool: Pool) -> int:
    height, width = ((side - 1 + pool.before) // 2 + 1 for side in (pool.height, pool.width))
    return x.shape[0] * height * width


def _launch_gradient(
    grad: Tensor,
    index: Tensor,
    x: Tensor,
    mean: Tensor,
    factors: Tensor,
    target: Tensor,
    pool: Pool,
    parts: int,
    has_sums: bool,
) -> None:
    channels = x.shape[1]
    lines, columns = POOL_TILE.block(channels)
    launcher(_pool_gradient_kernel)[(parts, triton.cdiv(channels, columns))](
        grad,
        index,
        x,
        mean,
        factors,
        target,
        _quads(x, pool),
        channels,
        parts,
        *pool,
        (pool.height - 1 + pool.before) // 2 + 1,
        (pool.width - 1 + pool.before) // 2 + 1,
        has_sums=has_sums,
        lines=lines,
        columns=columns,
        num_warps=4,
    )
