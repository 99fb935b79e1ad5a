"""Copy files between machines that have no file system in common, through their processes."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from compressive.distributed.collectives import gather_objects
from compressive.distributed.process_group import launched, rank
from compressive.watchdog.limits import collective_timeout

_SENT_BYTES = 2**26  # bytes that are sent at a time


class Leaders(NamedTuple):
    """The first process of each machine, and their group, which sends files."""

    ranks: Sequence[int]
    group: Any  # dist.ProcessGroup in these processes

    @property
    def is_member(self) -> bool:
        """Return whether this process is the first one of its machine."""
        return rank() in self.ranks

    def gather(self, value: Any) -> list[Any]:
        """Return a small Python object of every leader, in the order of `ranks`."""
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def send_to_all(self, source: Path, target: BinaryIO | None, size: int) -> None:
        """Send a file of rank 0 to all leaders; each writes it if it gives a `target`."""
        for chunk in _chunks(source if rank() == 0 else None, size):
            dist.broadcast(chunk, 0, group=self.group)
            _write(chunk, target)

    def send_to_first(self, source: Path, size: int) -> None:
        """Send a file of this process to rank 0, which calls `receive`."""
        for chunk in _chunks(source, size):
            dist.send(chunk, 0, group=self.group)

    def receive(self, target: BinaryIO, size: int, owner: int) -> None:
        """Write a file that the leader `owner` sends."""
        for chunk in _chunks(None, size):
            dist.recv(chunk, owner, group=self.group)
            _write(chunk, target)


def machine_leaders() -> Leaders | None:
    """Return the first process of each machine; None on one. Every process must call this."""
    machines = gather_objects(launched("GROUP_RANK", 0))
    ranks = [machines.index(machine) for machine in dict.fromkeys(machines)]
    if len(ranks) == 1:
        return None
    # Use gloo also next to NCCL: files are in the memory of the host.
    timeout = timedelta(seconds=collective_timeout())
    return Leaders(ranks, dist.new_group(ranks, timeout=timeout, backend="gloo"))


def _chunks(source: Path | None, size: int) -> Iterator[torch.Tensor]:
    """Yield a file in parts to send, or without a file empty parts to receive."""
    lengths = [min(_SENT_BYTES, size - at) for at in range(0, size, _SENT_BYTES)]
    if source is None:
        yield from (torch.empty(length, dtype=torch.uint8) for length in lengths)
        return
    with source.open("rb") as file:
        for length in lengths:
            yield torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)


def _write(chunk: torch.Tensor, target: BinaryIO | None) -> None:
    if target is not None:
        target.write(chunk.numpy().data)
