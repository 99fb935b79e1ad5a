"""Feature geometry metrics match numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_context import Mean, context_of, place

from compressive.evaluation.tasks import geometry


def entropy_rank(matrix: np.ndarray) -> float:
    share = np.linalg.svd(matrix, compute_uv=False)
    share = share / share.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def test_geometry_matches_numpy(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 6, "b": 6}))
    geometry.run(context)
    found = {r.metric: r.value for r in context.results.records}
    h = context.features("test").feats.double().numpy()
    assert found["RankMe"] == pytest.approx(entropy_rank(h), rel=1e-5)
    assert found["effective rank"] == pytest.approx(entropy_rank(h - h.mean(0)), rel=1e-5)
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    i, j = np.triu_indices(len(h), 1)
    pairs = np.square(unit[i] - unit[j]).sum(1)
    assert found["uniformity"] == pytest.approx(np.log(np.exp(-2 * pairs).mean()), rel=1e-5)
    assert abs(found["RankMe"] - found["effective rank"]) > 0.01  # the test distinguishes the two
    context.close()


@pytest.mark.parametrize("images", [0, 4])
def test_alignment_is_the_mean_squared_distance_between_views(tmp_path: Path, images: int) -> None:
    """Encode the gallery's first pair of views, of all images or of those that the seed draws."""
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 3, "b": 3}))
    geometry.run(context, alignment_images=images)
    (record,) = [r for r in context.results.records if r.metric == "alignment"]
    places = torch.arange(6)
    if images:
        places = torch.randperm(6, generator=torch.Generator().manual_seed(0))[:images].sort()[0]
    assert (record.n, record.image_set) == (images or 6, context.images("test", places))
    (batch,) = context.batches_at("test", places)
    x, y = (
        Mean()(v).double().numpy()
        for v in geometry.augmented_pair(context, batch, geometry.evaluation_views(context))
    )
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    assert record.value == pytest.approx(np.square(x - y).sum(1).mean(), rel=1e-5)
    context.close()


def test_rank_uses_all_images_and_uniformity_a_subset(tmp_path: Path) -> None:
    """Uniformity is quadratic in the number of images, so it uses fewer: here 4 of 12."""
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 6, "b": 6}))
    geometry.run(context, uniformity_images=4)
    found = {r.metric: (r.value, r.n) for r in context.results.records}
    h = context.features("test").feats.double().numpy()
    assert found["RankMe"] == (pytest.approx(entropy_rank(h), rel=1e-5), 12)
    assert found["uniformity"][1] == 4
    context.close()
