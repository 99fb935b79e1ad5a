"""Spherical k-means recovers separated clusters and reaches the objective of scikit-learn."""

import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch.nn import functional as F

from compressive.inspection.clusters import spherical_kmeans


def blobs(sizes: list[int], noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(len(sizes), 12, generator=random), dim=1)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    apart = noise * torch.randn(len(labels), 12, generator=random)
    return F.normalize(centers[labels] + apart, dim=1), labels


def test_separated_clusters_are_recovered_the_largest_first() -> None:
    vectors, labels = blobs([20, 60, 40], 0.05)
    found = spherical_kmeans(vectors, 3)
    assert adjusted_rand_score(labels, found.number) == 1
    assert torch.bincount(found.number).tolist() == [60, 40, 20]
    assert torch.allclose(found.cosine, (vectors * found.centers[found.number]).sum(1), atol=1e-6)


def test_the_objective_is_close_to_that_of_scikit_learn() -> None:
    vectors, _ = blobs([80] * 6, 0.4)
    ours = spherical_kmeans(vectors, 6).cosine.sum()
    other = KMeans(6, random_state=0).fit(vectors.numpy())
    centers = F.normalize(torch.from_numpy(other.cluster_centers_).float(), dim=1)
    assert ours > 0.98 * (vectors @ centers.mT).max(1).values.sum()


def test_equal_vectors_and_few_vectors_do_not_fail() -> None:
    same = F.normalize(torch.ones(5, 4), dim=1)
    assert len(spherical_kmeans(same, 3).centers) == 3
    assert spherical_kmeans(same[:2], 9).number.shape == (2,)
