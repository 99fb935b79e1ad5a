"""The labeled images of fine-tuning: a balanced part of train, and test."""

from pathlib import Path
from typing import NamedTuple

from jaxtyping import Int64
from torch import Tensor

from compressive.data.source import Source, subset
from compressive.data.splits import Parts, few_labels, imagenet_list, stratified
from compressive.evaluation.dataset import Splits

_HELD_OUT_SHARE = 0.2  # of the labels, to choose the learning rate
_MOST_HELD_OUT = 10_000  # as in the linear evaluation of ImageNet


class Labeled(NamedTuple):
    """The images whose labels are used, and how they were chosen."""

    source: Source
    list_file: Path | None = None  # SimCLR's list for ImageNet


def check_classes(splits: Splits, place: str) -> tuple[str, ...]:
    """Return the names of the classes; raise ValueError if train and test cannot be learned."""
    train, test = splits.train, splits.test
    if train.labels is None or train.classes is None or not (train.labels >= 0).any():
        hint = "sort its images into one folder per class"
        raise ValueError(f"{place} has no labels, which fine-tuning needs; {hint}")
    names = train.classes
    there = [names[i] for i in train.labels.unique().tolist()]
    if len(there) < 2:
        raise ValueError(f"{place} has one class, {there[0]!r}; fine-tuning needs two or more")
    if test.labels is None or test.classes is None or not (test.labels >= 0).any():
        raise ValueError(f"the test split of {place} has no labels, which fine-tuning needs")
    tested = {test.classes[i] for i in test.labels.unique().tolist() if i >= 0}
    if unknown := sorted(tested - {*there}):
        listed = ", ".join(map(repr, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
        raise ValueError(
            f"train and test split of {place} have different classes: {listed} only in test; "
            "give both splits the same class names"
        )
    return names


def draw_labels(
    train: Source, share: float, *, seed: int, benchmark_root: Path | None = None
) -> Labeled:
    """Return the images whose labels are used: the first draw of the task `few-label`.

    SimCLR's lists for ImageNet replace the draw if they are in `benchmark_root`.
    """
    labels = train.labels
    assert labels is not None
    if share == 1:
        return Labeled(train)
    classes = len(labels.unique())
    if (count := int(share * len(labels) + 1e-6)) < classes:
        least = 100 * classes / len(labels)
        raise ValueError(
            f"--labels {100 * share:g}% are {count:,} labels for {classes:,} classes of "
            f"{train.name}; give {least:.2g}% or more"
        )
    file = None if benchmark_root is None else benchmark_root / f"{100 * share:g}percent.txt"
    if file is not None and file.is_file() and classes == 1000:
        return Labeled(subset(train, imagenet_list(file, train).sort().values), file)
    return Labeled(subset(train, few_labels(labels, share, seed=seed)))


def hold_out(labels: Int64[Tensor, " count"], *, seed: int) -> Parts | None:
    """Return images to train on and to choose the learning rate on; None if there are too few.

    If half of the classes or more have one image, the held-out classes would not represent all.
    """
    sizes = labels.bincount()
    if 2 * (sizes > 1).sum() <= (sizes > 0).sum():
        return None
    share = min(_HELD_OUT_SHARE, _MOST_HELD_OUT / len(labels))
    return stratified(labels, share, seed=seed)
