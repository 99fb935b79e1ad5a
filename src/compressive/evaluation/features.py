"""Frozen features: extracted once for an encoder, a set and a crop, and kept by their content."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from compressive.augment.ops import center_box, crop_resize_flip, normalize
from compressive.checks import autocast, full_precision
from compressive.data.loaders import Batch, Resident, Streaming
from compressive.data.sampler import BatchIndices
from compressive.distributed import any_process, gather, rank, world_size
from compressive.rundir.files import write_bytes

Loader = Resident | Streaming
BATCH = 512


class Features(NamedTuple):
    """One vector for each image that could be read, in the order of the set."""

    feats: Float[Tensor, "count feat"]
    labels: Int[Tensor, " count"]
    index: Int[Tensor, " count"]


class Crop(NamedTuple):
    """What evaluation sees of an image: a central square of its shorter side, resized."""

    size: int
    share: float  # of the shorter side
    antialias: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, batch: Batch) -> Float[Tensor, "batch 3 size size"]:
        """Prepared images."""
        return normalize(self.pixels(batch), mean=self.mean, std=self.std)

    def pixels(self, batch: Batch) -> Float[Tensor, "batch 3 size size"]:
        """Colors in [0, 1]."""
        box = center_box(batch.height, batch.width, self.share)
        still = torch.zeros_like(batch.index, dtype=torch.bool)
        with full_precision(batch.images):
            return crop_resize_flip(batch.images, box, still, self.size, antialias=self.antialias)

    def words(self) -> dict[str, Any]:
        """How it is recorded with each number."""
        kernel = "bicubic, a = -0.5, " + ("antialiased" if self.antialias else "not antialiased")
        return {"size": self.size, "crop": f"central square, {self.share:g}", "resize": kernel}


def forward(
    network: nn.Module, images: Float[Tensor, "batch 3 h w"], precision: torch.dtype
) -> Float[Tensor, "batch feat"]:
    """Features in float32 of prepared images."""
    with torch.no_grad(), autocast(images.device, precision):
        return network(images).float()


def extract(
    network: nn.Module,
    loader: Loader,
    count: int,
    crop: Crop,
    *,
    precision: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """Features of a whole set; several processes share the work and all have the result.

    The network must be in evaluation mode. It is compared before and after: no weight and no
    statistic may change.
    """
    assert not network.training
    before = fingerprint(network)
    feats, labels, index = [], [], []
    for batch in loader.batches(_portions(count)):
        feats.append(forward(network, crop(batch), precision))
        labels.append(batch.label)
        index.append(batch.index)
        if progress is not None:
            progress(min(count, len(index) * BATCH * world_size()), count)
    found = Features(torch.cat(feats), torch.cat(labels), torch.cat(index))
    if world_size() > 1:
        whole = torch.stack(found[1:], 1).double()
        numbers = gather(whole).long()
        found = Features(gather(found.feats), *numbers.unbind(1))
    if fingerprint(network) != before:
        raise RuntimeError("weights or statistics of the network changed while it was evaluated")
    return _in_order(found, count)


def cached(
    folder: Path | None,
    key: dict[str, Any],
    make: Callable[[], Features],
    device: torch.device | str = "cpu",
) -> Features:
    """What `make` makes, or what it made when it was last asked with this key."""
    words = json.dumps(key, sort_keys=True).encode()
    name = hashlib.blake2b(words, digest_size=16).hexdigest()
    path = None if folder is None else folder / f"{name}.safetensors"
    # All processes make them or none: they make them together.
    kept = None if path is None else _kept(path)
    if path is not None and not any_process(kept is None, torch.device(device)):
        assert kept is not None
        return kept
    found = make()
    if path is not None and rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.contiguous() for name, value in found._asdict().items()}
        write_bytes(path, serialize(tensors))
    return found


def _kept(path: Path) -> Features | None:
    """What was written there, if it is there and whole: else it can be made again."""
    try:
        return Features(**load_file(path))
    except (OSError, SafetensorError, TypeError):
        return None


def fingerprint(network: nn.Module) -> str:
    """A short name for the content of weights and statistics."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in network.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def content_of(
    loader: Loader,
    origin: Callable[[int], str],
    count: int,
    labels: Int[Tensor, " count"] | None = None,
) -> str:
    """A short name for the content of a set: its pixels where they are held in memory.

    A streamed set is too large to be read twice: names, lengths and times of its files stand for
    what is in them.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(b"" if labels is None else labels.numpy().tobytes())
    if isinstance(loader, Resident):
        digest.update(_checksums(loader.images).cpu().numpy().tobytes())
        digest.update(loader.numbers.cpu().numpy().tobytes())
        return digest.hexdigest()
    known: dict[str, str] = {}
    for i in range(count):
        words = origin(i)
        path = words if os.path.exists(words) else words.rpartition(":")[0]
        if path not in known:
            state = os.stat(path) if path and os.path.exists(path) else None
            known[path] = f"{state.st_size} {state.st_mtime_ns}" if state else ""
        digest.update(f"{words} {known[path]}\n".encode())
    return digest.hexdigest()


def _checksums(images: Tensor) -> Int[Tensor, " count"]:
    """One 64-bit number for each image, on its device: bytes times fixed random odd numbers."""
    length = images[0].numel()
    random = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (length,), generator=random) * 2 + 1
    factors = factors.to(images.device)
    some = max(1, 2**24 // length)
    return torch.cat([(part.flatten(1) * factors).sum(1) for part in images.split(some)])


def _portions(count: int) -> Iterator[BatchIndices]:
    """This process's share, as many images in each; the first stands in where they run out."""
    share = -(-count // world_size())
    places = torch.arange(rank() * share, (rank() + 1) * share)
    for some in torch.where(places < count, places, 0).split(BATCH):
        yield BatchIndices(some, torch.zeros_like(some))


def _in_order(found: Features, count: int) -> Features:
    """Each image once: one that could not be read was replaced by another, which comes itself."""
    place = torch.full((count,), -1, device=found.index.device)
    place[found.index] = torch.arange(len(found.index), device=place.device)
    there = place[place >= 0]
    return Features(*(part[there] for part in found))
