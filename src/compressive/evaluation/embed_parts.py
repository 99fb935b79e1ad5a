"""Features of many images in parts, which an engine computes in other processes."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.loaders import canvas_side, open_loader
from compressive.data.location import ImageData
from compressive.data.pack_shard import require_same_images
from compressive.data.sampler import BatchIndices
from compressive.data.several import named_place
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.device import pick_device, precision
from compressive.engine.local import Engine
from compressive.evaluation.features import (
    BATCH,
    Features,
    extract_batches,
    in_order,
    network_fingerprint,
)
from compressive.evaluation.frozen_model import FrozenModel, open_model
from compressive.progress import Display

_BATCHES = 8  # of a part, at most: 33 MB of features with ResNet-50; each part starts a loader
_PARTS_EACH = 4  # for each process, at least, so that all end at about the same time


class PartOpening(NamedTuple):
    """How another process opens the encoder and the images, and how it recognizes them."""

    encoder: str
    network: str
    size: int
    device: str
    images: str
    split: str
    max_pixels: int
    side: int  # `canvas_side` of the images, which would be read again for every process
    weights: str  # fingerprint of the encoder
    pixels: str  # and of the images
    workers: int = 0


class EmbedUnit(NamedTuple):
    """A part of the images: whole batches, so that each batch is that of a single process."""

    opening: PartOpening
    first: int
    last: int  # exclusive


class PartFeatures(NamedTuple):
    """Features, labels and indices of a part as arrays, which Ray sends without a copy."""

    columns: tuple[NDArray[Any], ...]
    unreadable: dict[int, tuple[str, str]]  # origin and reason by index


def encoder_unit(
    encoder: str | Path,
    images: ImageData,
    model: FrozenModel,
    source: Source,
    split: str,
    network: str,
    size: int,
    device: str,
) -> PartOpening:
    """Describe an opened encoder and its images for other processes."""
    return PartOpening(
        encoder=str(encoder),
        network=network,
        size=size,
        device=device,
        images=named_place(images),
        split=split,
        max_pixels=model.max_pixels,
        side=canvas_side(source, model.size),
        weights=network_fingerprint(model.network),
        pixels=DatasetFingerprint(source).of(),
    )


def embed_parts(
    engine: Engine, opening: PartOpening, count: int, display: Display
) -> tuple[Features, list[tuple[str, str]]]:
    """Return the features of all readable images, and location and reason of the others."""
    opening = opening._replace(workers=engine.cores)
    batches = count // BATCH // (_PARTS_EACH * engine.room())
    step = max(1, min(_BATCHES, batches)) * BATCH
    units = (EmbedUnit(opening, k, min(k + step, count)) for k in range(0, count, step))
    parts: dict[int, Features] = {}
    unreadable: dict[int, tuple[str, str]] = {}
    done = 0
    for number, part in engine.map(embed_part, units, name="embed", keeps_model=True):
        # Copy: the arrays are in the memory that the processes of Ray share.
        feats, labels, index = (torch.from_numpy(column.copy()) for column in part.columns)
        parts[number] = Features(feats, labels, index)
        unreadable |= part.unreadable
        done += min(step, count - number * step)
        display.progress("embedding", done, count, unit="images")
    ordered = [parts.pop(number) for number in range(len(parts))]
    feats, labels, index = (torch.cat(column) for column in zip(*ordered, strict=True))
    found = in_order(Features(feats, labels, index), count)
    return found, [unreadable[i] for i in sorted(unreadable)]


def embed_part(unit: EmbedUnit) -> PartFeatures:
    """Return the features of a part of the images."""
    opening = unit.opening
    model, source, device = _opened_encoder(opening)
    shrunk, side = model.shrink(source, opening.side)
    options = {"side": side, "device": device, "workers": opening.workers}
    with open_loader(shrunk, cache_on_device="no", **options) as loader:
        found = extract_batches(
            model.network,
            loader,
            _part_batches(unit.first, unit.last),
            model.crop(),
            precision=precision("auto", device),
        )
        unreadable = dict(zip(loader.bad, loader.unreadable, strict=True))
    return PartFeatures(tuple(column.cpu().numpy() for column in found), unreadable)


@functools.lru_cache(maxsize=1)
def _opened_encoder(opening: PartOpening) -> tuple[FrozenModel, Source, torch.device]:
    """Open encoder and images once per process; raise ValueError if they are others."""
    device = pick_device(opening.device, called="--device")
    model = open_model(opening.encoder, device, network=opening.network, size=opening.size)
    if network_fingerprint(model.network) != opening.weights:
        raise ValueError(
            f"{opening.encoder} has other weights on {os.uname().nodename} than where the command "
            "was started; use a file system that all machines share"
        )
    source = open_source(opening.images, opening.split, max_pixels=opening.max_pixels)
    require_same_images(source, opening.pixels, opening.images)
    return model, source, device


def _part_batches(first: int, last: int) -> Iterator[BatchIndices]:
    for some in torch.arange(first, last).split(BATCH):
        yield BatchIndices(some, torch.zeros_like(some))
