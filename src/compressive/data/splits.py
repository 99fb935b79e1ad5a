"""Splits by seed: held-out images and label subsets, stratified by class."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from compressive.data.source import Source
from compressive.rng import uniforms_of_all

# View numbers that no view uses, so that random numbers here are independent of those of views, and
# label subsets of a seed are independent of the images that the same seed holds out.
_HOLD_OUT_STREAM, _PER_CLASS_STREAM, _FEW_LABELS_STREAM = 2**31, 2**31 + 1, 2**31 + 2


class Parts(NamedTuple):
    """Sorted indices of kept and held-out images; they are disjoint and complete."""

    kept: Int64[Tensor, " kept"]
    held: Int64[Tensor, " held"]


def stratified(labels: Int64[Tensor, " count"], size: int | float, *, seed: int) -> Parts:
    """Hold out images in proportion to the classes; `size` is a count or, as a float, a share."""
    # Every class of two or more images is on both sides; a class of one image is kept. A count is
    # met exactly or is an error. A share is rounded to the nearest count that is possible.
    rank, tie, count = _shuffled(labels, seed, _HOLD_OUT_STREAM)
    singles = int((count == 1).sum())
    total, classes = len(labels), int((rank == 0).sum())
    least, most = classes - singles, total - classes
    nearest = min(max(round(size * total), least), most)
    wanted = size if isinstance(size, int) else nearest if 0 < size < 1 else -1
    if wanted < 1 or not least <= wanted <= most:
        takes = f"size must be a share between 0 and 1 or {least:,} to {most:,} images"
        if most < max(1, least):
            takes = "a class must have two or more images"
        aim = f"hold out {size} of {total:,} images so that {classes:,} classes are on both sides"
        raise ValueError(f"to {aim}, {takes}")
    # Webster's method: the k-th of n images of a class is due at (k - 1/2) / n. The first is due at
    # once and the last never.
    due = (rank + 0.5) / count
    due[rank == 0] = 0
    due[rank == count - 1] = np.inf
    return _to_parts(~_smallest(due, tie, wanted))


def per_class(labels: Int64[Tensor, " count"], number: int, *, seed: int) -> Parts:
    """Keep `number` images of each class, or all if it has fewer; hold out the rest."""
    return _to_parts(_shuffled(labels, seed, _PER_CLASS_STREAM).rank < number)


def few_labels(
    labels: Int64[Tensor, " count"], share: float, *, draw: int = 0, seed: int = 0
) -> Int64[Tensor, " few"]:
    """Return sorted indices of a share of the images, with equal numbers per class if possible."""
    # At least one of each class. The count is rounded down, which gives the numbers of SimCLR's
    # lists for ImageNet, also per class: 12 or 13 (1 %), and 128 or 129 (10 %). With the same draw
    # and seed, a smaller share is a subset of a larger one.
    if not 0 < share <= 1:
        raise ValueError(f"share of labels must be above 0 and at most 1, got {share}")
    rank, tie, _ = _shuffled(labels, seed, _FEW_LABELS_STREAM, draw)
    wanted = max(math.floor(share * len(labels) + 1e-6), int((rank == 0).sum()))
    return _to_parts(_smallest(rank, tie, wanted)).kept


def imagenet_list(path: str | Path, source: Source) -> Int64[Tensor, " few"]:
    """Return the indices of the images in one of SimCLR's lists, in the list's order."""
    # `1percent.txt` and `10percent.txt` have a file name per line, such as n04235860_14959.JPEG,
    # without folders. The part before `_` is the class.
    if not Path(path).is_file():
        where = "1percent.txt or 10percent.txt of imagenet_subsets in SimCLR's repository"
        raise FileNotFoundError(f"no list of images {path}; use {where}")
    names = Path(path).read_text(encoding="utf-8").split()
    place = {re.split(r"[/\\:]", source.origin(i))[-1]: i for i in range(len(source))}
    lost = [name for name in names if name not in place]
    if lost or not names:
        raise ValueError(
            f"{len(lost):,} of the {len(names):,} images of {path} are not in {source.name}; first "
            f"missing: {lost[0] if lost else 'none, the list is empty'}; use ImageNet's train "
            "images with their original names"
        )
    found = torch.tensor([place[name] for name in names])
    if source.labels is not None and source.classes is not None:
        for label, name in zip(source.labels[found].tolist(), names, strict=True):
            own = source.classes[label]
            if re.fullmatch(r"n\d{8}", own) and own != name.partition("_")[0]:
                raise ValueError(f"{source.name} has {name} of {path} in the wrong class, {own}")
    return found


class _Shuffled(NamedTuple):
    """Per image: its rank in a random order of its class, a tie breaker, the size of its class."""

    rank: np.ndarray
    tie: np.ndarray
    count: np.ndarray


def _shuffled(labels: Int64[Tensor, " count"], seed: int, stream: int, draw: int = 0) -> _Shuffled:
    if not len(labels) or labels.min() < 0:
        none = f"{int((labels < 0).sum())} of {len(labels)} have none"
        raise ValueError(f"to split by class, each image must have a class: {none}")
    lots: Float64[Tensor, "count 2"]
    lots = uniforms_of_all(len(labels), 2, seed=seed, epoch=draw, view=stream)
    ids = labels.cpu().numpy()
    counts = np.bincount(ids)
    order = _sorted_by_class(ids, (lots[:, 0].numpy() * 2**32).astype(np.uint32))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - (counts.cumsum() - counts)[ids[order]]
    return _Shuffled(rank, lots[:, 1].numpy(), counts[ids])


def _to_parts(kept: np.ndarray) -> Parts:
    return Parts(*(torch.from_numpy(each.nonzero()[0]) for each in (kept, ~kept)))


def _smallest(values: np.ndarray, tie: np.ndarray, wanted: int) -> np.ndarray:
    """Return which images are the first `wanted` by value, then tie breaker, then index."""
    # One selection instead of sorting all images.
    last = np.partition(values, wanted - 1)[wanted - 1]
    chosen, equal = values < last, (values == last).nonzero()[0]
    missing = wanted - np.count_nonzero(chosen)
    chosen[equal[np.argsort(tie[equal], kind="stable")[:missing]]] = True
    return chosen


def _sorted_by_class(ids: np.ndarray, lots: np.ndarray) -> np.ndarray:
    """Return the images in the order of class, then lot, then index."""
    # NumPy sorts 16-bit integers by radix, in linear time: three times as fast for many images.
    words = [lots & 0xFFFF, lots >> 16, ids & 0xFFFF]
    words += [ids >> 16] if ids.max() > 0xFFFF else []
    order = np.argsort(words[0].astype(np.uint16), kind="stable")
    for word in words[1:]:
        order = order[np.argsort(word.astype(np.uint16)[order], kind="stable")]
    return order
