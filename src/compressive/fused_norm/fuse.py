"""Replace the batch norms of a ResNet, and the ReLUs behind them, by faster equal ones."""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedBatchNorm:
    """Mixin for a batch norm that also applies the ReLU and the max-pool behind it.

    On a GPU, in training and for images in channels_last memory format, it calls Triton kernels.
    Otherwise it calls the layers that it replaces.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the norm of x, with ReLU and pool if these follow."""
        before = _padding(self.pool, x)
        if not (self.training and _is_supported(x)) or before is None:
            y = super().forward(x)  # type: ignore[misc]  # pyright: ignore
            y = F.relu(y) if self.has_relu else y
            return y if self.pool is None else self.pool(y)
        from compressive.fused_norm import functional

        row = self.weight, self.bias, self.eps
        if self.pool is None:
            y, mean, var = functional.fused_batch_norm(x, *row, has_relu=self.has_relu)
        else:
            y, mean, var = functional.fused_pooled_batch_norm(x, *row, before=before)
        with torch.no_grad():
            n = x.numel() // x.shape[1]
            factor = 1.0 if self.is_variance_biased else n / (n - 1)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * factor, self.momentum)
        return y


def _is_supported(x: Tensor) -> bool:
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x.is_cuda and is_last and x.dtype in _FLOAT_TYPES


def _padding(pool: nn.Module | None, x: Tensor) -> int | None:
    """Return the padding of a pool at the beginning of both sides, or None if they differ."""
    if pool is None or isinstance(pool, nn.MaxPool2d):
        return 1
    height, width = x.shape[-2:]
    return height % 2 if height % 2 == width % 2 else None


def fuse(network: nn.Module, *, biased_variance: bool = False, stem: bool = True) -> int:
    """Use Triton kernels for the batch norms of a timm ResNet; return how many were changed.

    This works in place and keeps parameters, statistics and their names. Norms that are followed by
    other layers than ReLU, or are not plain batch norms, stay as they are.

    biased_variance: whether the network was built with it.
    stem: also fuse the max-pool of the stem.
    """
    if find_spec("triton") is None:
        return 0
    _keep_inputs_of_kernels()
    count = 0
    for module in list(network.modules()):
        pairs = [(f"bn{i}", f"act{i}") for i in (1, 2, 3) if hasattr(module, f"bn{i}")]
        last = pairs[-1][0] if pairs else ""
        for norm_name, act_name in pairs:
            norm = getattr(module, norm_name)
            if not _is_plain(norm, biased_variance):
                continue
            _convert(norm, biased_variance)
            count += 1
            # A block adds its shortcut between the last norm and ReLU; the stem does not.
            is_stem = hasattr(module, "maxpool")
            if (norm_name != last or is_stem) and _is_relu(module, norm_name, act_name):
                norm.has_relu = True
                setattr(module, act_name, nn.Identity())
            if is_stem and stem and norm.has_relu and _is_pool(module.maxpool):
                norm.pool = module.maxpool
                module.maxpool = nn.Identity()
        shortcut = getattr(module, "downsample", None)
        for part in shortcut if isinstance(shortcut, nn.Sequential) else ():
            if _is_plain(part, biased_variance):
                _convert(part, biased_variance)
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


def _is_plain(norm: nn.Module, biased_variance: bool) -> bool:
    known = type(norm) is nn.BatchNorm2d
    known |= biased_variance and type(norm).__name__ == "_BiasedBatchNorm2d"
    has_rows = isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.track_running_stats
    return known and has_rows and norm.momentum is not None  # type: ignore[union-attr]


def _is_relu(module: nn.Module, norm: str, act: str) -> bool:
    """Return whether nothing but ReLU is between this norm and the next layer."""
    between = getattr(module, "drop_block", None) if norm in ("bn1", "bn2") else None
    is_direct = between is None or isinstance(between, nn.Identity)
    return type(getattr(module, act, None)) is nn.ReLU and is_direct


def _is_pool(pool: object) -> bool:
    if type(pool).__name__ == "SamePool":
        return True
    if type(pool) is not nn.MaxPool2d:
        return False
    sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode
    return sizes == (3, 2, 1, 1, False) and not pool.return_indices


def _convert(norm: Any, biased_variance: bool) -> None:
    # Change the class of the object: an optimizer or a hook may already refer to it.
    name = f"Fused{type(norm).__name__.strip('_')}"
    norm.__class__ = type(name, (FusedBatchNorm, type(norm)), {"__module__": __name__})
    norm.has_relu, norm.pool, norm.is_variance_biased = False, None, biased_variance
