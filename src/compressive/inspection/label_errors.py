"""Likely label errors: labels that the nearest neighbors of an image contradict."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from compressive.evaluation.tasks.knn import TEMPERATURE
from compressive.inspection.search import Neighbors

VOTERS = 30  # nearest neighbors that vote
_VOTE_BLOCK = 2**14


class LabelCheck(NamedTuple):
    """Per image: the class of its neighbors, support of its own label, and whether it is wrong."""

    suggested: NDArray[np.int64]  # -1: no labeled neighbor
    support: NDArray[np.float64]  # share of the votes for its own label; NaN: no label or no vote
    is_error: NDArray[np.bool_]


def check_labels(
    labels: NDArray[np.int64],
    near_group: NDArray[np.int64],
    unique: Int[Tensor, " unique"],
    position: NDArray[np.int64],
    neighbors: Neighbors,
    classes: int,
) -> LabelCheck:
    """Compare each label with the votes of neighbors outside of its group of duplicates.

    An image never votes for itself. The rule is that of confident learning (Northcutt et al.,
    2021): class j counts for an image if its share of the votes is at least the mean share of j
    among images labeled j. A label is likely wrong if such a class has more votes than the label.
    """
    votes = np.zeros((len(labels), classes), np.float32)
    rows = np.flatnonzero(position >= 0)
    at = neighbors.index.numpy()
    for some in np.array_split(rows, max(1, -(-len(rows) // _VOTE_BLOCK))):
        near = unique.numpy()[at[position[some]]][:, :VOTERS]
        cosine = neighbors.cosine[position[some]][:, :VOTERS]
        weight = ((cosine - 1) / TEMPERATURE).exp().numpy()
        same = (near_group[near] == near_group[some][:, None]) & (near_group[near] >= 0)
        weight[same | (labels[near] < 0)] = 0
        part = np.zeros((len(some), classes), np.float32)
        np.add.at(part, (np.arange(len(some))[:, None], labels[near].clip(0)), weight)
        votes[some] = part / np.maximum(part.sum(1, keepdims=True), 1e-12)
    has_votes = votes.sum(1) > 0.5
    is_known = has_votes & (labels >= 0)
    own = votes[np.arange(len(labels)), labels.clip(0)]
    usual = np.array([_mean_or_one(votes[is_known & (labels == c), c]) for c in range(classes)])
    counts = np.where(votes >= usual, votes, 0)
    counts[np.arange(len(labels)), labels.clip(0)] = 0
    is_error = is_known & (counts.max(1, initial=0) > own)
    suggested = np.where(is_error, counts.argmax(1), votes.argmax(1))
    return LabelCheck(
        np.where(has_votes, suggested, -1),
        np.where(is_known, own, np.nan).astype(np.float64),
        is_error,
    )


def _mean_or_one(values: NDArray[np.float32]) -> float:
    return float(values.mean()) if len(values) else 1.0
