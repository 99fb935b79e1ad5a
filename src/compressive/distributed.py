"""Processes that train together; the only importer of torch.distributed."""

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function


def world_size() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if world_size() > 1 else 0


def gather(rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "world_batch dim"]:
    """Rows of all processes in the order of their ranks, differentiable in this one's rows.

    Every process must bring the same number of rows. The gradient of a row is summed over the
    losses of all processes; where each loss is a mean over its own rows and the gradients of the
    parameters are averaged, as DistributedDataParallel does, training equals one process on the
    joined batch.
    """
    if world_size() == 1:
        return rows
    if rows.device.type == "cpu":  # elsewhere the answer would have to be waited for
        _require_equal_counts(rows)
    gathered = _Gather.apply(rows.contiguous())
    assert isinstance(gathered, Tensor)
    return gathered


def mean_value(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The mean over processes as the value, this process's own gradient: what DDP averages."""
    if world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return value + (total / world_size() - value).detach()


def _require_equal_counts(rows: Tensor) -> None:
    counts = rows.new_empty(world_size())
    dist.all_gather_into_tensor(counts, rows.new_full((1,), len(rows)))
    if (counts != len(rows)).any():
        raise ValueError(
            "every process must bring the same number of rows, "
            f"got {', '.join(f'{count:.0f}' for count in counts.tolist())}"
        )


class _Gather(Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    @staticmethod
    def backward(ctx, grad: Tensor):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        first = rank() * ctx.count
        return total[first : first + ctx.count]
