"""Replace the batch norms of ResNets, the ReLUs behind them and the stem by faster layers."""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressive.networks import SamePool, timm

_FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedBatchNorm2d(nn.BatchNorm2d):
    """A batch norm that also applies the ReLU and the max-pool behind it.

    On a GPU, in training and for images in channels_last memory format, it calls Triton kernels.
    Otherwise it calls the layers that it replaces.
    """

    has_relu: bool
    pool: nn.Module | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, with ReLU and pool if these follow."""
        before = _padding(self.pool, x)
        if not (self.training and _is_supported(x)) or before is None:
            y = super().forward(x)
            y = F.relu(y) if self.has_relu else y
            return y if self.pool is None else self.pool(y)
        from compressive.fused_norm import functional

        row = self.weight, self.bias, self.eps
        if self.pool is None:
            y, mean, var = functional.fused_batch_norm(x, *row, has_relu=self.has_relu)
        else:
            y, mean, var = functional.fused_pooled_batch_norm(x, *row, before=before)
        self._average(mean, var, x.numel() // x.shape[1])
        return y

    @torch.no_grad()
    def _average(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics; torch averages the unbiased variance."""
        moving = self.running_mean, self.running_var, self.num_batches_tracked, self.momentum
        running_mean, running_var, batches, momentum = moving
        assert running_mean is not None
        assert running_var is not None
        assert batches is not None
        assert momentum is not None
        batches.add_(1)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * (count / (count - 1)), momentum)


class BlockConv2d(nn.Conv2d):
    """The 7x7 convolution of stride 2 as a 4x4 convolution of stride 1 over 2x2 blocks of pixels.

    It computes the same sums on a GPU in training. Its input has 16 channels: those of four pixels,
    and zeros. cuDNN would copy images of three channels to eight, and compute with all of them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of images."""
        if not (self.training and _is_on_gpu(x)):
            return super().forward(x)
        height, width = x.shape[-2:]
        missing = 4 - self.in_channels
        # Row i of the result is the sum over rows 2 i - 3, ..., 2 i + 3. With a row of zeros before
        # the first row of the kernel, these are the blocks i - 2, ..., i + 1.
        x = F.pad(x, (4, 2 + width % 2, 4, 2 + height % 2, 0, missing))
        kernel = F.pad(self.weight, (1, 0, 1, 0, 0, missing))
        return F.conv2d(F.pixel_unshuffle(x, 2), F.pixel_unshuffle(kernel, 2), self.bias)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _is_supported(x: Tensor) -> bool:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    # For one value per channel, torch has an error.
    return _is_on_gpu(x) and is_last and x.dtype in _FLOAT_TYPES and x.numel() > x.shape[1]


def _padding(pool: nn.Module | None, x: Tensor) -> int | None:
    """Return the padding of a pool at the beginning of both sides, or None if they differ."""
    if pool is None or isinstance(pool, nn.MaxPool2d):
        return 1
    height, width = x.shape[-2:]
    return height % 2 if height % 2 == width % 2 else None


def fuse(network: nn.Module, *, pool: bool = True, blocks: bool = True) -> int:
    """Use Triton kernels for the batch norms of timm's ResNets; return how many were changed.

    This works in place and keeps parameters, statistics and their names. Layers that the kernels do
    not support stay as they are. The result is for torch.compile and slow without it.

    pool: also fuse the max-pool of the stem with its norm.
    blocks: also compute the first convolution over blocks of pixels.
    """
    if find_spec("triton") is None:
        return 0
    _keep_inputs_of_kernels()
    count = 0
    resnet = timm.models.resnet
    known = (resnet.ResNet, resnet.BasicBlock, resnet.Bottleneck)
    for module in [each for each in network.modules() if type(each) in known]:
        pairs = [(f"bn{i}", f"act{i}") for i in (1, 2, 3) if hasattr(module, f"bn{i}")]
        last = pairs[-1][0] if pairs else ""
        # A block adds its shortcut between the last norm and ReLU; the stem does not.
        is_stem = type(module) is resnet.ResNet
        for norm_name, act_name in pairs:
            norm = getattr(module, norm_name)
            if not _is_plain_norm(norm):
                continue
            _convert(norm)
            count += 1
            if (norm_name != last or is_stem) and _is_relu(module, norm_name, act_name):
                norm.has_relu = True
                setattr(module, act_name, nn.Identity())
            if is_stem and pool and norm.has_relu and _is_pool(module.maxpool):
                norm.pool = module.maxpool
                module.maxpool = nn.Identity()
        first: Any = getattr(module, "conv1", None)
        if is_stem and blocks and _is_wide(first):
            first.__class__ = BlockConv2d
        shortcut = getattr(module, "downsample", None)
        for part in shortcut if isinstance(shortcut, nn.Sequential) else ():
            if _is_plain_norm(part):
                _convert(part)
                count += 1
    return count


def _keep_inputs_of_kernels() -> None:
    """Make torch.compile store what a kernel reads, if it is also used elsewhere.

    Otherwise it is stored for the kernel only, and computed again for each other use. For the
    gradient of a residual block, this is three more reads of whole activations.
    """
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
    from torch._inductor.lowering import needs_realized_inputs

    needs_realized_inputs.add(triton_kernel_wrapper_mutation)  # type: ignore[arg-type]


def _is_plain_norm(norm: nn.Module) -> bool:
    is_known = type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats
    return is_known and norm.momentum is not None


def _is_relu(module: nn.Module, norm: str, act: str) -> bool:
    """Return whether nothing but ReLU is between this norm and the next layer."""
    between = getattr(module, "drop_block", None) if norm in ("bn1", "bn2") else None
    is_direct = between is None or isinstance(between, nn.Identity)
    return type(getattr(module, act, None)) is nn.ReLU and is_direct


def _is_pool(pool: object) -> bool:
    if type(pool) is SamePool:
        return True
    if type(pool) is not nn.MaxPool2d:
        return False
    sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode
    return sizes == (3, 2, 1, 1, False) and not pool.return_indices


def _is_wide(conv: Any) -> bool:
    """Return whether a layer is the first convolution of a ResNet."""
    if type(conv) is not nn.Conv2d or conv.in_channels > 4 or conv.groups > 1:
        return False
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode
    return sizes == ((7, 7), (2, 2), (3, 3), (1, 1), "zeros")


def _convert(norm: Any) -> None:
    # Change the class of the object: an optimizer or a hook may already refer to it.
    norm.__class__ = FusedBatchNorm2d
    norm.has_relu, norm.pool = False, None
