"""Start and end the process group of a run that torchrun has started, and watch its processes."""

import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from compressive.watchdog.activity import Collective
from compressive.watchdog.heartbeat import Watchdog, end_process, print_late
from compressive.watchdog.limits import active_processes, collective_timeout, silence_timeout

_FINISHED, _RELEASED = "training has finished", "spare processes that exit"
_watchdog: Watchdog | None = None
_rendezvous_store: dist.Store | None = None
_spares = 0  # processes that wait


def start(batch_size: int | None = None, grad_accum_steps: int = 1) -> int:
    """Join the process group if torchrun started one; return the local rank.

    If COMPRESSIVE_SPARE_PROCESSES is "wait", only as many processes join as divide the batch. The
    others must call `wait_as_spare`.
    """
    # Use NCCL with one GPU per process, or gloo on CPUs.
    global _rendezvous_store, _spares
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
        _rendezvous_store, _spares = store, world - active
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
    assert _rendezvous_store is not None
    while not _rendezvous_store.check([_FINISHED]):
        time.sleep(1)
    _rendezvous_store.add(_RELEASED, 1)


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
    if _rendezvous_store is None or not _spares or launched("RANK", 0):
        return
    _rendezvous_store.set(_FINISHED, "")
    until = time.monotonic() + 5
    while _rendezvous_store.add(_RELEASED, 0) < _spares and time.monotonic() < until:
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
        with named_collective("a barrier"):
            dist.barrier()


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


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
    return consecutive_ranks(size)


def consecutive_ranks(size: int) -> dist.ProcessGroup:
    """Return a new group of this process and its neighbors; `size` divides the number of ranks.

    Every process must call this. The group has its own connections, so that its collectives may
    run while others do.
    """
    firsts = range(0, world_size(), size)
    timeout = timedelta(seconds=collective_timeout())
    groups = [dist.new_group([*range(k, k + size)], timeout=timeout) for k in firsts]
    group = groups[rank() // size]
    assert isinstance(group, dist.ProcessGroup)
    return group


def named_collective(name: str) -> AbstractContextManager[object]:
    """Name a collective for the watchdog, except in compiled code, which must not change state."""
    return nullcontext() if torch.compiler.is_compiling() else Collective(name)
