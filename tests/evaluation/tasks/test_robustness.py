"""Robustness scores follow their definitions, on images of one gray level each."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_context import CIFAR10, LEVELS, Level, figures, level_context, put
from torch import Tensor

from compressive.data.source import ImageSource
from compressive.evaluation.context import EvalContext, TaskOptions
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.datasets.imagenet_labels import vid_classes, ytbb_classes
from compressive.evaluation.datasets.shifts import GroundTruth, Shift, padded
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Results
from compressive.evaluation.tasks import robustness
from compressive.evaluation.tasks.robustness import (
    correct,
    evaluate_shift,
    has_classes_of,
    scores,
    video_logits,
    with_neighbors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


COUNT = 6


def assert_notes(notes: list[str]) -> None:
    """Assert that the notes describe the files and compare their number with the published set."""
    files, count = notes
    assert files.startswith("published files")
    assert count.startswith(f"{COUNT} images")
    assert count.endswith("10000")


@pytest.fixture
def context(tmp_path: Path) -> EvalContext:
    return level_context(tmp_path)


def random_logits(count: int, classes: int = 1000, seed: int = 0) -> Tensor:
    return torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


def test_any_correct_id_counts_and_masks_restrict_ids() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3], [0, 1, 2, 3], [5, 1, 2, 2], [-1, -2, -3, -4]])
    right = padded([{2, 3}, {3}, {2}, {1}])
    assert right.tolist() == [[2, 3], [3, -1], [2, -1], [1, -1]]
    assert correct(logits, right).tolist() == [False, True, False, False]
    # Mask to 1, 2, 3. Ties go to the first id. Negative logits still beat masked ids.
    assert correct(logits, right, torch.tensor([1, 2, 3])).tolist() == [True] * 4


@pytest.mark.parametrize("masked", [False, True])
def test_correct_matches_a_naive_loop(masked: bool) -> None:
    random = np.random.default_rng(0)
    logits = random_logits(300, 12)
    several = [set(random.choice(12, random.integers(1, 4), replace=False)) for _ in range(300)]
    ids = sorted(random.choice(12, 7, replace=False).tolist())
    right = padded([{int(i) for i in row} for row in several])
    found = correct(logits, right, torch.tensor(ids) if masked else None)
    allowed = ids if masked else range(12)
    expected = [
        max(allowed, key=lambda i: row[i]) in answer
        for row, answer in zip(logits.tolist(), several, strict=True)
    ]
    assert found.tolist() == expected
    assert 0 < sum(expected) < 300


def test_nan_prediction_is_wrong() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, math.nan], [1.0, 0.0]])
    right = torch.tensor([[0], [1], [0]])
    assert correct(logits, right).tolist() == [False, False, True]


def test_masked_and_unmasked_accuracy_are_both_reported() -> None:
    """A prediction outside the set is wrong in the paper's metric and correct when masked."""
    logits = torch.zeros(2, 1000)
    logits[:, 500], logits[:, 7] = 2.0, 1.0
    answers = GroundTruth(
        classes=1000, right=torch.tensor([[7], [8]]), allowed=torch.tensor([7, 8, 9])
    )
    plain, masked = scores(logits, answers)
    assert (plain.metric, plain.hits.tolist()) == ("top-1", [False, False])
    assert (masked.metric, masked.hits.tolist()) == ("top-1 masked", [True, False])
    assert "1000 classes" in plain.protocol
    assert "3 classes" in masked.protocol
    (only,) = scores(logits, GroundTruth(classes=1000, right=torch.tensor([[500], [8]])))
    assert only.hits.tolist() == [True, False]
    with pytest.raises(ValueError, match=r"\(2, 1000\), got \(2, 999\)"):
        scores(logits[:, 1:], answers)


def test_video_class_logit_is_the_max_over_its_ids(tmp_path: Path) -> None:
    for names, owner in (vid_classes(tmp_path), ytbb_classes()):
        logits = random_logits(50)
        found = video_logits(logits, owner, len(names))
        for k in range(len(names)):
            ids = [i for i in range(1000) if owner[i] == k]
            expected = logits[:, ids].amax(1) if ids else torch.full((50,), -torch.inf)
            assert torch.equal(found[:, k], expected)


def test_class_without_ids_is_never_predicted() -> None:
    """If missing logits were 0, cow (6) would be predicted whenever all logits are negative."""
    names, owner = ytbb_classes()
    found = video_logits(random_logits(20) - 100, owner, len(names))
    assert (found[:, [6, 8, 14, 18, 22]] == -torch.inf).all()
    assert not set(found.argmax(1).tolist()) & {6, 8, 14, 18, 22}


def test_video_prediction_equals_masked_argmax(tmp_path: Path) -> None:
    for names, owner in (vid_classes(tmp_path), ytbb_classes()):
        logits = random_logits(500)
        masked = logits.masked_fill(owner < 0, -torch.inf)
        merged = video_logits(logits, owner, len(names)).argmax(1)
        assert torch.equal(merged, owner[masked.argmax(1)])


def test_pm_k_needs_the_anchor_and_every_neighbor() -> None:
    hits = torch.tensor([False, True, True, True, False, True, False])  # frame 0 is in no set
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


def test_videos_report_pm0_frames_and_pm10() -> None:
    dog, car, cat = 19, 23, 7
    logits = torch.full((4, 1000), -5.0)
    for frame, i in enumerate((200, 200, 817, 285)):  # a dog, a dog, a sports car, a cat
        logits[frame, i] = -1.0
    logits[:, 0] = 3.0  # tench is not a video class
    by_anchor = video_answers(
        [{dog}, {dog}, {dog}, {cat, car}]
    )  # neighbors have the labels of their anchor, as in YTBB-Robust
    by_frame = video_answers(
        [{dog}, {dog}, {car}, {cat, car}]
    )  # neighbors have their own labels, as in ImageNet-Vid-Robust
    found = {score.metric: score.hits.tolist() for score in scores(logits, by_anchor)}
    assert found == {
        "pm0": [True, True],
        "frames": [True, True, False, True],
        "pm10": [False, True],
    }
    found = {score.metric: score.hits.tolist() for score in scores(logits, by_frame)}
    assert found["pm10"] == [True, True]
    assert scores(logits, by_frame)[0].metric == "pm0"


def test_ground_truth_moves_to_a_device() -> None:
    answers = video_answers([{19}, {19}, {19}, {7}])
    moved = answers.to("cpu")
    assert torch.equal(moved.right, answers.right)
    assert (moved.video_classes, moved.allowed) == (24, None)


def write_cifar_c(root: Path, kinds: list[str]) -> dict[str, np.ndarray]:
    """Write CIFAR-10-C files; return (severity, image) masks of correct labels by kind."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, COUNT, dtype=np.uint8)
    root.mkdir(parents=True)
    np.save(root / "labels.npy", np.tile(labels, 5))
    right = {}
    for kind in kinds:
        classes = np.where(
            random.random((5, COUNT)) < 0.6, labels, random.integers(0, 10, (5, COUNT))
        )
        pixels = LEVELS[classes].reshape(-1, 1, 1, 1)
        np.save(root / f"{kind}.npy", np.broadcast_to(pixels, (5 * COUNT, 32, 32, 3)))
        right[kind] = classes == labels
    return right


def test_cifar10_c_accuracy_is_the_mean_over_cells(context: EvalContext, tmp_path: Path) -> None:
    right = write_cifar_c(tmp_path / "sets" / "CIFAR-10-C", ["snow", "fog", "speckle_noise"])
    context.options = TaskOptions(benchmark_root=tmp_path / "sets")
    robustness.run(context)
    found = figures(context)
    for kind, hits in right.items():
        one = found[f"cifar10-c {kind}"]
        assert one.value == pytest.approx(hits.mean(), abs=1e-12)
        assert one.protocol["by_severity"] == pytest.approx(hits.mean(1).tolist(), abs=1e-12)
        assert_notes(one.protocol["notes"])
        assert one.n == COUNT
    both = found["cifar10-c"]  # speckle noise is not one of the 15
    each = np.concatenate([right["snow"], right["fog"]]).mean(0)
    assert both.value == pytest.approx(each.mean(), abs=1e-12)
    assert both.low is not None
    assert both.high is not None
    assert both.low <= both.value <= both.high
    assert both.images
    assert_notes(both.protocol["notes"])
    assert len(both.protocol["left_out"]) == 13
    assert any(
        text.startswith("no cifar10.1") or "cifar10" in text for text in context.results.skipped
    )


def test_cell_with_wrong_length_is_skipped(context: EvalContext, tmp_path: Path) -> None:
    root = tmp_path / "sets" / "CIFAR-10-C"
    write_cifar_c(root, ["snow"])
    np.save(root / "fog.npy", np.zeros((5, 32, 32, 3), dtype=np.uint8))
    context.options = TaskOptions(benchmark_root=tmp_path / "sets")
    robustness.run(context)
    assert any("fog" in text for text in context.results.skipped)


@pytest.mark.parametrize(("crop", "share"), [("resize", 0.875), ("center", 1.0)])
def test_shift_uses_its_own_crop(context: EvalContext, crop: str, share: float) -> None:
    """The image has a bright border of 2 pixels. The central 7/8 of 32 pixels excludes it."""
    context.crop = context.crop._replace(share=0.875)
    image = torch.full((3, 32, 32), 225, dtype=torch.uint8)
    image[:, 2:30, 2:30] = 0
    source = ImageSource(name="a", count=1, read=lambda i: image, place=lambda i: f"a:{i}")
    answers = GroundTruth(classes=10, right=torch.tensor([[0]]))
    evaluate_shift(context, Shift(name="a", source=source, answers=answers, crop=crop, notes=()))  # pyright: ignore
    (record,) = context.results.records
    assert record.protocol["crop"] == f"central square, {share:g}"
    # The inner 28 of 32 pixels are black, class 0. With the border the mean is 53, class 2.
    assert record.value == (1.0 if share < 1 else 0.0)


def test_extra_class_skips_cifar10_c(tmp_path: Path) -> None:
    """An extra class sorted first shifts the logits, so CIFAR's label numbers no longer apply."""
    for split in ("train", "test"):
        for name, level in zip(["aardvark", *CIFAR10], [250, *LEVELS.tolist()], strict=True):
            put(tmp_path / "more" / split / name / "0.png", level)
    model = FrozenModel(name="level", network=Level().eval(), size=16)
    splits = open_splits(str(tmp_path / "more"), seed=0)
    found = EvalContext(model, splits, Results("level"), device=torch.device("cpu"))
    found.classifier = lambda feats: feats.expand(-1, 11)
    write_cifar_c(tmp_path / "sets" / "CIFAR-10-C", ["snow"])
    found.options = TaskOptions(benchmark_root=tmp_path / "sets")
    robustness.run(found)
    assert not found.results.records
    assert any("no shifted set" in text for text in found.results.skipped)


def test_reordered_classes_do_not_match_cifar10_c(context: EvalContext) -> None:
    """The label numbers in CIFAR-10-C files follow alphabetical class order."""
    assert has_classes_of(context, "cifar10-c")
    assert isinstance(context.splits.train, ImageSource)
    train = replace(context.splits.train, classes=tuple(reversed(CIFAR10)))
    context.splits = context.splits._replace(train=train)
    assert not has_classes_of(context, "cifar10-c")
