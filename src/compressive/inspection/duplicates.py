"""Find groups of equal images and of near duplicates, and leaks between splits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from compressive.inspection.descriptor import crop_similarity, descriptors, mirrored
from compressive.inspection.scan import Scan
from compressive.inspection.search import Neighbors, nearest

# Pairs above this cosine of pixel descriptors are near duplicates; see docs/inspect.md.
NEAR_SIMILARITY = 0.9
_CANDIDATES = 5  # neighbors of each image that are compared pixel by pixel
_LEAST_COSINE = 0.5  # of features or descriptors, to be compared at all


class Duplicates(NamedTuple):
    """Group number of each image, -1 outside of groups; near groups contain the exact ones."""

    exact: NDArray[np.int64]
    near: NDArray[np.int64]
    similarity: NDArray[np.float64]  # with the most similar member of the group; 0: no group

    def groups(self, kind: str) -> list[NDArray[np.int64]]:
        """Return the images of each group; `kind` is exact or near."""
        numbers: NDArray[np.int64] = getattr(self, kind)
        order = np.argsort(numbers, kind="stable")
        starts = np.searchsorted(numbers[order], np.arange(numbers.max(initial=-1) + 1))
        return np.split(order, starts)[1:] if len(starts) else []


def representatives(scan: Scan) -> tuple[Int[Tensor, " unique"], NDArray[np.int64]]:
    """Return the first image of each set of equal pixels, and for each image its position there.

    Unreadable images have position -1.
    """
    places = np.flatnonzero(scan.readable)
    _, first, inverse = np.unique(scan.pixel_hash[places], return_index=True, return_inverse=True)
    order = np.argsort(first)  # keep the order of the images
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    position = np.full(len(scan), -1)
    position[places] = rank[inverse]
    return torch.from_numpy(places[first[order]]), position


def find_duplicates(
    scan: Scan,
    unique: Int[Tensor, " unique"],
    position: NDArray[np.int64],
    neighbors: Neighbors | None,
    *,
    threshold: float = NEAR_SIMILARITY,
    device: torch.device | str = "cpu",
) -> Duplicates:
    """Group images with equal pixels, then pairs of similar pixels among candidates.

    Candidates are the nearest neighbors by features (`neighbors`, positions in `unique`) and by
    pixel descriptors, also of the mirrored image.
    """
    thumbs = scan.thumb[unique]
    pairs = _candidates(thumbs, neighbors, device)
    cosine = crop_similarity(thumbs, pairs)
    is_near = cosine >= threshold
    pairs, cosine = pairs[is_near].numpy(), cosine[is_near].double().numpy()
    group = _connected(pairs, len(unique))
    best = np.zeros(len(unique))
    for side in (0, 1):
        np.maximum.at(best, pairs[:, side], cosine)
    copies = np.bincount(position[position >= 0], minlength=len(unique))
    best[copies > 1] = 1.0
    readable = position >= 0
    exact, near = np.full(len(scan), -1), np.full(len(scan), -1)
    similarity = np.zeros(len(scan))
    exact[readable] = _numbered(position[readable])
    near[readable] = _numbered(group[position[readable]])
    similarity[readable] = best[position[readable]].clip(0, 1)
    return Duplicates(exact, near, similarity)


def leaking(scan: Scan, groups: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return the groups that have images in more than one split."""
    return [group for group in groups if len(np.unique(scan.split[group])) > 1]


def _candidates(
    thumbs: Tensor, neighbors: Neighbors | None, device: torch.device | str
) -> Int[Tensor, "pairs 2"]:
    """Return pairs of images to compare, each once."""
    vectors = descriptors(thumbs)
    found = [
        nearest(vectors, vectors, _CANDIDATES, skip_self=True, device=device),
        nearest(mirrored(vectors), vectors, _CANDIDATES, device=device),
    ]
    if neighbors is not None:
        found.append(Neighbors(*(part[:, :_CANDIDATES] for part in neighbors)))
    pairs = []
    for cosine, index in found:
        own = torch.arange(len(index))[:, None].expand_as(index)
        is_close = (cosine >= _LEAST_COSINE) & (own != index)
        both = torch.stack([own[is_close], index[is_close]], 1)
        pairs.append(both.sort(dim=1).values)
    codes = torch.cat([pair[:, 0] * len(thumbs) + pair[:, 1] for pair in pairs]).unique()
    return torch.stack([codes // max(1, len(thumbs)), codes % max(1, len(thumbs))], 1)


def _connected(pairs: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return for each of `count` items the smallest item that it is connected to."""
    root = np.arange(count)
    for a, b in pairs.tolist():
        while root[a] != a:
            root[a] = a = root[root[a]]
        while root[b] != b:
            root[b] = b = root[root[b]]
        root[max(a, b)] = min(a, b)
    while not np.array_equal(root, root[root]):
        root = root[root]
    return root


def _numbered(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the values that occur more than once, in the order of appearance; others are -1."""
    values, first, inverse, counts = np.unique(
        labels, return_index=True, return_inverse=True, return_counts=True
    )
    number = np.full(len(values), -1)
    repeated = np.flatnonzero(counts > 1)
    repeated = repeated[np.argsort(first[repeated])]
    number[repeated] = np.arange(len(repeated))
    return number[inverse]
