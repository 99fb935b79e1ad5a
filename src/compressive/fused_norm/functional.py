"""Batch norm of training whose sums over the batch are Triton kernels.

Everything that is computed per value stays in plain PyTorch, so that torch.compile fuses it. Reads
and writes of whole activations for one layer, counted in the code that torch 2.11 generates:

                                   today            here
    norm, ReLU: forward            1 + 2            1 + 2 (sums + values)
    norm, ReLU: backward           3 + 4            2 + 3
    norm, add, ReLU: forward       1 + 3            1 + 3
    norm, add, ReLU: backward      3 + 7 (mean)     2 + 7
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.fused_norm import pooled, reductions

_Row = Float[Tensor, "feat"]
_Activation = Float[Tensor, "batch feat h w"]


def _per_channel(row: Tensor) -> Tensor:
    """Return a row with one value per channel in the shape of images."""
    return row.view(1, -1, 1, 1)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, has_relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _last(x)
        mean, variance = reductions.batch_moments(x)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse * weight
        y = (x.float() - _per_channel(mean)) * _per_channel(scale) + _per_channel(bias)
        y = y.relu() if has_relu else y
        # A conversion to the same type here makes all gradients 0 in torch 2.11 if compiled.
        y = y if y.dtype == x.dtype else y.to(x.dtype)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.has_relu = has_relu
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        grad, scale = _last(grad), inverse * weight
        sums = reductions.batch_gradient_sums(grad, x, mean, inverse, scale, bias, ctx.has_relu)
        return (
            *_input_gradient(grad, x, (weight, bias, mean, inverse), sums, ctx.has_relu),
            None,
            None,
        )


def _input_gradient(
    grad: Tensor, x: Tensor, rows: tuple[Tensor, ...], sums: Tensor, has_relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    weight, bias, mean, inverse = rows
    scale = inverse * weight
    deviation = x.float() - _per_channel(mean)
    slant = grad.float()
    if has_relu:
        is_positive = deviation * _per_channel(scale) + _per_channel(bias) > 0
        slant = torch.where(is_positive, slant, 0.0)
    count = x.numel() // x.shape[1]
    offset, slope = sums[0] / count, sums[1] * inverse / count
    dx = (slant - _per_channel(offset) - deviation * _per_channel(slope)) * _per_channel(scale)
    return dx.to(x.dtype), sums[1].to(weight.dtype), sums[0].to(bias.dtype)


def fused_batch_norm(
    x: _Activation, weight: _Row, bias: _Row, eps: float, *, has_relu: bool
) -> tuple[_Activation, _Row, _Row]:
    """Return relu(norm(x)) or norm(x), and mean and biased variance of the batch per channel."""
    return _Normalize.apply(x, weight, bias, eps, has_relu)  # pyright: ignore[reportReturnType]


class _NormalizeAndPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, sizes: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _last(x)
        mean, variance = reductions.batch_moments(x)
        inverse = torch.rsqrt(variance + eps)
        y, index = pooled.pooled_norm(x, mean, inverse * weight, bias, sizes)
        ctx.save_for_backward(x, index, weight, mean, inverse)
        ctx.sizes = sizes
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, index, weight, mean, inverse = ctx.saved_tensors
        grad, count = _last(grad), x.numel() // x.shape[1]
        sums = pooled.pooled_gradient_sums(grad, index, x, mean, inverse, ctx.sizes)
        slope = sums[1] * inverse / count
        factors = torch.stack((inverse * weight, sums[0] / count, slope))
        dx = pooled.pooled_gradient(grad, index, x, mean, factors, ctx.sizes)
        return dx, sums[1].to(weight.dtype), sums[0].to(weight.dtype), None, None


def fused_pooled_batch_norm(
    x: _Activation, weight: _Row, bias: _Row, eps: float, *, before: int = 1
) -> tuple[Float[Tensor, "batch feat h2 w2"], _Row, _Row]:
    """Return the 3x3 max-pool of stride 2 of relu(norm(x)), and mean and variance per channel.

    before: rows and columns of padding at the beginning: 1 as in torch, 0 as in TensorFlow for even
    sides. At the end, a last window that is not whole is used if it begins inside of x.
    """
    sides = [(side - 1 - (1 - before)) // 2 + 1 for side in x.shape[2:]]
    sizes = [before, *x.shape[2:], *sides]
    return _NormalizeAndPool.apply(x, weight, bias, eps, sizes)  # pyright: ignore[reportReturnType]
