"""Images in the device memory of several processes: each holds a share, and batches are exchanged.

Every process knows the order of all images, so that each one knows which rows the others need. No
index is sent. The batches are bitwise those of one process that holds the whole set.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from compressive.data.batch_buffers import EPOCH
from compressive.data.loaders import Batch, Resident, Streaming, check_indices
from compressive.data.nvjpeg import DeviceDecoder
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source
from compressive.data.wait_clock import WaitClock
from compressive.distributed import (
    consecutive_ranks,
    exchange_rows,
    gather_objects,
    rank,
    sum_in_group,
    world_size,
)


def share_of(count: int, part: int, parts: int) -> range:
    """Return the images that the process `part` of `parts` holds; sizes differ by one at most."""
    # Consecutive images are in the same shards, so that each process reads few files.
    return range(part * count // parts, (part + 1) * count // parts)


class _Routes(NamedTuple):
    """The rows of a batch that a process sends and receives."""

    send: Int64[Tensor, " sent"]  # places in its share, in the order of receivers
    sent: list[int]  # rows for each process
    received: list[int]  # rows from each process
    place: Int64[Tensor, " own"]  # place of each image of its batch among the received rows


def routes(wanted: Int64[Tensor, "processes own"], count: int, own: int) -> _Routes:
    """Return the rows that process `own` exchanges if each process wants a row of `wanted`."""
    processes = len(wanted)
    starts = torch.tensor([share_of(count, k, processes).start for k in range(processes)])
    holder = torch.searchsorted(starts, wanted, right=True) - 1
    is_mine = holder == own
    send = wanted[is_mine] - starts[own]
    received = torch.bincount(holder[own], minlength=processes)
    order = holder[own].argsort(stable=True)  # rows arrive in the order of their holders
    return _Routes(send, is_mine.sum(1).tolist(), received.tolist(), order.argsort())


class _Exchange(NamedTuple):
    """A batch on its way: a process waits for `work` and orders rows by `place`.

    On a GPU a stream does this, and `done` is its event.
    """

    arrived: Tensor
    sent: Tensor | None  # must exist until the exchange is complete
    place: Tensor
    numbers: Int64[Tensor, "5 own"]
    work: Any
    done: torch.cuda.Event | None


class SplitResident(AbstractContextManager["SplitResident"]):
    """Loader that holds a share of the set on the device of each process, as uint8.

    `processes` consecutive ranks hold the set together. All processes must create it together.
    """

    def __init__(
        self,
        source: Source,
        *,
        side: int,
        device: torch.device | str,
        processes: int,
        workers: int = 0,
        decoder: DeviceDecoder | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device: torch.device = torch.device(device)
        self.processes: int = processes
        self._count, self._side, self._clock = len(source), side, WaitClock()
        self._own = rank() % processes
        self._group = consecutive_ranks(processes)
        options: dict[str, Any] = {"side": side, "device": device, "workers": workers}
        options["decoder"] = decoder
        part = share_of(self._count, self._own, processes)
        self._held, found = _load_together(
            lambda: Resident(source, part=part, progress=progress, **options)
        )
        self.bad: list[int] = sorted(found)
        self.unreadable: list[tuple[str, str]] = [found[i] for i in self.bad]
        self._numbers = torch.zeros(5, self._count, dtype=torch.int64, device=self.device)
        self._numbers[:, part.start : part.stop] = self._held.numbers
        sum_in_group(self._numbers, self._group)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            # High priority: small copies must not wait for the large kernels of a training step.
            self._stream = torch.cuda.Stream(self.device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._decoding = Streaming(source, **options)

    @property
    def waited(self) -> float:
        """Seconds of waiting for other processes, and of the device for decoded images."""
        return self._clock.seconds + self._decoding.waited

    @property
    def bytes_held(self) -> int:
        """Bytes of the images that this process holds."""
        return self._held.images.nbytes

    def batches(self, plan: Iterable[BatchIndices]) -> Generator[Batch]:
        """Yield the batches of `plan` in order; decode them, as other processes take no part."""
        return self._decoding.batches(plan)

    def batches_of_rank(self, plan: Iterable[BatchIndices]) -> Generator[Batch]:
        """Yield this process's part of each batch; all processes must call this with one plan.

        `plan` holds the images of all processes in the order of ranks. The next batch is exchanged
        while the consumer uses the current one. The host is two steps ahead of a GPU at most.
        """
        pending: _Exchange | None = None
        used: deque[torch.cuda.Event] = deque()  # after the consumer's kernels on each batch
        for portion in check_indices(plan, self._count):
            ready = None if pending is None else self._finish(pending)
            pending = None  # frees its buffers
            if len(used) == 2:
                used.popleft().synchronize()  # else memory of batches is not reused
            pending = self._begin(portion)
            if ready is None:
                continue
            yield ready
            if self._stream is not None:
                used.append(torch.cuda.Event())
                used[-1].record(torch.cuda.current_stream(self.device))
        if pending is not None:
            yield self._finish(pending)

    def _begin(self, portion: BatchIndices) -> _Exchange:
        """Start the exchange of a batch."""
        world, first = world_size(), rank() - self._own
        if len(portion.index) % world:
            rule = f"must be divisible by the number of processes, {world}"
            raise ValueError(f"images of a plan {rule}, got {len(portion.index)}")
        wanted = portion.index.view(world, -1)[first : first + self.processes]
        epoch = portion.epoch.view(world, -1)[rank()]
        send, sent, received, place = routes(wanted, self._count, self._own)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            rows = self._held.rows.index_select(0, self._copied(send))
            arrived, work = exchange_rows(rows, sent, received, self._group)
            numbers = self._numbers.index_select(1, self._copied(wanted[self._own]))
            numbers[EPOCH] = self._copied(epoch)
            place = self._copied(place)
            if self._stream is None:
                return _Exchange(arrived, rows, place, numbers, work, None)
            work.wait()  # the stream waits, not the host
            ordered, done = arrived.index_select(0, place), torch.cuda.Event()
            done.record(self._stream)
            return _Exchange(ordered, None, place, numbers, None, done)

    def _finish(self, exchange: _Exchange) -> Batch:
        """Return a batch; on a GPU the consumer's stream waits for it."""
        rows = exchange.arrived
        if exchange.work is not None:
            with self._clock:
                exchange.work.wait()
                rows = rows.index_select(0, exchange.place)
        if exchange.done is not None:
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(exchange.done)
            rows.record_stream(consumer)
            exchange.numbers.record_stream(consumer)
        images = rows.view(torch.uint8).view(-1, 3, self._side, self._side)
        return Batch(images, *exchange.numbers.unbind())

    def _copied(self, values: Tensor) -> Tensor:
        """Return values on the device; the host does not wait."""
        if self._stream is None:
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def close(self) -> None:
        """End all threads."""
        self._decoding.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_together(load: Callable[[], Resident]) -> tuple[Resident, dict[int, tuple[str, str]]]:
    """Load this process's share; return it and origin and reason of all unreadable images.

    If a process fails, all fail: otherwise the others would wait for it.
    """
    held: Resident | None = None
    problem: Exception | None = None
    try:
        held = load()
    except Exception as error:
        problem = error
    own = {} if held is None else dict(zip(held.bad, held.unreadable, strict=True))
    found = gather_objects((own, problem and f"{type(problem).__name__}: {problem}"))
    if problem is not None:
        raise problem
    for k, (_, text) in enumerate(found):
        if text is not None:
            raise RuntimeError(f"process {k} could not load its share of the images: {text}")
    assert held is not None
    return held, {i: pair for bad, _ in found for i, pair in bad.items()}
