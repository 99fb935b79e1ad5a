"""Likely label errors equal a plain loop over the rule of confident learning."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from compressive.evaluation.tasks.knn import TEMPERATURE
from compressive.inspection.label_errors import VOTERS, LabelCheck, check_labels
from compressive.inspection.search import Neighbors, nearest


def flipped(share: float = 0.05) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    noise = 0.15 * torch.randn(400, 6, generator=random)
    vectors = F.normalize(F.one_hot(labels, 6).float() + noise, dim=1)
    wrong = torch.rand(400, generator=random) < share
    given = torch.where(wrong, (labels + 1) % 4, labels)
    return vectors, given.numpy(), wrong.numpy()


def checked(
    vectors: torch.Tensor, labels: np.ndarray, groups: np.ndarray | None = None
) -> tuple[LabelCheck, Neighbors]:
    count = len(labels)
    groups = np.full(count, -1) if groups is None else groups
    near = nearest(vectors, vectors, VOTERS, skip_self=True)
    return check_labels(labels, groups, torch.arange(count), np.arange(count), near, 4), near


def test_flipped_labels_are_found() -> None:
    vectors, labels, wrong = flipped()
    found, _ = checked(vectors, labels)
    assert wrong.sum() > 10
    assert (found.is_error & wrong).sum() >= 0.9 * wrong.sum()
    assert (found.is_error & ~wrong).sum() <= 4
    right = found.suggested[wrong & found.is_error] == (labels[wrong & found.is_error] - 1) % 4
    assert right.all()


def test_the_rule_equals_a_plain_loop() -> None:
    vectors, labels, _ = flipped(0.2)
    found, near = checked(vectors, labels)
    votes = []
    for i in range(len(labels)):
        share = [0.0] * 4
        for cosine, j in zip(near.cosine[i].tolist(), near.index[i].tolist(), strict=True):
            share[labels[j]] += math.exp(cosine / TEMPERATURE)
        votes.append([value / sum(share) for value in share])
    usual = [
        np.mean([v[c] for v, y in zip(votes, labels, strict=True) if y == c]) for c in range(4)
    ]
    for i, (vote, own) in enumerate(zip(votes, labels, strict=True)):
        strong = [c for c in range(4) if c != own and vote[c] >= usual[c] and vote[c] > vote[own]]
        assert found.is_error[i] == bool(strong), i
        assert abs(found.support[i] - vote[own]) < 1e-4


def test_copies_and_unlabeled_images_do_not_vote() -> None:
    vectors = F.normalize(torch.tensor([[1.0, 0.01], [1.0, 0.0], [1.0, 0.3], [1.0, 0.4]]), dim=1)
    labels = np.array([0, 0, 1, -1])
    groups = np.array([5, 5, -1, -1])
    found, _ = checked(vectors, labels, groups)
    assert found.suggested[0] == 1  # its copy, of class 0, does not count
    assert found.support[0] == 0
    assert np.isnan(found.support[3])
    assert not found.is_error[3]
