"""Read every image of all splits once: its file, its size, hashes, a descriptor and features."""

import hashlib
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from compressive.data.all_splits import open_all_splits
from compressive.data.decode import Unreadable
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.loaders import open_loader
from compressive.data.location import ImageData
from compressive.data.several import CombinedSource
from compressive.data.source import ImageSource, Source, pixels
from compressive.device import precision
from compressive.evaluation.features import Features, cached, extract, network_fingerprint
from compressive.evaluation.frozen_model import FrozenModel
from compressive.inspection.descriptor import THUMB, gray_thumb
from compressive.progress import Display

_READ_BLOCK = 1024  # images per block of reads without an encoder
_BATCH_BYTES = 2**26  # bytes of pixels at most in a batch
_MOST_IMAGES = {"cpu": 128, "gpu": 512}  # in a batch; more only need more memory on a CPU
_SIGNATURES = (  # first bytes of a file, and what it is
    (b"\xff\xd8", "JPEG"),
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"P1", "PNM"),
    (b"P2", "PNM"),
    (b"P3", "PNM"),
    (b"P4", "PNM"),
    (b"P5", "PNM"),
    (b"P6", "PNM"),
)


@dataclass(frozen=True)
class DataSplit:
    """One split; its images have the numbers `start` to `start + len(source)` of the scan."""

    name: str
    source: Source
    start: int


@dataclass
class Scan:
    """Facts of all images, in the order of the splits; arrays have one row per image."""

    splits: list[DataSplit]
    classes: tuple[str, ...]  # of all splits; empty without labels
    split: NDArray[np.int64]  # position in `splits`
    label: NDArray[np.int64]  # position in `classes`, -1 without a label
    width: NDArray[np.int64]  # 0 if unreadable
    height: NDArray[np.int64]
    size: NDArray[np.int64]  # bytes of the file; 0 if unknown
    kind: list[str]  # format of the file; "" if unknown
    file_hash: NDArray[np.character]  # bytes; b"" if unknown
    pixel_hash: NDArray[np.character]  # bytes; b"" if unreadable
    thumb: UInt8[Tensor, "count side side"]  # brightness of a small copy
    features: Float[Tensor, "count feat"] | None = None  # zeros if unreadable; None: no encoder
    reasons: dict[int, str] = field(default_factory=dict)  # of unreadable images

    def __len__(self) -> int:
        return len(self.split)

    @property
    def readable(self) -> NDArray[np.bool_]:
        """Return which images could be read."""
        return self.width > 0

    def origin(self, i: int) -> str:
        """Return the location of image i."""
        split = self.splits[self.split[i]]
        return split.source.origin(int(i) - split.start)

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Return the pixels of image i."""
        split = self.splits[self.split[i]]
        return pixels(split.source, int(i) - split.start)

    def class_name(self, i: int) -> str | None:
        """Return the name of the class of image i, or None without a label."""
        return self.classes[self.label[i]] if self.label[i] >= 0 else None


def data_splits(data: ImageData, max_pixels: int) -> list[DataSplit]:
    """Open every split of a source, train first; a source without splits is train."""
    found: list[DataSplit] = []
    for name, source in open_all_splits(data, max_pixels).items():
        found.append(DataSplit(name, source, sum(len(split.source) for split in found)))
    return found


def scan(
    splits: list[DataSplit],
    model: FrozenModel | None,
    device: torch.device,
    show: Display,
    *,
    cache: Path | None = None,
) -> Scan:
    """Decode each image once; with a model, compute its features in the same pass.

    `cache` is a folder in which features are kept for the next call.
    """
    total = sum(len(split.source) for split in splits)
    classes, labels = _common_labels(splits)
    found = Scan(
        splits=splits,
        classes=classes,
        split=np.repeat(np.arange(len(splits)), [len(split.source) for split in splits]),
        label=labels,
        width=np.zeros(total, np.int64),
        height=np.zeros(total, np.int64),
        size=np.zeros(total, np.int64),
        kind=[""] * total,
        file_hash=np.zeros(total, "S16"),
        pixel_hash=np.zeros(total, "S16"),
        thumb=torch.zeros(total, THUMB, THUMB, dtype=torch.uint8),
    )
    if model is not None:
        found.features = torch.zeros(total, model.feature_dim)
    for split in splits:
        watched = _watched(split, found)
        title = f"reading {split.name}"
        step = partial(show.progress, title, unit="images")
        if model is None:
            _read_all(watched, split.start, found, step)
        else:
            _embed_all(watched, split, found, model, device, cache, step)
    return found


def fast_precision(device: torch.device) -> torch.dtype:
    """Return the fastest type for features: float16 on ARM with its instructions, 1.8 times."""
    is_arm = device.type == "cpu" and platform.machine() in ("aarch64", "arm64")
    if is_arm and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return torch.float16
    return precision("auto", device)


def file_kind(data: bytes) -> str:
    """Return the format of an encoded image by its first bytes, such as JPEG."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), "other")


def _common_labels(splits: list[DataSplit]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the classes of all splits, and labels that are their positions."""
    names = dict.fromkeys(name for split in splits for name in split.source.classes or ())
    number = {name: i for i, name in enumerate(names)}
    labels = []
    for split in splits:
        own, source = split.source.labels, split.source
        if own is None:
            labels.append(np.full(len(source), -1))
            continue
        ids = np.array([number[name] for name in source.classes or ()] + [-1])
        labels.append(ids[own.numpy()])  # the last one for label -1
    return tuple(names), np.concatenate(labels).astype(np.int64)


def _watched(split: DataSplit, found: Scan) -> Source:
    """Return a source that notes facts of each image that is read from it."""
    source, start = split.source, split.start
    inner, thumbs = _noting_files(source, start, found), found.thumb.numpy()

    def read(i: int) -> Tensor:
        image = pixels(inner, i)
        digest = hashlib.blake2b(image.contiguous().numpy().data, digest_size=15)
        digest.update(f"{tuple(image.shape)}".encode())
        found.pixel_hash[start + i] = b"p" + digest.digest()  # never empty, unlike no hash
        thumbs[start + i] = gray_thumb(image).numpy()
        found.height[start + i], found.width[start + i] = image.shape[1:]
        return image

    return ImageSource(
        name=source.name,
        count=len(source),
        read=read,
        place=source.origin,
        labels=source.labels,
        classes=source.classes,
    )


def _noting_files(source: Source, start: int, found: Scan) -> Source:
    """Return a source that notes size, format and hash of each file; other sources unchanged."""
    if isinstance(source, CombinedSource):
        made, pairs = copy(source), zip(source.parts, source.starts, strict=False)
        made.parts = [_noting_files(part, start + first, found) for part, first in pairs]
        return made
    if isinstance(source, ImageSource):
        return replace(source, read=_noting_file(source.read, start, found))
    return source


def _noting_file(read: Callable[[int], Any], start: int, found: Scan) -> Callable[[int], Any]:
    def noted(i: int) -> Any:
        data = read(i)
        if isinstance(data, bytes):
            found.size[start + i] = len(data)
            found.kind[start + i] = file_kind(data)
            digest = hashlib.blake2b(data, digest_size=15)
            found.file_hash[start + i] = b"f" + digest.digest()
        return data

    return noted


def _read_all(source: Source, start: int, found: Scan, show: Callable[[int, int], None]) -> None:
    """Read all images in threads; decoding releases the GIL."""

    def reason(i: int) -> str:
        try:
            source.image(i)
        except Unreadable as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        for first in range(0, len(source), _READ_BLOCK):
            some = range(first, min(first + _READ_BLOCK, len(source)))
            for i, why in zip(some, pool.map(reason, some), strict=True):
                if why:
                    found.reasons[start + i] = why
            show(some.stop, len(source))


def _embed_all(
    source: Source,
    split: DataSplit,
    found: Scan,
    model: FrozenModel,
    device: torch.device,
    cache: Path | None,
    show: Callable[[int, int], None],
) -> None:
    """Read all images through a loader and compute features, or take them from the cache."""
    dtype, crop, start = fast_precision(device), model.crop(), split.start
    key = {
        "weights": network_fingerprint(model.network),
        "data": "" if cache is None else DatasetFingerprint(split.source).with_file_times(),
        "crop": tuple(crop),
        **model.shrink_protocol(),
        "precision": str(dtype),
        "device": device.type,
    }
    was_read = False

    def make() -> Features:
        nonlocal was_read
        was_read = True
        shrunk, side = model.shrink(source)
        most = _MOST_IMAGES["cpu" if device.type == "cpu" else "gpu"]
        batch_size = max(16, min(most, _BATCH_BYTES // (3 * side * side)))
        with open_loader(shrunk, side=side, device=device, cache_on_device="no") as loader:
            made = extract(
                *(model.network, loader, len(source), crop),
                precision=dtype,
                batch_size=batch_size,
                progress=show,
            )
            reasons = zip(loader.bad, loader.unreadable, strict=True)
            found.reasons.update({start + i: why for i, (_, why) in reasons})
        return Features(*(part.cpu() for part in made))

    made = cached(cache, key, make)
    assert found.features is not None
    found.features[start + made.index] = made.feats
    if not was_read:
        _read_all(source, start, found, show)
