"""Right by any id, masked or not; videos by their classes; corruptions by the written formulas."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compressive.corruptions.parameters import NAMES
from compressive.evaluation.datasets.ground_truth import GroundTruth, padded
from compressive.evaluation.datasets.imagenet_labels import vid_classes, ytbb_classes
from compressive.evaluation.tasks.robustness_scores import (
    ALEXNET_ERROR,
    correct,
    mean_corruption_error,
    scores,
    video_logits,
    with_neighbors,
)


def random_logits(count: int, classes: int = 1000, seed: int = 0) -> Tensor:
    return torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


# --- images ---------------------------------------------------------------------------------------


def test_any_of_the_right_ids_is_a_hit_and_a_mask_leaves_only_its_ids() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3], [0, 1, 2, 3], [5, 1, 2, 2], [-1, -2, -3, -4]])
    right = padded([{2, 3}, {3}, {2}, {1}])
    assert right.tolist() == [[2, 3], [3, -1], [2, -1], [1, -1]]
    assert correct(logits, right).tolist() == [False, True, False, False]
    # Among 1, 2, 3: of the equal 2 and 3 the first; all negative, and still none below the mask.
    assert correct(logits, right, torch.tensor([1, 2, 3])).tolist() == [True] * 4


@pytest.mark.parametrize("masked", [False, True])
def test_hits_are_those_of_a_loop(masked: bool) -> None:
    random = np.random.default_rng(0)
    logits = random_logits(300, 12)
    several = [set(random.choice(12, random.integers(1, 4), replace=False)) for _ in range(300)]
    ids = sorted(random.choice(12, 7, replace=False).tolist())
    right = padded([{int(i) for i in row} for row in several])
    found = correct(logits, right, torch.tensor(ids) if masked else None)
    allowed = ids if masked else range(12)
    wanted = [
        max(allowed, key=lambda i: row[i]) in answer
        for row, answer in zip(logits.tolist(), several, strict=True)
    ]
    assert found.tolist() == wanted
    assert 0 < sum(wanted) < 300


def test_nan_is_a_miss() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, math.nan], [1.0, 0.0]])
    right = torch.tensor([[0], [1], [0]])
    assert correct(logits, right).tolist() == [False, False, True]


def test_both_columns_are_reported_and_labeled() -> None:
    """Fooled by a class outside the set: wrong in the paper's column, right if masked."""
    logits = torch.zeros(2, 1000)
    logits[:, 500], logits[:, 7] = 2.0, 1.0
    answers = GroundTruth(
        classes=1000, right=torch.tensor([[7], [8]]), allowed=torch.tensor([7, 8, 9])
    )
    plain, masked = scores(logits, answers)
    assert (plain.metric, plain.hits.tolist()) == ("top-1", [False, False])
    assert (masked.metric, masked.hits.tolist()) == ("top-1 masked", [True, False])
    assert "all 1000 classes (the paper's)" in plain.protocol
    assert "the 3 classes of the set (the community's)" in masked.protocol
    (only,) = scores(logits, GroundTruth(classes=1000, right=torch.tensor([[500], [8]])))
    assert only.hits.tolist() == [True, False]
    with pytest.raises(ValueError, match=r"must be .* \(2, 1000\), got \(2, 999\)"):
        scores(logits[:, 1:], answers)


# --- videos ---------------------------------------------------------------------------------------


def test_a_video_class_has_the_highest_logit_of_its_ids(tmp_path: Path) -> None:
    for names, owner in (vid_classes(tmp_path), ytbb_classes()):
        logits = random_logits(50)
        found = video_logits(logits, owner, len(names))
        for k in range(len(names)):
            ids = [i for i in range(1000) if owner[i] == k]
            wanted = logits[:, ids].amax(1) if ids else torch.full((50,), -torch.inf)
            assert torch.equal(found[:, k], wanted)


def test_a_class_without_ids_never_wins() -> None:
    """With 0 in its place, cow (6) would win wherever all logits are negative."""
    names, owner = ytbb_classes()
    found = video_logits(random_logits(20) - 100, owner, len(names))
    assert (found[:, [6, 8, 14, 18, 22]] == -torch.inf).all()
    assert not set(found.argmax(1).tolist()) & {6, 8, 14, 18, 22}


def test_merging_by_the_highest_is_masking_and_looking_up(tmp_path: Path) -> None:
    for names, owner in (vid_classes(tmp_path), ytbb_classes()):
        logits = random_logits(500)
        masked = logits.masked_fill(owner < 0, -torch.inf)
        merged = video_logits(logits, owner, len(names)).argmax(1)
        assert torch.equal(merged, owner[masked.argmax(1)])


def test_pm_k_needs_the_anchor_and_every_neighbor() -> None:
    hits = torch.tensor([False, True, True, True, False, True, False])  # 0 is in no set
    anchors = torch.tensor([1, 2, 4, 5, 3])
    neighbors = torch.tensor([[2, 3], [6, 1], [1, 2], [-1, -1], [1, -1]])
    assert with_neighbors(hits, anchors, neighbors).tolist() == [True, False, False, True, True]
    none = neighbors[:, :0]  # pm-0
    assert with_neighbors(hits, anchors, none).tolist() == hits[anchors].tolist()


def video_answers(right: list[set[int]]) -> GroundTruth:
    names, owner = ytbb_classes()
    return GroundTruth(
        classes=1000,
        right=padded(right),
        owner=owner,
        video_classes=len(names),
        anchors=torch.tensor([0, 3]),
        neighbors=torch.tensor([[1, 2], [-1, -1]]),
    )


def test_videos_are_scored_by_anchors_by_frames_and_by_sets() -> None:
    dog, car, cat = 19, 23, 7
    logits = torch.full((4, 1000), -5.0)
    for frame, i in enumerate((200, 200, 817, 285)):  # a dog, a dog, a sports car, a cat
        logits[frame, i] = -1.0
    logits[:, 0] = 3.0  # a tench is no video class
    by_anchor = video_answers([{dog}, {dog}, {dog}, {cat, car}])  # as in YTBB-Robust
    by_frame = video_answers([{dog}, {dog}, {car}, {cat, car}])  # as in ImageNet-Vid-Robust
    found = {score.metric: score.hits.tolist() for score in scores(logits, by_anchor)}
    assert found == {
        "pm0": [True, True],
        "frames": [True, True, False, True],
        "pm10": [False, True],
    }
    found = {score.metric: score.hits.tolist() for score in scores(logits, by_frame)}
    assert found["pm10"] == [True, True]
    assert scores(logits, by_frame)[0].metric == "pm0"


def test_answers_move_as_a_whole() -> None:
    answers = video_answers([{19}, {19}, {19}, {7}])
    moved = answers.to("cpu")
    assert torch.equal(moved.right, answers.right)
    assert (moved.video_classes, moved.allowed) == (24, None)


# --- corruptions ----------------------------------------------------------------------------------


def accuracies(seed: int = 0) -> dict[str, list[float]]:
    random = np.random.default_rng(seed)
    return {name: random.uniform(0, 1, 5).tolist() for name in (*NAMES, "spatter")}


def test_alexnet_is_measured_on_the_fifteen() -> None:
    assert set(ALEXNET_ERROR) == set(NAMES)
    # AlexNet's own mCE is 1 by definition.
    itself = {name: [1 - error] * 5 for name, error in ALEXNET_ERROR.items()}
    assert mean_corruption_error(itself).value == pytest.approx(1, abs=1e-12)


def test_mce_is_the_mean_of_errors_over_alexnets() -> None:
    accuracy = accuracies(1)
    wanted = [
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
    assert mean_corruption_error(accuracy).value == pytest.approx(sum(wanted) / 15, abs=1e-12)


def test_frost_may_be_left_out_and_is_then_named() -> None:
    accuracy = accuracies()
    del accuracy["frost"]
    rest = [name for name in NAMES if name != "frost"]
    ratios = [(1 - np.mean(accuracy[name])) / ALEXNET_ERROR[name] for name in rest]
    assert mean_corruption_error(accuracy).value == pytest.approx(np.mean(ratios), abs=1e-12)
    assert mean_corruption_error(accuracy).left_out == ("frost",)


def test_wrong_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the 15 corruptions, got spatter"):
        mean_corruption_error({"spatter": [0.5] * 5})
    with pytest.raises(ValueError, match=r"\['fog'\] must be 5 numbers from 0 to 1, got \[50"):
        mean_corruption_error({"fog": [50.0] * 5})
    with pytest.raises(ValueError, match=r"\['fog'\] must be 5 numbers"):
        mean_corruption_error({"fog": [0.5] * 4})
