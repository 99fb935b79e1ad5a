"""Which images are held out, and which few keep their labels: by seed, and even over classes."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from compressive.data.source import Source
from compressive.rng import image_keys, uniforms

# In place of a view's number, so that what is drawn here no view has drawn, and few labels of a
# seed are not the images that the same seed holds out.
_HOLD_OUT_STREAM, _PER_CLASS_STREAM, _FEW_LABELS_STREAM = 2**31, 2**31 + 1, 2**31 + 2


class Parts(NamedTuple):
    """Two sorted lists of images that have none in common and together are all."""

    kept: Int64[Tensor, " kept"]
    held: Int64[Tensor, " held"]


def stratified(labels: Int64[Tensor, " count"], size: int | float, *, seed: int) -> Parts:
    """Hold out images in proportion to the classes; `size` is a number or, as a float, a share."""
    # Every class of two images or more is on both sides; a class of one image is kept. A number is
    # met exactly, or is an error; a share comes to the nearest number that allows this.
    rank, tie, count = _shuffled(labels, seed, _HOLD_OUT_STREAM)
    singles = int((count == 1).sum())
    total, classes = len(labels), len(labels.unique())
    least, most = classes - singles, total - classes
    nearest = min(max(round(size * total), least), most)
    wanted = size if isinstance(size, int) else nearest if 0 < size < 1 else -1
    if wanted < 1 or not least <= wanted <= most:
        takes = f"takes a share between 0 and 1 or {least:,} to {most:,} images"
        if most < max(1, least):
            takes = "takes two images or more of a class"
        aim = f"hold out {size} of {total:,} images so that {classes:,} classes are on both sides"
        raise ValueError(f"to {aim} {takes}")
    # Webster's method: of a class of n the k-th image is due at (k - 1/2) / n of the way. Its
    # first is due at once and its last never.
    due = (rank + 0.5) / count
    due[rank == 0] = 0
    due[rank == count - 1] = np.inf
    order = torch.from_numpy(np.lexsort((tie, due)))
    return Parts(order[wanted:].sort().values, order[:wanted].sort().values)


def per_class(labels: Int64[Tensor, " count"], number: int, *, seed: int) -> Parts:
    """This many images of each class are kept, or all that it has; the rest are held out."""
    kept = torch.from_numpy(_shuffled(labels, seed, _PER_CLASS_STREAM).rank) < number
    return Parts(kept.nonzero()[:, 0], (~kept).nonzero()[:, 0])


def few_labels(
    labels: Int64[Tensor, " count"], share: float, *, draw: int = 0, seed: int = 0
) -> Int64[Tensor, " few"]:
    """Return a sorted share of the images with equal numbers per class, if there are enough."""
    # At least one of each class. Rounded down, so that of ImageNet as many are taken as SimCLR's
    # lists have, of each class too: 12 or 13, and 128 or 129. For one draw of one seed a smaller
    # share lies within a larger one.
    if not 0 < share <= 1:
        raise ValueError(f"share of labels must be above 0 and at most 1, got {share}")
    rank, tie, _ = _shuffled(labels, seed, _FEW_LABELS_STREAM, draw)
    wanted = max(math.floor(share * len(labels) + 1e-6), len(labels.unique()))
    order = torch.from_numpy(np.lexsort((tie, rank)))
    return order[:wanted].sort().values


def imagenet_list(path: str | Path, source: Source) -> Int64[Tensor, " few"]:
    """Return where in a source the images are that a list of SimCLR names, in the list's order."""
    # `1percent.txt` and `10percent.txt` have a file name to a line, such as n04235860_14959.JPEG,
    # and no folders. The part before `_` is the class.
    if not Path(path).is_file():
        where = "1percent.txt or 10percent.txt of imagenet_subsets in SimCLR's repository"
        raise FileNotFoundError(f"no list of images {path}; it is {where}")
    names = Path(path).read_text().split()
    place = {re.split(r"[/:]", source.origin(i))[-1]: i for i in range(len(source))}
    lost = [name for name in names if name not in place]
    if lost or not names:
        raise ValueError(
            f"{len(lost):,} of the {len(names):,} images of {path} are not in {source.name}, "
            f"{lost[0] if lost else 'an empty list'} to begin with; it needs ImageNet's train "
            "images under their own names"
        )
    found = torch.tensor([place[name] for name in names])
    if source.labels is not None and source.classes is not None:
        for label, name in zip(source.labels[found].tolist(), names, strict=True):
            own = source.classes[label]
            if re.fullmatch(r"n\d{8}", own) and own != name.partition("_")[0]:
                raise ValueError(f"{source.name} has {name} of {path} as one of class {own}")
    return found


class _Shuffled(NamedTuple):
    """Each image's rank in its class in random order, a number against ties, the class's size."""

    rank: np.ndarray
    tie: np.ndarray
    count: np.ndarray


def _shuffled(labels: Int64[Tensor, " count"], seed: int, stream: int, draw: int = 0) -> _Shuffled:
    if not len(labels) or labels.min() < 0:
        none = f"{int((labels < 0).sum())} of {len(labels)} have none"
        raise ValueError(f"images to be divided by class must have one each, {none}")
    keys = image_keys(torch.arange(len(labels)), seed=seed, epoch=draw, view=stream)
    lots: Float64[Tensor, "count 2"] = uniforms(keys, 2)
    ids = labels.cpu().numpy()
    counts = np.bincount(ids)
    order = np.lexsort((lots[:, 0].numpy(), ids))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - (counts.cumsum() - counts)[ids[order]]
    return _Shuffled(rank, lots[:, 1].numpy(), counts[ids])
