"""Weighted nearest-neighbor classification."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def nearest_neighbors(
    bank: Float[Tensor, "bank feat"],
    labels: Int[Tensor, " bank"],
    queries: Float[Tensor, "batch feat"],
    *,
    classes: int,
    neighbors: int = 20,
    temperature: float = 0.07,
) -> Float[Tensor, "batch classes"]:
    """Return class votes of the nearest images by cosine, weighted by exp(cosine / temperature).

    This is the weighted kNN of Wu et al.
    """
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    votes = []
    for some in queries.split(1024):
        near, at = (some @ bank.T).topk(min(neighbors, len(bank)), dim=1)
        weight = ((near - 1) / temperature).exp()
        votes.append(weight.new_zeros(len(some), classes).scatter_add_(1, labels[at], weight))
    return torch.cat(votes)
