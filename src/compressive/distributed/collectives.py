"""Gather and sum tensors over processes, with the gradients of one process on all rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from compressive.distributed.process_group import named_collective, rank, world_size


def any_process(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set in any process; every process must call this. Waits."""
    if world_size() == 1:
        return flag
    held = torch.tensor([float(flag)], device=device)
    with named_collective("the agreement of all processes"):
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return bool(held.item())


def gather_objects(value: Any) -> list[Any]:
    """Return a small Python object of every process, by rank; every process must call this."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def sum_in_group(values: Tensor, group: dist.ProcessGroup) -> None:
    """Replace values by their sum over the processes of a group."""
    dist.all_reduce(values, group=group)


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work]:
    """Send rows to each process of a group, in order; return theirs, valid after `work.wait()`.

    `sent` and `received` are numbers of rows per process. The exchange runs in the background.
    """
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    counts = [*received], [*sent]
    work = dist.all_to_all_single(arrived, rows, *counts, group=group, async_op=True)
    assert work is not None
    return arrived, work


def gather(
    rows: Float[Tensor, "batch dim"], what: str = "candidates"
) -> Float[Tensor, "world_batch dim"]:
    """Return the rows of all processes in the order of their ranks, with gradient for own rows.

    Every process must have the same number of rows. The gradient of a row is summed over the losses
    of all processes. If each process averages its loss over its rows and gradients are averaged, as
    in DistributedDataParallel, training equals one process on the joined batch. `what` names the
    rows in messages.
    """
    if world_size() == 1:
        return rows
    check_equal_rows(rows)
    with named_collective(f"the gather of {what}"):
        gathered = _Gather.apply(rows.contiguous())
    assert isinstance(gathered, Tensor)
    return gathered


def check_equal_rows(rows: Float[Tensor, "batch dim"]) -> None:
    """Raise ValueError on the CPU unless every process has the same number of rows."""
    # On a GPU this would wait for the device.
    if world_size() > 1 and rows.device.type == "cpu":
        counts = rows.new_empty(world_size())
        dist.all_gather_into_tensor(counts, rows.new_full((1,), len(rows)))
        if (counts != len(rows)).any():
            got = ", ".join(f"{count:.0f}" for count in counts.tolist())
            raise ValueError(f"every process must have the same number of rows, got {got}")


class Pending(NamedTuple):
    """The result of a collective that may still run; call `wait` before it is read."""

    result: Tensor
    sent: Tensor  # must stay in memory until then
    work: Any  # dist.Work, or None if there is nothing to wait for

    def wait(self) -> Tensor:
        """Return the result; on a GPU only later kernels wait for it, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_gather(rows: Float[Tensor, "batch dim"]) -> Pending:
    """Start to gather the rows of all processes in the order of their ranks, without gradient."""
    rows = rows.detach().contiguous()
    if world_size() == 1:
        return Pending(rows, rows, None)
    gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
    work = dist.all_gather_into_tensor(gathered, rows, async_op=True)
    return Pending(gathered, rows, work)


def start_sum_to_owners(rows: Float[Tensor, "world_batch dim"]) -> Pending:
    """Start to sum rows over processes; each gets its own, in the order of `start_gather`."""
    if world_size() == 1:
        return Pending(rows, rows, None)
    own = rows.new_empty((len(rows) // world_size(), *rows.shape[1:]))
    work = dist.reduce_scatter_tensor(own, rows, async_op=True)
    return Pending(own, rows, work)


def mean_value(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the mean over processes, with this process's own gradient, which DDP averages."""
    if world_size() == 1:
        return value
    total = _summed(value.detach(), "the mean of a loss")
    return value + (total / world_size() - value).detach()


def all_sum(
    value: Float[Tensor, "..."], group: "dist.ProcessGroup | None" = None
) -> Float[Tensor, "..."]:
    """Return the sum over processes; the gradient is summed over processes too, as in `gather`."""
    # Batch norms are its only users.
    if world_size() == 1:
        return value
    total = _AllSum.apply(value, group)
    assert isinstance(total, Tensor)
    return total


class _Gather(Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        gathered = rows.new_empty((world_size() * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    @staticmethod
    def backward(ctx, grad: Tensor):
        first = rank() * ctx.count
        return _summed(grad, "the gradient of gathered rows")[first : first + ctx.count]


class _AllSum(Function):
    @staticmethod
    def forward(ctx, value: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.group = group
        return _summed(value, "batch norm statistics", group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _summed(grad, "the gradient of batch norm statistics", ctx.group), None


def _summed(value: Tensor, name: str, group: "dist.ProcessGroup | None" = None) -> Tensor:
    total = value.contiguous().clone()
    with named_collective(name):
        dist.all_reduce(total, group=group)
    return total
