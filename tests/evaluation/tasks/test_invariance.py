"""Distances of features match scipy, and features that ignore colors are invariant."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine, pdist
from tiny_context import context_of, place
from torch import Tensor, nn

from compressive.augment.ops import MEAN, STD, normalize
from compressive.evaluation.color_changes import PERTURBATIONS, perturb
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Results
from compressive.evaluation.tasks import invariance
from compressive.evaluation.tasks.invariance import measure_distances

pytestmark = pytest.mark.usefixtures("one_thread")


def test_distances_match_scipy() -> None:
    random = torch.Generator().manual_seed(0)
    crops = torch.rand(7, 3, 5, 5, generator=random)
    weight = torch.randn(75, 4, generator=random)

    def features(x: Tensor) -> Tensor:
        return x.flatten(1) @ weight + 1

    found = measure_distances(features, crops.split(3))
    h = features(crops).double().numpy()
    for change, moved in zip(PERTURBATIONS, found.moved, strict=True):
        changed = features(perturb(crops, change)).double().numpy()
        expected = [cosine(one, other) for one, other in zip(h, changed, strict=True)]
        # Features are float32: batches of 3 and of 7 sum 75 products in another order.
        np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-9)
    assert found.apart == pytest.approx(pdist(h, "cosine").mean(), rel=1e-5)


class Brightest(nn.Module):
    """A network of the brightest channel (V of HSV), averaged over each half of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.tensor(MEAN).view(3, 1, 1))
        self.std = nn.Buffer(torch.tensor(STD).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        value = (x * self.std + self.mean).amax(1)
        return torch.stack([half.mean((1, 2)) for half in value.chunk(2, 2)], 1)


def brightness_of(crops: Tensor) -> Tensor:
    return Brightest()(normalize(crops, mean=MEAN, std=STD))


def brightest(folder: Path) -> EvalContext:
    folder = place(folder, {"a": 2, "b": 2}, {"a": 3, "b": 2})
    model = FrozenModel(name="brightest", network=Brightest().eval(), size=16)
    splits = open_splits(str(folder), seed=0)
    return EvalContext(model, splits, Results("brightest"), device=torch.device("cpu"))


def test_feature_that_ignores_hue_and_saturation_is_invariant_to_them(tmp_path: Path) -> None:
    context = brightest(tmp_path)
    invariance.run(context)
    found = {record.task.removeprefix("invariance "): record for record in context.results.records}
    assert [*found] == ["invariance", *(change.name for change in PERTURBATIONS)]
    for name, record in found.items():
        assert (record.metric, record.n) == ("relative_distance", 5)
        if name.startswith(("hue", "saturation")):
            assert record.value < 1e-4, name  # percent; rounding of float32 pixels
        else:
            assert record.value > 1e-3, name
    each = [record.value for name, record in found.items() if name != "invariance"]
    assert found["invariance"].value == pytest.approx(np.mean(each))
    crops = torch.cat([context.crop.pixels(batch) for batch in context.batches("test")])
    features = brightness_of(crops)
    apart = found["hue+"].protocol["mean_distance_of_two_images"]
    assert apart == pytest.approx(pdist(features.numpy(), "cosine").mean(), rel=1e-4)
    changed = brightness_of(perturb(crops, PERTURBATIONS[0]))
    moved = [cosine(one, other) for one, other in zip(features, changed, strict=True)]
    assert found["brightness+"].value == pytest.approx(100 * np.mean(moved) / apart, rel=1e-3)


def test_few_images_are_drawn_by_the_seed(tmp_path: Path) -> None:
    context = brightest(tmp_path)
    invariance.run(context, images=3)
    assert {record.n for record in context.results.records} == {3}
    images = {record.images for record in context.results.records}
    assert images == {context.images("test", context.some_places("test", 3))}


def test_equal_features_are_skipped(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 1}))
    invariance.run(context)
    assert not context.results.records
    assert context.results.skipped == ["invariance, which needs two images with different features"]
