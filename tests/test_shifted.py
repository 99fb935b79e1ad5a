"""Tasks on other sets: figures that a person can count, from images of one level each."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from compressive.augment import MEAN, STD
from compressive.evaluation.exam import Exam
from compressive.evaluation.opening import open_splits
from compressive.evaluation.results import Record, Results
from compressive.evaluation.shifted import robustness, transfer
from compressive.evaluation.subject import Subject

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
def exam(tmp_path: Path) -> Exam:
    for split in ("train", "test"):
        for name, level in zip(NAMES, LEVELS.tolist(), strict=True):
            put(tmp_path / "cifar" / split / name / "0.png", level)
    subject = Subject(name="level", network=Level().eval(), size=16)
    splits = open_splits(str(tmp_path / "cifar"), seed=0)
    found = Exam(subject, splits, Results("level"), device=torch.device("cpu"))
    levels = torch.from_numpy(LEVELS).float()
    found.classifier = lambda feats: -(feats - levels).square()
    return found


def figures(exam: Exam, metric: str = "top-1") -> dict[str, Record]:
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


def test_corruptions_from_files_are_means_over_their_cells(exam: Exam, tmp_path: Path) -> None:
    right = write_cifar_c(tmp_path / "sets" / "CIFAR-10-C", ["snow", "fog", "speckle_noise"])
    robustness(exam, tmp_path / "sets")
    found = figures(exam)
    for kind, hits in right.items():
        one = found[f"cifar10-c {kind}"]
        assert one.value == pytest.approx(hits.mean(), abs=1e-12)
        assert one.protocol["by severity"] == pytest.approx(hits.mean(1).tolist(), abs=1e-12)
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
    assert len(both.protocol["left out"]) == 13
    assert any(
        text.startswith("no cifar10.1") or "cifar10" in text for text in exam.results.skipped
    )


def test_cells_of_other_lengths_are_refused_in_words(exam: Exam, tmp_path: Path) -> None:
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


def test_a_damaged_set_is_left_out_and_the_others_are_measured(exam: Exam, tmp_path: Path) -> None:
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
