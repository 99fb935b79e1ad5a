"""Batch norms that see the joined batch of all processes, on any device."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressive.distributed import all_sum, world_size


def synchronize(module: nn.Module, *, biased_variance: bool = False) -> nn.Module:
    """Let every batch norm inside normalize by all processes' images; one process changes nothing.

    Works in place, and keeps weights, statistics and their names; an activation that timm put
    inside a norm stays there. Returns the module, or what replaces it if it is itself a norm.

    Every process must bring the same number of images.

    biased_variance: the networks were built with it. torch's own conversion would go back to
        the unbiased running variance without a word.
    """
    if world_size() == 1:
        return module
    return _converted(module, biased_variance, "")


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's, which runs on a GPU only; on the CPU the same by two sums over processes.

    `drop` and `act` are what timm's norms apply behind themselves.
    """

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, biased_variance: bool) -> None:
        # Sized 0 and filled with the tensors of `norm`: an optimizer may hold them already.
        super().__init__(0, norm.eps, norm.momentum, affine=False)
        self.num_features, self.affine = norm.num_features, norm.affine
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.biased_variance = biased_variance
        self.drop, self.act = getattr(norm, "drop", None), getattr(norm, "act", None)
        self.train(norm.training)

    def forward(self, x: Float[Tensor, "batch feat *sides"]) -> Float[Tensor, "batch feat *sides"]:
        """x normalized by the mean and the variance of all processes' batches."""
        if self.training and x.device.type == "cpu" and world_size() > 1:
            out = self._by_sums(x)
        elif self.training and self.biased_variance:
            out = self._with_biased_variance(x)
        else:
            out = super().forward(x)
        for after in (self.drop, self.act):
            out = out if after is None else after(out)
        return out

    def _by_sums(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
        count = _count(x)
        mean = all_sum(wide.sum(axes)) / count
        centered = wide - mean.view(shape)
        var = all_sum(centered.square().sum(axes)) / count
        self._move(
            mean.detach(), var.detach() * (1 if self.biased_variance else count / (count - 1))
        )
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = centered * scale.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _move(self, mean: Tensor, var: Tensor) -> None:
        running_mean, running_var, batches = _statistics(self)
        assert self.momentum is not None
        running_mean.lerp_(mean.to(running_mean.dtype), self.momentum)
        running_var.lerp_(var.to(running_var.dtype), self.momentum)
        batches.add_(1)

    def _with_biased_variance(self, x: Tensor) -> Tensor:
        _, var, _ = _statistics(self)
        assert self.momentum is not None
        # A copy, since autograd may keep it, and would refuse one that changed since.
        self.running_var = moved = var.clone()
        out = super().forward(x)
        self.running_var = var
        n = _count(x)
        with torch.no_grad():  # from (1 - m) var + m n/(n-1) batch to (1 - m) var + m batch
            var.mul_((1 - self.momentum) / n).add_(moved, alpha=(n - 1) / n)
        return out


def _count(x: Tensor) -> int:
    """Values per channel in all processes."""
    return x.numel() // x.shape[1] * world_size()


def _statistics(norm: nn.SyncBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    mean, var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert batches is not None
    return mean, var, batches


def _converted(module: nn.Module, biased_variance: bool, name: str) -> nn.Module:
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        _require_understood(module, biased_variance, name)
        return SyncBatchNorm(module, biased_variance)
    for child_name, child in module.named_children():
        whole = f"{name}.{child_name}" if name else child_name
        setattr(module, child_name, _converted(child, biased_variance, whole))
    return module


def _require_understood(norm: nn.Module, biased_variance: bool, name: str) -> None:
    plain = type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d)
    timms = hasattr(norm, "act") and hasattr(norm, "drop")
    where = f"the batch norm {name!r}" if name else "the batch norm"
    if not (plain or timms or biased_variance):
        raise ValueError(
            f"{where} is a {type(norm).__name__}, which cannot be synchronized as it is; "
            "pass biased_variance=True if the network was built so, else train in one process"
        )
    if norm.momentum is None or norm.running_mean is None:
        raise ValueError(
            f"{where} has no running statistics or no momentum and cannot be synchronized; "
            "use another network, or train in one process"
        )
