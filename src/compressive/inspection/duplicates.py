"""Find groups of equal images and of near duplicates, and leaks between splits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from compressive.inspection.descriptor import crop_similarity, descriptors, mirrored
from compressive.inspection.scan import Scan
from compressive.inspection.search import Neighbors, nearest

# Pairs with this cosine of pixel descriptors are near duplicates; docs/inspect.md has the evidence.
NEAR_SIMILARITY = 0.94
_DIRECT = 5  # nearest images by descriptors that are compared as a whole
_CROPPED = 3  # nearest images that are also compared after all crops, which takes 0.1 ms each
_LEAST_FEATURES = 0.8  # cosine of features; cropped copies in CIFAR-10 have 0.9 or more
_LEAST_PIXELS = 0.5  # cosine of descriptors, if there are no features


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

    Candidates are the nearest neighbors by pixel descriptors, also of the mirrored image, and by
    features (`neighbors`, positions in `unique`), which are compared after crops.
    """
    pairs, cosine = _compared(scan.thumb[unique], neighbors, device)
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


def _compared(
    thumbs: UInt8[Tensor, "count side side"],
    neighbors: Neighbors | None,
    device: torch.device | str,
) -> tuple[Int[Tensor, "pairs 2"], Float[Tensor, " pairs"]]:
    """Return pairs of similar images and the cosine of their pixels; a pair may occur twice."""
    vectors = descriptors(thumbs)
    whole = nearest(vectors, vectors, _DIRECT, skip_self=True, device=device)
    flipped = nearest(mirrored(vectors), vectors, _DIRECT, device=device)
    if neighbors is None:
        cropped = _close_pairs(Neighbors(*(part[:, :_CROPPED] for part in whole)), _LEAST_PIXELS)[0]
    else:
        near = Neighbors(*(part[:, :_CROPPED] for part in neighbors))
        cropped = _close_pairs(near, _LEAST_FEATURES)[0]
    cropped = cropped.sort(dim=1).values.unique(dim=0)
    found = [_close_pairs(whole, -1.0), _close_pairs(flipped, -1.0)]
    found.append((cropped, crop_similarity(thumbs, cropped)))
    return torch.cat([pairs for pairs, _ in found]), torch.cat([cosine for _, cosine in found])


def _close_pairs(
    found: Neighbors, least: float
) -> tuple[Int[Tensor, "pairs 2"], Float[Tensor, " pairs"]]:
    """Return the pairs of different images with at least this cosine."""
    own = torch.arange(len(found.index))[:, None].expand_as(found.index)
    is_close = (found.cosine >= least) & (own != found.index)
    return torch.stack([own[is_close], found.index[is_close]], 1), found.cosine[is_close]


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
