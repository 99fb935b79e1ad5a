"""Transfer: scores that can be counted by hand, and the crop and metric of the paper."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_context import figures, level_context, put

from compressive.data.source import ImageSource
from compressive.evaluation.context import EvalContext, TaskOptions
from compressive.evaluation.datasets.transfer import Split
from compressive.evaluation.tasks import transfer
from compressive.evaluation.tasks.transfer import evaluate_transfer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def context(tmp_path: Path) -> EvalContext:
    return level_context(tmp_path)


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


def test_damaged_dataset_is_skipped_and_others_are_evaluated(
    context: EvalContext, tmp_path: Path
) -> None:
    """One of ten test images has the wrong label, so accuracy is 9 of 10."""
    write_dtd(tmp_path / "sets")
    flowers = tmp_path / "sets" / "flowers-102"
    put(flowers / "jpg" / "image_00001.jpg", 0)
    for name in ("imagelabels", "setid"):
        (flowers / f"{name}.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(60))
    context.options = TaskOptions(benchmark_root=tmp_path / "sets")
    transfer.run(context)
    assert figures(context)["dtd"].value == pytest.approx(0.9, abs=1e-12)
    (note,) = [text for text in context.results.skipped if "flowers" in text]
    assert "\n" not in note
    assert "damaged" in note


def bordered_image() -> torch.Tensor:
    """Return a black image with a bright border of 1/16 of the side, outside the central 7/8."""
    image = torch.full((3, 32, 32), 225, dtype=torch.uint8)
    image[:, 2:30, 2:30] = 0
    return image


@pytest.mark.parametrize(
    ("metric", "name"), [("top-1", "top_k_accuracy"), ("mean per class", "mean_per_class_accuracy")]
)
def test_transfer_uses_full_crops_and_the_metric_of_the_paper(
    context: EvalContext, monkeypatch: pytest.MonkeyPatch, metric: str, name: str
) -> None:
    """Train has classes 0 and 1; val and test have one image of each of 0, 1 and 2."""
    context.crop = context.crop._replace(share=0.875)
    levels = {0: 0, 1: 100, 2: 200}

    def part(labels: list[int]) -> ImageSource:
        def read(i: int) -> torch.Tensor:
            return (
                bordered_image()
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
    calls, select = [], transfer.logistic.select

    def record_call(train: Any, val: Any, chosen_by: Any, **more: Any) -> Any:
        calls.append((chosen_by.__name__, train[0][0].item()))
        return select(train, val, chosen_by, **more)

    monkeypatch.setattr(transfer.logistic, "select", record_call)
    evaluate_transfer(context, "a", split)
    ((chosen_by, level),) = calls
    assert chosen_by == name
    assert level == pytest.approx(
        225 * (1 - (28 / 32) ** 2), abs=6
    )  # bicubic; 0 without the border
    records = {r.metric: r for r in context.results.records}
    assert records["top-1"].protocol["crop"] == "central square, 1"
    assert records["nll"].n == 3  # the final fit has seen every class
