"""Extract features of a frozen encoder once per data set and crop, and cache them."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from compressive.augment.ops import center_box, crop_resize_flip, normalize
from compressive.augment.published_crop import PublishedCrop
from compressive.checks import autocast, full_precision
from compressive.data.loaders import Batch, Resident, Streaming
from compressive.data.sampler import BatchIndices
from compressive.distributed import any_process, gather, rank, world_size
from compressive.rundir.checksum import CHECKSUM_KEY, checksum
from compressive.rundir.files import write_bytes
from compressive.rundir.fingerprint import weights_fingerprint

Loader = Resident | Streaming
BATCH = 512


class Features(NamedTuple):
    """One feature vector per readable image, in the order of the data set."""

    feats: Float[Tensor, "count feat"]
    labels: Int[Tensor, " count"]
    index: Int[Tensor, " count"]


class Crop(NamedTuple):
    """The input of the encoder in evaluation: a resized central square of an image."""

    size: int
    share: float  # side of the square, as a fraction of the shorter side of the image
    antialias: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    published: PublishedCrop | None = None  # of third-party weights; replaces `share`

    def __call__(self, batch: Batch) -> Float[Tensor, "batch 3 size size"]:
        """Return crops with normalized colors."""
        return normalize(self.pixels(batch), mean=self.mean, std=self.std)

    def pixels(self, batch: Batch) -> Float[Tensor, "batch 3 size size"]:
        """Return crops with colors in [0, 1]."""
        if self.published is not None:
            return self.published(batch.images, self.size, batch.height, batch.width)
        box = center_box(batch.height, batch.width, self.share)
        still = torch.zeros_like(batch.index, dtype=torch.bool)
        with full_precision(batch.images):
            return crop_resize_flip(batch.images, box, still, self.size, antialias=self.antialias)

    def whole(self) -> "Crop":
        """Return the crop of the whole shorter side."""
        published = self.published and self.published._replace(share=1.0)
        return self._replace(share=1.0, published=published)

    def protocol(self) -> dict[str, Any]:
        """Describe the crop for the protocol of a record."""
        if self.published is not None:
            return {"size": self.size, **self.published.describe()}
        kernel = "bicubic, a = -0.5, " + ("antialiased" if self.antialias else "not antialiased")
        return {"size": self.size, "crop": f"central square, {self.share:g}", "resize": kernel}


def forward(
    network: nn.Module, images: Float[Tensor, "batch 3 h w"], precision: torch.dtype
) -> Float[Tensor, "batch feat"]:
    """Return float32 features of normalized images."""
    with torch.no_grad(), autocast(images.device, precision):
        return network(images).float()


def extract(
    network: nn.Module,
    loader: Loader,
    count: int,
    crop: Crop,
    *,
    precision: torch.dtype,
    batch_size: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """Return the features of a whole data set; processes share the work and all get the result."""

    def show(batches: int) -> None:
        if progress is not None:
            progress(min(count, batches * batch_size * world_size()), count)

    plan = _own_batches(count, batch_size)
    found = extract_batches(network, loader, plan, crop, precision=precision, progress=show)
    if world_size() > 1:
        numbers = gather(torch.stack(found[1:], 1).double(), "labels").long()
        found = Features(gather(found.feats, "features"), *numbers.unbind(1))
    return in_order(found, count)


def extract_batches(
    network: nn.Module,
    loader: Loader,
    plan: Iterable[BatchIndices],
    crop: Crop,
    *,
    precision: torch.dtype,
    progress: Callable[[int], None] = lambda _: None,
) -> Features:
    """Return the features of these batches; call `progress` with the number that is done.

    The network must be in evaluation mode. Raise RuntimeError if a weight or statistic changes.
    """
    assert not network.training
    changed = remember_weights(network)
    feats, labels, index = [], [], []
    for batch in loader.batches(plan):
        feats.append(forward(network, crop(batch), precision))
        labels.append(batch.label)
        index.append(batch.index)
        progress(len(index))
    if changed():
        raise RuntimeError("weights or statistics of the network changed while it was evaluated")
    return Features(torch.cat(feats), torch.cat(labels), torch.cat(index))


def in_order(found: Features, count: int) -> Features:
    """Sort by index and drop repetitions: a loader replaces unreadable images with other ones."""
    place = torch.full((count,), -1, device=found.index.device)
    place[found.index] = torch.arange(len(found.index), device=place.device)
    return Features(*(part[place[place >= 0]] for part in found))


def cached(
    folder: Path | None,
    key: dict[str, Any],
    make: Callable[[], Features],
    device: torch.device | str = "cpu",
) -> Features:
    """Return cached features for `key`, computing them with `make` if absent."""
    content = json.dumps(key, sort_keys=True)
    name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    path = None if folder is None else folder / f"{name}.safetensors"
    # `make` is collective: either all processes call it or none does.
    kept = None if path is None else _read_cache(path, content)
    if path is not None and not any_process(kept is None, torch.device(device)):
        assert kept is not None
        return kept
    found = make()
    if path is not None and rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in found._asdict().items()}
        write_bytes(path, serialize(tensors, {CHECKSUM_KEY: checksum(content, tensors)}))
    return found


def _read_cache(path: Path, key: str) -> Features | None:
    """Return the features in a file, or None; warn if the file exists but is damaged."""
    try:
        with safe_open(path, "pt") as file:
            stated = (file.metadata() or {}).get(CHECKSUM_KEY)
        tensors = load_file(path)
        if stated == checksum(key, tensors):
            return Features(**tensors)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError):
        pass
    if rank() == 0:
        note = "is damaged or of an earlier version, so its features are computed again"
        warnings.warn(f"{path} {note}", stacklevel=1)
    return None


def network_fingerprint(network: nn.Module) -> str:
    """Return a hash of all weights and statistics of a network."""
    state = network.state_dict().items()
    return weights_fingerprint((name, value.detach().cpu().numpy()) for name, value in state)


@torch.no_grad()
def remember_weights(network: nn.Module) -> Callable[[], str]:
    """Return a function that names the first weight or statistic that has changed, else "".

    It compares copies on the device, which is faster than `network_fingerprint`.
    """

    def state() -> dict[str, Tensor]:
        return {**dict(network.named_parameters()), **dict(network.named_buffers())}

    before = {name: value.clone() for name, value in state().items()}

    @torch.no_grad()
    def changed() -> str:
        now = state()
        if now.keys() != before.keys():
            return ", ".join(sorted(now.keys() ^ before.keys()))
        pairs = [(now[name], value) for name, value in before.items()]
        same = [((a == b) | (a.isnan() & b.isnan())).all() for a, b in pairs]
        kept = torch.stack(same).tolist() if same else []  # waits for the device once
        return next((name for name, is_kept in zip(before, kept, strict=True) if not is_kept), "")

    return changed


def _own_batches(count: int, size: int) -> Iterator[BatchIndices]:
    """Yield the indices of this process; shares have equal length, padded with the first image."""
    share = -(-count // world_size())
    places = torch.arange(rank() * share, (rank() + 1) * share)
    for some in torch.where(places < count, places, 0).split(size):
        yield BatchIndices(some, torch.zeros_like(some))
