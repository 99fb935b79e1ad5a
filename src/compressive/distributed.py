"""Collectives for training in several processes; the only module that imports torch.distributed."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(minutes=30)  # a process that does not respond for so long ends the others


def start() -> int:
    """Join the process group if torchrun started one; return the local rank."""
    # Use NCCL with one GPU per process, or gloo on CPUs.
    local = launched("LOCAL_RANK", 0)
    if launched("WORLD_SIZE", 1) > 1 and not dist.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(local)
        store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        # On one machine torchrun keeps its store when it restarts processes. Use a prefix per
        # restart, else they would find the addresses of their predecessors. Several machines may
        # count restarts differently: see pretrain.slurm.
        if launched("GROUP_WORLD_SIZE", 1) == 1:
            store = dist.PrefixStore(f"start{launched('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        joined = {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, **joined)
    return local


def launched(name: str, default: int) -> int:
    """Return a number that torchrun sets in the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        hint = f"start with torchrun, or run `unset {name}`"
        raise ValueError(f"{name} must be a whole number, got {text!r} in the environment; {hint}")
    return int(text)


def stop() -> None:
    """Destroy the process group, if there is one."""
    if world_size() > 1:
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until every process has called this."""
    if world_size() > 1:
        dist.barrier()


def parallel(module: nn.Module) -> nn.Module:
    """Wrap a module so that its gradients are averaged over processes."""
    if world_size() == 1:
        return module
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def any_process(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set in any process; every process must call this. Waits."""
    if world_size() == 1:
        return flag
    held = torch.tensor([float(flag)], device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return bool(held.item())


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def gather_objects(value: Any) -> list[Any]:
    """Return a small Python object of every process, by rank; every process must call this."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def consecutive_ranks(size: int) -> dist.ProcessGroup:
    """Return a new group of this process and its neighbors; `size` divides the number of ranks.

    Every process must call this. The group has its own connections, so that its collectives may
    run while others do.
    """
    firsts = range(0, world_size(), size)
    groups = [dist.new_group([*range(k, k + size)], timeout=TIMEOUT) for k in firsts]
    group = groups[rank() // size]
    assert isinstance(group, dist.ProcessGroup)
    return group


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


def gather(rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "world_batch dim"]:
    """Return the rows of all processes in the order of their ranks, with gradient for own rows.

    Every process must have the same number of rows. The gradient of a row is summed over the losses
    of all processes. If each process averages its loss over its rows and gradients are averaged, as
    in DistributedDataParallel, training equals one process on the joined batch.
    """
    if world_size() == 1:
        return rows
    if rows.device.type == "cpu":  # on a GPU this check would wait for the device
        counts = rows.new_empty(world_size())
        dist.all_gather_into_tensor(counts, rows.new_full((1,), len(rows)))
        if (counts != len(rows)).any():
            got = ", ".join(f"{count:.0f}" for count in counts.tolist())
            raise ValueError(f"every process must have the same number of rows, got {got}")
    gathered = _Gather.apply(rows.contiguous())
    assert isinstance(gathered, Tensor)
    return gathered


def mean_value(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the mean over processes, with this process's own gradient, which DDP averages."""
    if world_size() == 1:
        return value
    return value + (_summed(value.detach()) / world_size() - value).detach()


def all_sum(value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the sum over processes; the gradient is summed over processes too, as in `gather`."""
    if world_size() == 1:
        return value
    total = _AllSum.apply(value)
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
        return _summed(grad)[first : first + ctx.count]


class _AllSum(Function):
    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return _summed(value)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _summed(grad)


def _summed(value: Tensor) -> Tensor:
    total = value.contiguous().clone()
    dist.all_reduce(total)
    return total
