"""Faster gradients of convolutions on ARM CPUs without SVE.

There oneDNN computes them with a reference implementation, which takes up to 12 times as long as
the forward pass. A forward convolution and matrix products make a step 1.7 times (timm's
test_resnet) or 3.3 times (ResNet-18) as fast (32 pixels, one core of a Neoverse N1). Gradients
differ by rounding only.
"""

import platform
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import differentiable_once

_BLOCK_VALUES = 2**18  # of a matrix of patches: the fastest power of 2; 1 MB of float32
_NAME = "convolutions of a training run on an ARM CPU"

Pair = tuple[int, int]


def speed_up_convolutions(network: nn.Module, device: torch.device) -> None:
    """Replace how a network computes gradients of convolutions if the device is slow at them."""
    if not has_slow_gradients(device):
        return
    for module in network.modules():
        if type(module) is nn.Conv2d and _is_plain(module):
            module.__class__ = _FasterConv2d


def has_slow_gradients(device: torch.device) -> bool:
    """Return whether a device is an ARM CPU without SVE that uses oneDNN."""
    is_arm = device.type == "cpu" and platform.machine() in ("aarch64", "arm64")
    has_sve = "SVE" in torch.backends.cpu.get_cpu_capability()
    return is_arm and not has_sve and torch.backends.mkldnn.is_available()


def _is_plain(module: nn.Conv2d) -> bool:
    """Return whether the formulas below hold; groups would need a product per group."""
    is_dense = module.groups == 1 and module.dilation == (1, 1)
    return is_dense and module.padding_mode == "zeros" and not isinstance(module.padding, str)


class _FasterConv2d(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_usual = input.dim() == 4 and len(input) > 0 and input.dtype == weight.dtype
        if not is_usual or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super()._conv_forward(input, weight, bias)
        found = _Convolution.apply(input, weight, self.stride, self.padding)
        assert isinstance(found, Tensor)
        return found if bias is None else found + bias[:, None, None]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), size = ctx.saved_tensors, (ctx.stride, ctx.padding)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            found = input_gradient(grad, weight, x.shape[2:], *size)
            of_x = differentiable_once(found, _NAME)
        if ctx.needs_input_grad[1]:
            found = weight_gradient(grad, x, weight.shape[2:], *size)
            of_weight = differentiable_once(found, _NAME)
        return of_x, of_weight, None, None


def input_gradient(
    grad: Float[Tensor, "batch out h w"],
    weight: Float[Tensor, "out feat kh kw"],
    sides: Pair,
    stride: Pair,
    padding: Pair,
) -> Float[Tensor, "batch feat h2 w2"]:
    """Return the gradient of a convolution's input, which has this height and width."""
    # It is a convolution with the reversed kernels. If the stride is not 1, zeros are inserted
    # between the gradients.
    kernel = (weight.shape[2], weight.shape[3])
    reverse = weight.flip(2, 3).transpose(0, 1)
    around = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
    if stride == (1, 1) and min(around) >= 0:
        return F.conv2d(grad, reverse, None, 1, around)
    rows = grad.permute(0, 2, 3, 1)
    spread = [sides[i] + 2 * padding[i] + kernel[i] - 1 for i in (0, 1)]
    wide = rows.new_zeros(len(rows), *spread, rows.shape[3])
    top, left = kernel[0] - 1, kernel[1] - 1
    inside = wide[:, top : top + stride[0] * rows.shape[1], left : left + stride[1] * rows.shape[2]]
    inside[:, :: stride[0], :: stride[1]] = rows
    kept = [slice(padding[i], padding[i] + sides[i] + kernel[i] - 1) for i in (0, 1)]
    return F.conv2d(wide[:, kept[0], kept[1]].permute(0, 3, 1, 2), reverse)


def weight_gradient(
    grad: Float[Tensor, "batch out h w"],
    x: Float[Tensor, "batch feat h2 w2"],
    kernel: Pair,
    stride: Pair,
    padding: Pair,
) -> Float[Tensor, "out feat kh kw"]:
    """Return the gradient of the kernels of a convolution of x."""
    out, feat, places = grad.shape[1], x.shape[1], (grad.shape[2], grad.shape[3])
    around = (0, 0, padding[1], padding[1], padding[0], padding[0])
    total = x.new_zeros(kernel[0] * kernel[1] * feat, out)
    at_once = max(1, _BLOCK_VALUES // (places[0] * places[1] * len(total)))
    for some_grad, some in zip(grad.split(at_once), x.split(at_once), strict=True):
        images = F.pad(some.permute(0, 2, 3, 1), around)
        count, row, column, value = images.stride()
        patches = images.as_strided(
            (len(images), *places, *kernel, feat),
            (count, row * stride[0], column * stride[1], row, column, value),
        )
        rows = some_grad.permute(0, 2, 3, 1).reshape(-1, out)
        total.addmm_(patches.reshape(len(rows), -1).t(), rows)
    return total.view(*kernel, feat, out).permute(3, 2, 0, 1)
