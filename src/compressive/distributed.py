"""Collectives for training in several processes; the only module that imports torch.distributed."""

import os
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from compressive.watchdog.activity import Collective
from compressive.watchdog.heartbeat import Watchdog, end_process, print_late
from compressive.watchdog.limits import active_processes, collective_timeout, silence_timeout

_FINISHED, _RELEASED = "training has finished", "spare processes that exit"
_watchdog: Watchdog | None = None
_store: dist.Store | None = None
_spares = 0  # processes that wait


def start(batch_size: int | None = None, grad_accum_steps: int = 1) -> int:
    """Join the process group if torchrun started one; return the local rank.

    If COMPRESSIVE_SPARE_PROCESSES is "wait", only as many processes join as divide the batch. The
    others must call `wait_as_spare`.
    """
    # Use NCCL with one GPU per process, or gloo on CPUs.
    global _store, _spares
    local, world = launched("LOCAL_RANK", 0), launched("WORLD_SIZE", 1)
    if world > 1 and not dist.is_initialized():
        timeout, silence = timedelta(seconds=collective_timeout()), silence_timeout()
        active = active_processes(world, batch_size, grad_accum_steps)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(local)
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        # On one machine torchrun keeps its store when it restarts processes. Use a prefix per
        # restart, else they would find the addresses of their predecessors. Several machines may
        # count restarts differently, and not at all if one joins: see pretrain.slurm.
        prefix = ""
        if launched("GROUP_WORLD_SIZE", 1) == 1:
            prefix = f"start{launched('TORCHELASTIC_RESTART_COUNT', 0)}"
            store = dist.PrefixStore(prefix, store)
        elif store.add(f"starts of rank {rank}", 1) > 1:
            raise ValueError(
                "torchrun uses the store of killed processes again; set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine and start torchrun again"
            )
        _store, _spares = store, world - active
        if rank < active > 1:
            joined = {"store": store, "rank": rank, "world_size": active}
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, **joined)
            _start_watchdog(prefix, silence, timeout.total_seconds() if on_gpu else float("inf"))
    return local


def is_spare() -> bool:
    """Return whether this process only waits, because the batch does not divide by all."""
    return _spares > 0 and launched("RANK", 0) >= launched("WORLD_SIZE", 1) - _spares


def wait_as_spare() -> None:
    """Wait until the processes that train have finished."""
    assert _store is not None
    while not _store.check([_FINISHED]):
        time.sleep(1)
    _store.add(_RELEASED, 1)


def spare_note() -> str:
    """Return a note if processes wait because the batch does not divide by all of them."""
    if not _spares:
        return ""
    world = launched("WORLD_SIZE", 1)
    return (
        f"note: {world - _spares} of {world} processes train and {_spares} wait: train.batch_size "
        "must be divisible by the number of those that train, with 2 images each"
    )


def _release_spares() -> None:
    """Let spare processes exit; wait until they have seen it: this process may hold the store."""
    if _store is None or not _spares or launched("RANK", 0):
        return
    _store.set(_FINISHED, "")
    until = time.monotonic() + 5
    while _store.add(_RELEASED, 0) < _spares and time.monotonic() < until:
        time.sleep(0.1)


def _start_watchdog(prefix: str, silence: float, late: float) -> None:
    """Watch the other processes through a connection of its own: a store serves one call a time."""
    global _watchdog
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=silence)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _watchdog = Watchdog(
        dist.PrefixStore(f"watchdog{prefix}", store),
        rank(),
        world_size(),
        silence=silence,
        end=end_process,
        # gloo raises an error itself; NCCL ends the process, so print who is late before that.
        late=0.95 * late,
        announce=print_late,
        store_host=f"{'torchrun' if is_agent else 'rank 0'} on {host}",
    )
    _watchdog.start()


def failed_ranks() -> str:
    """Name the processes that a failed collective waited for; "" if unknown. Takes seconds."""
    if _watchdog is None:
        return ""
    # torchrun stops this process when it notices the failure; it waits 30 s before it kills it.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return _watchdog.explain()
    finally:
        signal.signal(signal.SIGTERM, before)


def watchdog_notes() -> list[str]:
    """Return notes on slow processes that were not returned before, in the first process."""
    if _watchdog is None:
        return []
    notes, _watchdog.notes = _watchdog.notes, []
    return notes


def launched(name: str, default: int) -> int:
    """Return a number that torchrun sets in the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        hint = f"start with torchrun, or run `unset {name}`"
        raise ValueError(f"{name} must be a whole number, got {text!r} in the environment; {hint}")
    return int(text)


def stop() -> None:
    """Destroy the process group, if there is one."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None
    _release_spares()
    if world_size() > 1:
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until every process has called this."""
    if world_size() > 1:
        with _collective("a barrier"):
            dist.barrier()


def parallel(module: nn.Module) -> nn.Module:
    """Wrap a module so that its gradients are averaged over processes; a sharded one does this."""
    if world_size() == 1 or is_sharded(module):
        return module
    with _collective("the comparison of weights"):
        return NamedParallel(module, gradient_as_bucket_view=True)


class NamedParallel(DistributedDataParallel):
    """DistributedDataParallel that names its broadcast for the watchdog."""

    def _sync_buffers(self) -> None:
        with _collective("the broadcast of buffers"):
            super()._sync_buffers()


def shard(modules: Sequence[nn.Module]) -> None:
    """Split the weights of modules between all processes (FSDP2), inner modules first.

    Each module gathers its weights for its forward and backward pass, and averages gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh  # import here: they take a second
    from torch.distributed.fsdp import fully_shard

    # torch warns that in-place changes of the output of a network would be wrong; there are none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    device = next(modules[-1].parameters()).device.type
    mesh = init_device_mesh(device, (world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh)


def is_sharded(module: nn.Module) -> bool:
    """Return whether the weights of a module are split between processes."""
    return any(hasattr(weight, "device_mesh") for weight in module.parameters())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor  # pyright: ignore


def shard_like(local: Tensor, like: Tensor) -> Tensor:
    """Return the sharded tensor whose part in this process is `local`, split as `like`."""
    if not hasattr(like, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    size = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **size)


def empty_shard(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor that is split between all processes by its first axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh(device.type, (world_size(),))
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write sharded tensors, a safetensors file for each process; every process must call this."""
    import torch.distributed.checkpoint as dcp  # import here: it takes a second

    dcp.save(
        tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    )


def read_shards(tensors: dict[str, Tensor], folder: Path, *, alone: bool) -> None:
    """Read what `write_shards` wrote into tensors, which may be split between other processes."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():  # torch warns if one process loads, which is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=alone)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor; every process must call this."""
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor  # pyright: ignore


def rank_group(size: int, setting: str) -> "dist.ProcessGroup | None":
    """Return this process's group of `size` consecutive ranks; None for all, as 0 says.

    Every process must call this.
    """
    world = world_size()
    if size in (0, world):
        return None
    if world % size:
        raise ValueError(
            f"{setting} must be 0 or divide the number of processes, {world}, got {size}"
        )
    starts = range(0, world, size)
    timeout = timedelta(seconds=collective_timeout())
    groups = [dist.new_group([*range(s, s + size)], timeout=timeout) for s in starts]
    found = groups[rank() // size]
    assert not isinstance(found, int)
    return found


def any_process(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set in any process; every process must call this. Waits."""
    if world_size() == 1:
        return flag
    held = torch.tensor([float(flag)], device=device)
    with _collective("the agreement of all processes"):
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return bool(held.item())


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


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
    with _collective(f"the gather of {what}"):
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
    with _collective(name):
        dist.all_reduce(total, group=group)
    return total


def _collective(name: str) -> AbstractContextManager[object]:
    """Name a collective for the watchdog, except in compiled code, which must not change state."""
    return nullcontext() if torch.compiler.is_compiling() else Collective(name)
