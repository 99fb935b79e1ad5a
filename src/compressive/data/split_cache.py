"""Images in the device memory of several processes: each holds a share, and batches are exchanged.

Every process knows the order of all images, so that each one knows which rows the others need. No
index is sent. The batches are bitwise those of one process that holds the whole set.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from compressive.data.loaders import (
    MEMORY_SHARE,
    Batch,
    Resident,
    Streaming,
    check_indices,
    free_memory,
    open_loader,
)
from compressive.data.nvjpeg import DeviceDecoder, choose_decoder
from compressive.data.prefetch import EPOCH, Clock
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source
from compressive.distributed import (
    consecutive_ranks,
    exchange_rows,
    gather_objects,
    launched,
    rank,
    sum_in_group,
    world_size,
)

# In memory: two in use, the next one, the one that arrives, and up to five that gloo's threads or
# the exchange keep; measured with gloo.
_BATCHES = 9
_BYTES_OF_NUMBERS = 40  # per image, in every process: height, width, index, epoch, label


def share_of(count: int, part: int, parts: int) -> range:
    """Return the images that the process `part` of `parts` holds; sizes differ by one at most."""
    # Consecutive images are in the same shards, so that each process reads few files.
    return range(part * count // parts, (part + 1) * count // parts)


def split_bytes(count: int, side: int, processes: int, batch: int) -> int:
    """Return the device memory per process if `processes` hold the images; `batch` is local."""
    row, most = 3 * side**2, -(-count // processes)
    return (most + _BATCHES * batch) * row + _BYTES_OF_NUMBERS * count


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
        self._count, self._side, self._clock = len(source), side, Clock()
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
        """Seconds that consumers have waited for batches."""
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


def open_shared_loader(
    source: Source,
    *,
    side: int,
    device: torch.device | str,
    batch: int,
    cache_on_device: Literal["auto", "yes", "split", "no"] = "auto",
    decode_on_device: Literal["auto", "yes", "no"] = "no",
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Resident | Streaming | SplitResident:
    """Return the loader of a run; all processes must call this, and none holds more than fits.

    `batch` is the number of images in a forward pass of one process.
    """
    device = torch.device(device)
    options: dict[str, Any] = {"side": side, "device": device, "workers": workers}
    options["progress"] = progress
    processes = _holders(source, side, device, batch, cache_on_device)
    if processes > 1:
        decoder = choose_decoder(source, device, decode_on_device, is_cached=True)
        return SplitResident(source, processes=processes, decoder=decoder, **options)
    kind = "no" if processes == 0 else "yes" if cache_on_device == "split" else cache_on_device
    return open_loader(source, cache_on_device=kind, decode_on_device=decode_on_device, **options)


def _holders(
    source: Source, side: int, device: torch.device, batch: int, cache_on_device: str
) -> int:
    """Return how many processes hold the set together; 1: each holds all; 0: it does not fit."""
    if world_size() == 1:
        return 1
    # Processes on a machine share the memory of the host.
    local = launched("LOCAL_WORLD_SIZE", world_size())
    free = free_memory(device) // (local if device.type in ("cpu", "mps") else 1)
    facts = gather_objects((len(source), side, local, free))
    counts, sides, locals_, frees = map(set, zip(*facts, strict=True))
    if len(counts) > 1 or len(sides) > 1:
        got = ", ".join(f"{count:,} images of {side} pixels" for count, side, *_ in facts)
        raise ValueError(f"all processes must find the same images, got {got}")
    if cache_on_device in ("yes", "no"):
        return 1
    free = min(frees)
    usual = MEMORY_SHARE[device.type] * free
    if cache_on_device == "auto" and len(source) * 3 * side**2 <= usual:
        return 1
    # The processes of a machine, or all: the links within a machine are faster.
    sizes = [local] if len(locals_) == 1 and local > 1 and world_size() % local == 0 else []
    for size in (*sizes, world_size()):
        if split_bytes(len(source), side, size, batch) <= usual:
            return size
    needed = split_bytes(len(source), side, world_size(), batch)
    if cache_on_device == "split" and needed > free:
        raise ValueError(
            f"data.cache_on_device=split needs {needed / 1e9:.1f} GB in each of {world_size()} "
            f"processes for {len(source):,} images of {side} x {side} pixels, and one has "
            f"{free / 1e9:.1f} GB free; set data.cache_on_device=no, a smaller data.max_side, or "
            "use more processes"
        )
    return world_size() if cache_on_device == "split" else 0
