"""Spherical k-means: clusters of unit vectors by cosine."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

_ASSIGN_BLOCK = 2**16  # vectors that are compared with the centers at once
_ROUNDS = 50


class Clusters(NamedTuple):
    """Cluster of each vector, its cosine with the center, and the centers; the largest first."""

    number: Int[Tensor, " count"]
    cosine: Float[Tensor, " count"]
    centers: Float[Tensor, "clusters dim"]


def spherical_kmeans(
    vectors: Float[Tensor, "count dim"], clusters: int, *, seed: int = 0, rounds: int = _ROUNDS
) -> Clusters:
    """Return clusters that locally maximize the sum of cosines; at most one per vector."""
    clusters = min(clusters, len(vectors))
    centers = _first_centers(vectors, clusters, torch.Generator().manual_seed(seed))
    number, cosine = _assign(vectors, centers)
    for _ in range(rounds):
        sums = torch.zeros_like(centers).index_add_(0, number, vectors)
        # An empty cluster takes the vector that is farthest from its center.
        empty = (torch.bincount(number, minlength=clusters) == 0).nonzero()[:, 0]
        sums[empty] = vectors[cosine.topk(len(empty), largest=False).indices]
        centers = F.normalize(sums, dim=1)
        before = number
        number, cosine = _assign(vectors, centers)
        if torch.equal(before, number):
            break
    order = torch.bincount(number, minlength=clusters).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(clusters, device=order.device)
    return Clusters(rank[number], cosine, centers[order])


def _first_centers(vectors: Tensor, clusters: int, random: torch.Generator) -> Tensor:
    """Choose vectors that are far from each other: k-means++, on a sample."""
    drawn = torch.randperm(len(vectors), generator=random)[: max(clusters, 200 * clusters)]
    sample = vectors[drawn.to(vectors.device)].cpu()
    chosen = [0]
    apart = 1 - sample @ sample[0]
    for _ in range(clusters - 1):
        weights = apart.clamp(min=0).double()
        weights[chosen] = 0
        if not weights.sum() > 0:  # all others are equal to a center
            rest = torch.ones_like(weights)
            rest[chosen] = 0
            weights = rest
        chosen.append(int(torch.multinomial(weights, 1, generator=random)))
        apart = torch.minimum(apart, 1 - sample @ sample[chosen[-1]])
    return sample[chosen].to(vectors.device)


def _assign(vectors: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest center of each vector and its cosine."""
    found = [(some @ centers.mT).max(1) for some in vectors.split(_ASSIGN_BLOCK)]
    return torch.cat([each.indices for each in found]), torch.cat([each.values for each in found])
