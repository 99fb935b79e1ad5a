"""Tasks on other sets: figures that a person can count, from images of one level each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from compressive.augment.ops import MEAN, STD
from compressive.data.source import ImageSource
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.datasets.ground_truth import GroundTruth
from compressive.evaluation.datasets.shifts import Shift
from compressive.evaluation.datasets.transfer import Split
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Record, Results
from compressive.evaluation.tasks import shifted
from compressive.evaluation.tasks.shifted import _natural, robustness, transfer

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
LEVELS = 25 * np.arange(10, dtype=np.uint8)
COUNT = 6
NOTES = [
    "published files, no JPEG, not resized",
    f"{COUNT} images on disk, the published set has 10000",
]


class Level(nn.Module):
    """The level of an image, 0 to 255, as its only feature."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return 255 * (x[:, :1].mean((2, 3)) * STD[0] + MEAN[0]) * self.one


def put(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 24), (level,) * 3).save(path, quality=95)


@pytest.fixture
def exam(tmp_path: Path) -> EvalContext:
    for split in ("train", "test"):
        for name, level in zip(NAMES, LEVELS.tolist(), strict=True):
            put(tmp_path / "cifar" / split / name / "0.png", level)
    subject = FrozenModel(name="level", network=Level().eval(), size=16)
    splits = open_splits(str(tmp_path / "cifar"), seed=0)
    found = EvalContext(subject, splits, Results("level"), device=torch.device("cpu"))
    levels = torch.from_numpy(LEVELS).float()
    found.classifier = lambda feats: -(feats - levels).square()
    return found


def figures(exam: EvalContext, metric: str = "top-1") -> dict[str, Record]:
    return {r.dataset: r for r in exam.results.records if r.metric == metric}


def write_cifar_c(root: Path, kinds: list[str]) -> dict[str, np.ndarray]:
    """Which images are what they are called, by kind: severities by images."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, COUNT, dtype=np.uint8)
    root.mkdir(parents=True)
    np.save(root / "labels.npy", np.tile(labels, 5))
    right = {}
    for kind in kinds:
        shown = np.where(
            random.random((5, COUNT)) < 0.6, labels, random.integers(0, 10, (5, COUNT))
        )
        pixels = LEVELS[shown].reshape(-1, 1, 1, 1)
        np.save(root / f"{kind}.npy", np.broadcast_to(pixels, (5 * COUNT, 32, 32, 3)))
        right[kind] = shown == labels
    return right


def test_corruptions_from_files_are_means_over_their_cells(
    exam: EvalContext, tmp_path: Path
) -> None:
    right = write_cifar_c(tmp_path / "sets" / "CIFAR-10-C", ["snow", "fog", "speckle_noise"])
    robustness(exam, tmp_path / "sets")
    found = figures(exam)
    for kind, hits in right.items():
        one = found[f"cifar10-c {kind}"]
        assert one.value == pytest.approx(hits.mean(), abs=1e-12)
        assert one.protocol["by_severity"] == pytest.approx(hits.mean(1).tolist(), abs=1e-12)
        assert one.protocol["notes"] == NOTES
        assert one.n == COUNT
    both = found["cifar10-c"]  # speckle noise is none of the 15
    each = np.concatenate([right["snow"], right["fog"]]).mean(0)
    assert both.value == pytest.approx(each.mean(), abs=1e-12)
    assert both.low is not None
    assert both.high is not None
    assert both.low <= both.value <= both.high
    assert both.images
    assert both.protocol["notes"] == NOTES
    assert len(both.protocol["left_out"]) == 13
    assert any(
        text.startswith("no cifar10.1") or "cifar10" in text for text in exam.results.skipped
    )


def test_cells_of_other_lengths_are_refused_in_words(exam: EvalContext, tmp_path: Path) -> None:
    root = tmp_path / "sets" / "CIFAR-10-C"
    write_cifar_c(root, ["snow"])
    np.save(root / "fog.npy", np.zeros((5, 32, 32, 3), dtype=np.uint8))
    robustness(exam, tmp_path / "sets")
    assert any("fog" in text for text in exam.results.skipped)


def write_dtd(root: Path) -> None:
    base = root / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for split, count in (("train", 4), ("val", 3), ("test", 5)):
        files = [
            f"{name}/{name}_{split}{i}.jpg" for name in ("banded", "dotted") for i in range(count)
        ]
        (base / "labels" / f"{split}1.txt").write_text("\n".join(files) + "\n")
        for i, file in enumerate(files):
            is_dark = file.startswith("banded") != (file == "dotted/dotted_test0.jpg")
            put(base / "images" / file, 30 + i if is_dark else 200 + i)


def test_a_damaged_set_is_left_out_and_the_others_are_measured(
    exam: EvalContext, tmp_path: Path
) -> None:
    """Of ten test images one is called by the other class's name: 9 of 10."""
    write_dtd(tmp_path / "sets")
    flowers = tmp_path / "sets" / "flowers-102"
    put(flowers / "jpg" / "image_00001.jpg", 0)
    for name in ("imagelabels", "setid"):
        (flowers / f"{name}.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(60))
    transfer(exam, tmp_path / "sets")
    assert figures(exam)["dtd"].value == pytest.approx(0.9, abs=1e-12)
    (told,) = [text for text in exam.results.skipped if "flowers" in text]
    assert "\n" not in told
    assert "is damaged or of another kind" in told


@pytest.mark.parametrize(("crop", "share"), [("resize", 0.875), ("center", 1.0)])
def test_a_set_is_seen_with_the_crop_that_it_asks_for(
    exam: EvalContext, crop: str, share: float
) -> None:
    """A border an eighth wide is bright: the central 7/8 of 32 pixels miss some of it."""
    exam.crop = exam.crop._replace(share=0.875)
    image = torch.full((3, 32, 32), 225, dtype=torch.uint8)
    image[:, 2:30, 2:30] = 0
    source = ImageSource(name="a", count=1, read=lambda i: image, place=lambda i: f"a:{i}")
    answers = GroundTruth(classes=10, right=torch.tensor([[0]]))
    _natural(exam, Shift(name="a", source=source, answers=answers, crop=crop, notes=()))  # pyright: ignore
    (record,) = exam.results.records
    assert record.protocol["crop"] == f"central square, {share:g}"
    # Inside 28 of 32 pixels all is black, class 0; with the border the mean is 53, class 2.
    assert record.value == (1.0 if share < 1 else 0.0)


def test_more_classes_than_cifars_are_others(tmp_path: Path) -> None:
    """With one more before them in the alphabet, CIFAR's numbers are not those of the logits."""
    for split in ("train", "test"):
        for name, level in zip(["aardvark", *NAMES], [250, *LEVELS.tolist()], strict=True):
            put(tmp_path / "more" / split / name / "0.png", level)
    subject = FrozenModel(name="level", network=Level().eval(), size=16)
    splits = open_splits(str(tmp_path / "more"), seed=0)
    found = EvalContext(subject, splits, Results("level"), device=torch.device("cpu"))
    found.classifier = lambda feats: feats.expand(-1, 11)
    write_cifar_c(tmp_path / "sets" / "CIFAR-10-C", ["snow"])
    robustness(found, tmp_path / "sets")
    assert not found.results.records
    assert any("no shifted set has the classes" in text for text in found.results.skipped)


def ringed(count: int) -> torch.Tensor:
    """Black with a bright ring in the outer sixteenth, which 7/8 of the side miss."""
    image = torch.full((3, 32, 32), 225, dtype=torch.uint8)
    image[:, 2:30, 2:30] = 0
    return image


@pytest.mark.parametrize(
    ("metric", "name"), [("top-1", "top_k_accuracy"), ("mean per class", "mean_per_class_accuracy")]
)
def test_transfer_sees_whole_sides_and_chooses_by_the_papers_metric(
    exam: EvalContext, monkeypatch: pytest.MonkeyPatch, metric: str, name: str
) -> None:
    """Classes: train has 0 and 1, val 2 as well; test has an image of each."""
    exam.crop = exam.crop._replace(share=0.875)
    levels = {0: 0, 1: 100, 2: 200}

    def part(labels: list[int]) -> ImageSource:
        def read(i: int) -> torch.Tensor:
            return (
                ringed(1)
                if labels[i] == 0
                else torch.full((3, 32, 32), levels[labels[i]], dtype=torch.uint8)
            )

        return ImageSource(
            name="a",
            count=len(labels),
            read=read,
            place=lambda i: f"{labels}:{i}",
            labels=torch.tensor(labels),
            classes=("a", "b", "c"),
        )

    split = Split(part([0, 0, 1, 1]), part([0, 1, 2]), part([0, 1, 2]), metric, (), None)  # pyright: ignore
    asked, select = [], shifted.logistic.select

    def watched(train: Any, val: Any, chosen_by: Any, **more: Any) -> Any:
        asked.append((chosen_by.__name__, train[0][0].item()))
        return select(train, val, chosen_by, **more)

    monkeypatch.setattr(shifted.logistic, "select", watched)
    shifted._transfer(exam, "a", split)
    ((chosen_by, level),) = asked
    assert chosen_by == name
    assert level == pytest.approx(225 * (1 - (28 / 32) ** 2), abs=6)  # bicubic; without the ring 0
    records = {r.metric: r for r in exam.results.records}
    assert records["top-1"].protocol["crop"] == "central square, 1"
    assert records["nll"].n == 3  # none is of a class that was never seen


def test_cifars_classes_in_another_order_are_others(exam: EvalContext) -> None:
    """Labels of its files are numbers, in the order of the alphabet."""
    assert shifted._has_classes(exam, "cifar10-c")
    assert isinstance(exam.splits.train, ImageSource)
    train = replace(exam.splits.train, classes=tuple(reversed(NAMES)))
    exam.splits = exam.splits._replace(train=train)
    assert not shifted._has_classes(exam, "cifar10-c")
