"""Choose the loader of a run from the memory of all processes: whole, split or streamed."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from compressive.data.loaders import MEMORY_SHARE, Resident, Streaming, free_memory, open_loader
from compressive.data.nvjpeg import choose_decoder
from compressive.data.source import Source
from compressive.data.split_cache import SplitResident
from compressive.distributed import gather_objects, launched, world_size

# In memory: two in use, the next one, the one that arrives, and up to five that gloo's threads or
# the exchange keep; measured with gloo.
_BATCHES_HELD = 9
_BYTES_OF_NUMBERS = 40  # per image, in every process: height, width, index, epoch, label


def split_bytes(count: int, side: int, processes: int, batch: int) -> int:
    """Return the device memory per process if `processes` hold the images; `batch` is local."""
    row, most = 3 * side**2, -(-count // processes)
    return (most + _BATCHES_HELD * batch) * row + _BYTES_OF_NUMBERS * count


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
    options |= {"decode_on_device": decode_on_device, "decode_apart": True}
    return open_loader(source, cache_on_device=kind, **options)


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
