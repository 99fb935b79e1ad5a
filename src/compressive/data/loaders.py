"""Loaders of batches on the device: `Resident` caches a decoded source, `Streaming` decodes it."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from compressive.data.decode import Unreadable
from compressive.data.decoder_process import DecoderProcess, start_decoder_process
from compressive.data.device_prefetch import DevicePrefetcher
from compressive.data.nvjpeg import DeviceDecoder, choose_decoder
from compressive.data.prefetch import Prefetcher
from compressive.data.reader import ImageReader
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source, fetch_ahead, pixels
from compressive.data.wait_clock import WaitClock
from compressive.data.worker_threads import own_cores, useful_threads
from compressive.platforms.accelerators import device_memory
from compressive.platforms.memory import free_host_memory

_CHUNK = 2**26  # bytes per batch while a resident set is loaded; a few are in memory at once
_SAMPLE = 256  # images whose size is read before a run
_TIMED_READS = 9  # images that are read to choose the number of threads
_AHEAD = 32  # of them are fetched ahead if the source is remote
# Of the free memory; assumption: training needs the rest. The memory of MPS is the machine's.
MEMORY_SHARE = {"cuda": 0.4, "xpu": 0.4, "mps": 0.2, "cpu": 0.5}


class Batch(NamedTuple):
    """Images on the device, padded with zeros at the right and bottom, with index and label."""

    # An unreadable image is replaced by the next readable one, with that image's index and label.

    images: UInt8[Tensor, "batch 3 side side"]
    height: Int64[Tensor, " batch"]
    width: Int64[Tensor, " batch"]
    index: Int64[Tensor, " batch"]
    epoch: Int64[Tensor, " batch"]
    label: Int64[Tensor, " batch"]  # -1: no label


class Resident(AbstractContextManager["Resident"]):
    """Loader that holds the whole set on the device as uint8; it decodes each image once.

    `part` are consecutive images, for `SplitResident`: only these are decoded and held.
    """

    waited: float = 0.0  # as in `Streaming`; images are already on the device

    def __init__(
        self,
        source: Source,
        *,
        side: int,
        device: torch.device | str,
        workers: int = 0,
        decoder: DeviceDecoder | None = None,
        part: range | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        held = range(len(source)) if part is None else part
        count = len(held)
        self.device: torch.device = torch.device(device)
        shape = (count, 3, side, side)
        self.images: Tensor = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.numbers: Tensor = torch.empty(5, count, dtype=torch.int64, device=self.device)
        size = max(1, min(1024, _CHUNK // (3 * side * side)))
        starts = range(held.start, held.stop, size)
        indices = (torch.arange(k, min(k + size, held.stop)) for k in starts)
        plan = (BatchIndices(index, torch.zeros_like(index)) for index in indices)
        options = {"side": side, "device": device, "workers": workers}
        with Streaming(source, decoder=decoder, **options) as stream:
            done = 0
            for batch in stream.batches(plan):
                filled = slice(done, done + len(batch.index))
                self.images[filled] = batch.images
                self.numbers[:, filled] = torch.stack(batch[1:])
                done = filled.stop
                if progress is not None:
                    progress(done, count)
            self.unreadable: list[tuple[str, str]] = stream.unreadable
            self.bad: list[int] = stream.bad
        # CUDA's index_select copies one element per thread: use 8-byte elements if rows allow it.
        rows = self.images.flatten(1)
        self.rows: Tensor = rows if rows.shape[1] % 8 else rows.view(torch.int64)

    def batches(self, plan: Iterable[BatchIndices]) -> Generator[Batch]:
        """Yield the batches of `plan` in order; the host never waits for the device."""
        for portion in check_indices(plan, self.images.shape[0]):
            wanted = torch.stack(tuple(portion))
            if is_cuda := self.device.type == "cuda":
                wanted = wanted.pin_memory()  # its allocator keeps the memory until it is copied
            place, epoch = wanted.to(self.device, non_blocking=is_cuda).unbind()
            images = self.rows.index_select(0, place).view(torch.uint8)
            images = images.view(-1, *self.images.shape[1:])
            height, width, index, _, label = self.numbers.index_select(1, place).unbind()
            yield Batch(images, height, width, index, epoch, label)

    def close(self) -> None:
        """Do nothing; `Streaming` has threads to end."""

    def __exit__(self, *_: object) -> None:
        self.close()


class Streaming(AbstractContextManager["Streaming"]):
    """Loader that decodes in threads, at most `prefetch` batches ahead; it caches no image."""

    # Decoding and copying release the GIL, so that threads can use all cores. On a GPU batches are
    # copied on a second stream. With a `decoder`, threads read JPEG files without decoding them.
    # With a `process`, the threads are in that process as soon as it is ready, and images and their
    # order are the same.

    def __init__(
        self,
        source: Source,
        *,
        side: int,
        device: torch.device | str,
        workers: int = 0,
        prefetch: int = 4,
        decoder: DeviceDecoder | None = None,
        process: DecoderProcess | None = None,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch must be 1 batch or more, got {prefetch}")
        self.device: torch.device = torch.device(device)
        self._clock = WaitClock.of_device(self.device)
        self.workers: int = workers  # 0: chosen with the first batch
        self.prefetch: int = prefetch
        self.decoder: DeviceDecoder | None = decoder
        self.process: DecoderProcess | None = process
        self._reader = ImageReader(source, side, decoder.subsamplings if decoder else ())
        self._flows: set[Prefetcher | DevicePrefetcher] = set()

    @property
    def waited(self) -> float:
        """Seconds that the device has waited for batches."""
        return self._clock.seconds

    @property
    def bad(self) -> list[int]:
        """Sorted indices of the images that could not be read so far."""
        return sorted(dict(self._reader.bad))

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Origin and reason of each image that could not be read so far, by index."""
        bad = dict(self._reader.bad)
        return [(self._reader.source.origin(i), bad[i]) for i in sorted(bad)]

    def batches(self, plan: Iterable[BatchIndices]) -> Generator[Batch]:
        """Yield the batches of `plan` in order; the worker threads end with the generator."""
        reader, decoder = self._reader, self.decoder
        checked = _announced(check_indices(plan, reader.count), reader.source)
        read = reader.decoded if decoder is None else reader.fetched
        if not self.workers and (first := next(checked, None)) is not None:
            some = first.index[:_TIMED_READS].tolist()
            self.workers = useful_threads(read, some, own_cores())
            checked = chain([first], checked)
        options = {"device": self.device, "workers": self.workers, "prefetch": self.prefetch}
        options["clock"] = self._clock
        if decoder is None:
            flow = Prefetcher(checked, reader, process=self.process, **options)
        else:
            flow = DevicePrefetcher(checked, reader, decoder, **options)
        self._flows.add(flow)
        try:
            while flow.has_next():
                arrival = flow.next()
                yield Batch(arrival.images, *arrival.numbers.unbind())
        finally:
            self._flows.discard(flow)
            flow.close()

    def close(self) -> None:
        """End all threads; a plan that is not finished raises an error at its next batch."""
        for flow in list(self._flows):
            flow.close()
        if self.process is not None:
            self.process.close()
            self.process = None

    def __exit__(self, *_: object) -> None:
        self.close()


def canvas_side(source: Source, view_size: int, setting: int = 0) -> int:
    """Return the side of padded images for views of this size; `setting` if it is not 0."""
    # It is the largest side in a sample of images, limited to what views need. Larger images are
    # shrunk. Above 64 pixels it is a multiple of 8, which is faster on a GPU; smaller sets of one
    # size, such as CIFAR, are not padded.
    if setting:
        return setting
    most = most_needed(view_size)
    count, largest = len(source), 0
    sampled = [i * count // min(_SAMPLE, count) for i in range(min(_SAMPLE, count))]
    fetch_ahead(source, sampled[:_AHEAD])
    for k, i in enumerate(sampled):
        fetch_ahead(source, sampled[k + _AHEAD : k + _AHEAD + 1])
        try:
            largest = max(largest, *pixels(source, i).shape[1:])
        except Unreadable:
            continue
        if largest >= most:
            break
    side = min(largest, most) or most
    return side if side <= 64 else -(-side // 8) * 8


def most_needed(view_size: int) -> int:
    """Return the largest image side that is useful for views of this size."""
    # 16/7 of their side (512 at 224, where the smallest crop of the paper, 8 % of the area, has 145
    # pixels). For small views, 4 times their side up to 256, because these need little memory.
    return max(round(view_size * 16 / 7), min(4 * view_size, 256))


def open_loader(
    source: Source,
    *,
    side: int,
    device: torch.device | str,
    cache_on_device: Literal["auto", "yes", "no"] = "auto",
    decode_on_device: Literal["auto", "yes", "no"] = "no",
    workers: int = 0,
    prefetch: int = 4,
    decode_apart: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Resident | Streaming:
    """Return a `Resident` loader if the set fits into the free memory, else a `Streaming` one.

    `decode_apart`: it may decode in another process, for a loop that must not be slowed.
    """
    device = torch.device(device)
    needed, free = len(source) * 3 * side**2, free_memory(device)
    if cache_on_device == "yes" and needed > free:
        raise ValueError(
            f"data.cache_on_device=yes needs {needed / 1e9:.1f} GB for {len(source):,} images of "
            f"{side} x {side} pixels, and {device} has {free / 1e9:.1f} GB free; set "
            "data.cache_on_device=no, or a smaller data.max_side"
        )
    share = MEMORY_SHARE[device.type]
    is_cached = cache_on_device == "yes" or (cache_on_device == "auto" and needed <= share * free)
    decoder = choose_decoder(source, device, decode_on_device, is_cached=is_cached)
    options = {"side": side, "device": device, "workers": workers, "decoder": decoder}
    if is_cached:
        return Resident(source, progress=progress, **options)
    is_apart = decode_apart and decoder is None
    process = start_decoder_process(source, device) if is_apart else None
    return Streaming(source, prefetch=prefetch, process=process, **options)


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a GPU or in the machine, within a container's limit."""
    memory = device_memory(device)
    if memory is None:
        return free_host_memory()
    return min(memory.free, free_host_memory()) if device.type == "mps" else memory.free


def check_indices(plan: Iterable[BatchIndices], count: int) -> Iterator[BatchIndices]:
    """Yield the plan; raise ValueError for a wrong index, which would be a fatal error in CUDA."""
    for portion in plan:
        index = portion.index
        if not len(index) or index.min() < 0 or index.max() >= count:
            raise ValueError(
                f"a plan must hold indices from 0 to {count - 1}, got {index.tolist()}"
            )
        yield portion


def _announced(plan: Iterable[BatchIndices], source: Source) -> Iterator[BatchIndices]:
    """Yield the plan; tell the source which images will be read soon."""
    for portion in plan:
        fetch_ahead(source, portion.index.tolist())
        yield portion
