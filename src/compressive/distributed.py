"""Processes that train together; the only importer of torch.distributed."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(minutes=30)  # after which a process that does not answer ends the others


def start() -> int:
    """Join torchrun's processes, if it started any; return this one's number on its machine."""
    # NCCL between GPUs, each process on its own; gloo between CPUs.
    local = launched("LOCAL_RANK", 0)
    if launched("WORLD_SIZE", 1) > 1 and not dist.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(local)
        store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        # On one machine torchrun keeps its store for restarted processes, which would find the
        # addresses of those before. Machines may count restarts differently: see pretrain.slurm.
        if launched("GROUP_WORLD_SIZE", 1) == 1:
            store = dist.PrefixStore(f"start{launched('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        joined = {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, **joined)
    return local


def launched(name: str, default: int) -> int:
    """Return a number that torchrun puts into the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        hint = f"start with torchrun, or run `unset {name}`"
        raise ValueError(f"{name} must be a whole number, got {text!r} in the environment; {hint}")
    return int(text)


def stop() -> None:
    """Leave the others."""
    if world_size() > 1:
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Go on when every process is here."""
    if world_size() > 1:
        dist.barrier()


def parallel(module: nn.Module) -> nn.Module:
    """The module with gradients averaged over processes."""
    if world_size() == 1:
        return module
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether it holds in at least one process; every process must ask. Waits for the answer."""
    if world_size() == 1:
        return flag
    held = torch.tensor([float(flag)], device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return bool(held.item())


def world_size() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if world_size() > 1 else 0


def gather(rows: Float[Tensor, "batch dim"]) -> Float[Tensor, "world_batch dim"]:
    """Rows of all processes in the order of their ranks, differentiable in this one's rows.

    Every process must bring the same number of rows. The gradient of a row is summed over the
    losses of all processes: with means over own rows and averaged gradients, as in
    DistributedDataParallel, training equals one process on the joined batch.
    """
    if world_size() == 1:
        return rows
    if rows.device.type == "cpu":  # elsewhere the answer would have to be waited for
        counts = rows.new_empty(world_size())
        dist.all_gather_into_tensor(counts, rows.new_full((1,), len(rows)))
        if (counts != len(rows)).any():
            got = ", ".join(f"{count:.0f}" for count in counts.tolist())
            raise ValueError(f"every process must bring the same number of rows, got {got}")
    gathered = _Gather.apply(rows.contiguous())
    assert isinstance(gathered, Tensor)
    return gathered


def mean_value(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The mean over processes as the value, this process's own gradient: what DDP averages."""
    if world_size() == 1:
        return value
    return value + (_summed(value.detach()) / world_size() - value).detach()


def all_sum(value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Sum over processes, the same on each; the gradient is that of `gather`."""
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
