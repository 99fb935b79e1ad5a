"""Batch norms with the statistics of all processes or groups of them, on any device."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.distributed import all_sum, rank_group, world_size

__all__ = ["synchronize"]

_Norm = nn.BatchNorm1d | nn.BatchNorm2d
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def synchronize(module: nn.Module, *, biased_variance: bool = False, ranks: int = 0) -> nn.Module:
    """Make every batch norm use the images of all processes; do nothing for one process.

    This works in place. Weights, statistics, their names and an activation that timm put into a
    norm are kept. Returns the module, or its replacement if it is itself a norm. Norms on a GPU
    become torch's SyncBatchNorm. Every process must have the same number of images.

    biased_variance: whether the networks were built with it; torch's conversion would drop it.
    ranks: number of consecutive ranks that share statistics; 0: all, 1: each its own.
    """
    group = rank_group(ranks, "train.batch_norm_ranks") if ranks != 1 else None
    if world_size() == 1 or ranks == 1:
        return module
    return _converted(module, _Sharing(biased_variance, group, ranks or world_size()), "")


class _Sharing(NamedTuple):
    biased_variance: bool
    group: Any  # dist.ProcessGroup, or None for all processes
    ranks: int


class TorchSyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm with the activation and the biased variance of the norm it replaces."""

    def __init__(self, norm: _Norm, sharing: _Sharing) -> None:
        # Create it empty and assign the tensors of `norm`: an optimizer may already refer to them.
        super().__init__(0, norm.eps, norm.momentum, affine=False, process_group=sharing.group)
        for name in ("num_features", "affine", "weight", "bias", *_STATISTICS):
            setattr(self, name, getattr(norm, name))
        self.biased_variance, self.ranks = sharing.biased_variance, sharing.ranks
        self.drop: nn.Module | None = getattr(norm, "drop", None)
        self.act: nn.Module | None = getattr(norm, "act", None)
        self.train(norm.training)

    def forward(self, x: Float[Tensor, "batch feat *sides"]) -> Float[Tensor, "batch feat *sides"]:
        """Normalize x with the mean and variance over all processes."""
        if not (self.training and self.biased_variance):
            return _behind(self, super().forward(x))
        var, n = self.running_var, _count(x, self.ranks)
        assert var is not None
        assert self.momentum is not None
        # Pass a copy: autograd may save it and rejects a tensor that changed since.
        self.running_var = moved = var.clone()
        out = super().forward(x)
        self.running_var = var
        with torch.no_grad():  # convert (1 - m) var + m n/(n-1) batch to (1 - m) var + m batch
            var.mul_((1 - self.momentum) / n).add_(moved, alpha=(n - 1) / n)
        return _behind(self, out)


class SummedBatchNorm(nn.Module):
    """Batch norm with two sums over processes, on any device; on a GPU torch's is faster."""

    def __init__(self, norm: _Norm, sharing: _Sharing) -> None:
        super().__init__()
        assert norm.momentum is not None
        self.eps: float = norm.eps
        self.momentum: float = norm.momentum
        self.weight: nn.Parameter | None = norm.weight
        self.bias: nn.Parameter | None = norm.bias
        self.running_mean: Tensor
        self.running_var: Tensor
        self.num_batches_tracked: Tensor
        for name in _STATISTICS:
            self.register_buffer(name, getattr(norm, name))
        self.biased_variance, self.group, self.ranks = sharing
        self.drop: nn.Module | None = getattr(norm, "drop", None)
        self.act: nn.Module | None = getattr(norm, "act", None)
        self.train(norm.training)

    def forward(self, x: Float[Tensor, "batch feat *sides"]) -> Float[Tensor, "batch feat *sides"]:
        """Normalize x with the mean and variance over all processes."""
        if not self.training:
            held = self.running_mean, self.running_var, self.weight, self.bias
            return _behind(self, F.batch_norm(x, *held, eps=self.eps))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
        n = _count(x, self.ranks)
        mean = all_sum(wide.sum(axes), self.group) / n
        centered = wide - mean.view(shape)
        var = all_sum(centered.square().sum(axes), self.group) / n
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            moving = var if self.biased_variance else var * (n / (n - 1))
            self.running_var.lerp_(moving.to(self.running_var.dtype), self.momentum)
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        out = centered * scale.view(shape)
        out = out if self.bias is None else out + self.bias.view(shape)
        return _behind(self, out.to(x.dtype))


def _behind(norm: TorchSyncBatchNorm | SummedBatchNorm, out: Tensor) -> Tensor:
    """Apply the dropout and activation that timm puts into its norms."""
    for layer in (norm.drop, norm.act):
        out = out if layer is None else layer(out)
    return out


def _count(x: Tensor, ranks: int) -> int:
    """Return the number of values per channel in the processes that share statistics."""
    return x.numel() // x.shape[1] * ranks


def _converted(module: nn.Module, sharing: _Sharing, name: str) -> nn.Module:
    if isinstance(module, _Norm):
        return _converted_norm(module, sharing, name)
    for child_name, child in module.named_children():
        whole = f"{name}.{child_name}" if name else child_name
        setattr(module, child_name, _converted(child, sharing, whole))
    return module


def _converted_norm(norm: _Norm, sharing: _Sharing, name: str) -> nn.Module:
    is_plain = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d)
    is_timms = hasattr(norm, "act") and hasattr(norm, "drop")
    where = f"the batch norm {name!r}" if name else "the batch norm"
    if not (is_plain or is_timms or sharing.biased_variance):
        raise ValueError(
            f"{where} is a {type(norm).__name__}, which cannot be synchronized as it is; "
            "pass biased_variance=True if the network was built with it, else train in one process"
        )
    if norm.momentum is None or norm.running_mean is None:
        raise ValueError(
            f"{where} has no running statistics or no momentum and cannot be synchronized; "
            "use another network, or train in one process"
        )
    kind = TorchSyncBatchNorm if norm.running_mean.is_cuda else SummedBatchNorm
    return kind(norm, sharing)
