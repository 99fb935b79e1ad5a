"""Corruption accuracy matches a direct count; mCE follows the published formula."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_context import context_of, place

from compressive.corruptions.corrupt import NAMES, corrupt
from compressive.evaluation.tasks import corruption
from compressive.evaluation.tasks.corruption import ALEXNET_ERROR, mean_corruption_error


@pytest.mark.slow
def test_corruptions_use_the_model_normalization_and_average_over_types(
    tmp_path: Path,
) -> None:
    """Count each cell from the same corrupted bytes, with a classifier that thresholds red."""
    colors: dict[str, Any] = {"mean": (0.2, 0.3, 0.4), "std": (0.1, 0.2, 0.3)}
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 20, "b": 20}), **colors)
    context.seed = 3
    # The threshold fits only this mean and std.
    context.classifier = lambda feats: torch.stack([2.98 - feats[:, 0], feats[:, 0] - 2.98], 1)
    corruption.run(context)
    records = {
        r.dataset.rpartition(" ")[2]: r for r in context.results.records if r.task != "corruptions"
    }
    (batch,) = context.batches("test")
    images = context.crop.pixels(batch).mul(255).round().byte()
    for kind in ("gaussian_noise", "contrast"):
        share = []
        for severity in range(1, 6):
            x = corrupt(images, kind, severity, index=batch.index, seed=3).double() / 255
            red = ((x[:, 0] - 0.2) / 0.1).mean((1, 2))
            share.append(float(((red > 2.98).long() == batch.label).double().mean()))
        assert records[kind].protocol["by_severity"] == pytest.approx(share, abs=1e-6)
    (mean,) = [r for r in context.results.records if r.task == "corruptions"]
    official = [records[kind].value for kind in NAMES if kind != "frost"]
    assert mean.value == pytest.approx(sum(official) / 14, abs=1e-12)
    assert len(set(official)) > 3
    context.close()


def test_limited_images_are_drawn_by_the_seed_and_named_in_the_records(tmp_path: Path) -> None:
    """The classifier always answers the first class."""
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 6, "b": 6}))
    chosen = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:5].sort().values
    context.classifier = lambda feats: torch.stack([feats.new_ones(len(feats)), feats[:, 0] * 0], 1)
    corruption.run(context, images=5, extras=False)
    labels = context.source("test").labels
    assert labels is not None
    expected = float((labels[chosen] == 0).double().mean())
    assert len(context.results.records) == 15  # 14 types and their mean
    for record in context.results.records:
        assert (record.value, record.n) == (pytest.approx(expected), 5)
        assert record.image_set == context.images("test", chosen)
    context.close()


def accuracies(seed: int = 0) -> dict[str, list[float]]:
    random = np.random.default_rng(seed)
    return {name: random.uniform(0, 1, 5).tolist() for name in (*NAMES, "spatter")}


def test_alexnet_has_mce_1() -> None:
    assert set(ALEXNET_ERROR) == set(NAMES)
    # AlexNet's own mCE is 1 by definition.
    itself = {name: [1 - error] * 5 for name, error in ALEXNET_ERROR.items()}
    assert mean_corruption_error(itself).value == pytest.approx(1, abs=1e-12)


def test_mce_is_the_mean_error_relative_to_alexnet() -> None:
    accuracy = accuracies(1)
    expected = [
        (1 - np.mean(accuracy["gaussian_noise"])) / 0.886,
        (1 - np.mean(accuracy["shot_noise"])) / 0.894,
        (1 - np.mean(accuracy["impulse_noise"])) / 0.923,
        (1 - np.mean(accuracy["defocus_blur"])) / 0.820,
        (1 - np.mean(accuracy["glass_blur"])) / 0.826,
        (1 - np.mean(accuracy["motion_blur"])) / 0.786,
        (1 - np.mean(accuracy["zoom_blur"])) / 0.798,
        (1 - np.mean(accuracy["snow"])) / 0.867,
        (1 - np.mean(accuracy["frost"])) / 0.827,
        (1 - np.mean(accuracy["fog"])) / 0.819,
        (1 - np.mean(accuracy["brightness"])) / 0.565,
        (1 - np.mean(accuracy["contrast"])) / 0.853,
        (1 - np.mean(accuracy["elastic_transform"])) / 0.646,
        (1 - np.mean(accuracy["pixelate"])) / 0.718,
        (1 - np.mean(accuracy["jpeg_compression"])) / 0.607,
    ]
    assert mean_corruption_error(accuracy).value == pytest.approx(sum(expected) / 15, abs=1e-12)


def test_missing_frost_is_excluded_and_reported() -> None:
    accuracy = accuracies()
    del accuracy["frost"]
    others = [name for name in NAMES if name != "frost"]
    ratios = [(1 - np.mean(accuracy[name])) / ALEXNET_ERROR[name] for name in others]
    assert mean_corruption_error(accuracy).value == pytest.approx(np.mean(ratios), abs=1e-12)
    assert mean_corruption_error(accuracy).left_out == ("frost",)


def test_invalid_accuracies_are_refused() -> None:
    with pytest.raises(ValueError, match="15 corruptions, got spatter"):
        mean_corruption_error({"spatter": [0.5] * 5})
    with pytest.raises(ValueError, match=r"\['fog'\] .*got \[50"):
        mean_corruption_error({"fog": [50.0] * 5})
    with pytest.raises(ValueError, match=r"\['fog'\] .*5 numbers"):
        mean_corruption_error({"fog": [0.5] * 4})
