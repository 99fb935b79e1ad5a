"""Tasks on other sets: transfer to the paper's datasets, and ImageNet's shifted test sets."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compressive.corruptions.parameters import NAMES
from compressive.evaluation import logistic
from compressive.evaluation.context import EvalContext, named, some_pixels
from compressive.evaluation.datasets.imagenet_labels import imagenet_wnids
from compressive.evaluation.datasets.layouts import SEVERITIES
from compressive.evaluation.datasets.shifts import (
    CELLS,
    SHIFTS,
    Shift,
    corruptions_at,
    open_cell,
    open_shift,
)
from compressive.evaluation.datasets.transfer import DATASETS, Split, open_transfer
from compressive.evaluation.features import Crop, Features
from compressive.evaluation.scores import add_scores
from compressive.evaluation.tasks.classify import linear
from compressive.evaluation.tasks.robustness_scores import mean_corruption_error, scores
from compressive.metrics import mean_per_class_accuracy, top_k_accuracy

_WNID = re.compile(r"n\d{8}")
_CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


def transfer(exam: EvalContext, root: Path | None) -> None:
    """Logistic regression on each of the paper's eleven datasets that is there."""
    if root is None:
        exam.skip("transfer, which needs the folder of its datasets (--benchmark-root DIR)")
        return
    for name in DATASETS:
        try:
            _transfer(exam, name, open_transfer(name, root, seed=exam.seed))
        except (FileNotFoundError, ValueError) as problem:
            exam.skip(f"transfer, {name}: {problem}")


def robustness(exam: EvalContext, root: Path | None, *, epochs: int = 0) -> None:
    """Shifted test sets on disk that have the classes of this one."""
    if root is None:
        exam.skip("robustness, which needs the folder of its sets (--benchmark-root DIR)")
        return
    if not any(_has_classes(exam, name) for name in SHIFTS):
        exam.skip(f"robustness: no shifted set has the classes of {exam.splits.name}")
        return
    wnids = _wnids(exam, root)
    if exam.classifier is None:
        linear(exam, epochs=epochs)
    for name in SHIFTS:
        if not _has_classes(exam, name):
            exam.skip(f"{name}, which needs a classifier of its own classes")
            continue
        try:
            if name in CELLS:
                _corrupted(exam, name, root, wnids)
            else:
                _natural(exam, open_shift(name, root, wnids))
        except (FileNotFoundError, ValueError) as problem:
            exam.skip(str(problem))


def _transfer(exam: EvalContext, name: str, split: Split) -> None:
    # The shorter side to the network's size, then the center: no 0.875 here.
    crop = exam.crop._replace(share=1.0)
    train, val, test = (
        exam.read(source, crop, f"{name}, {part}")
        for part, source in zip(("train", "val", "test"), split[:3], strict=True)
    )
    classes = len(split.train.classes or ())
    found = logistic.select(
        (train.feats, train.labels),
        (val.feats, val.labels),
        mean_per_class_accuracy if split.metric == "mean per class" else top_k_accuracy,
        classes=classes,
    )
    protocol = {
        **exam.protocol(**crop.words()),
        "classifier": "multinomial logistic regression to its minimum, sum of losses + l2/2 |W|^2",
        "augmentation": "none",
        "chosen": {"l2": found.penalty},
        "chosen_on": f"{len(val.feats):,} validation images by {split.metric}, then all fitted",
        "paper_metric": split.metric,
        "converged": f"{int(found.sweep.converged.sum())} of {len(found.scores)} penalties",
        "notes": list(split.notes),
        **({"held": split.held.tolist()} if split.held is not None else {}),
        **({"warning": found.warning} if found.warning else {}),
    }
    logits = found.fit.logits(test.feats)
    names = split.train.classes
    pixels = some_pixels(split.test)
    images = named(split.test, test.index.tolist(), test.labels.cpu(), pixels)
    words = {"classes": names, "images": images, "seen": torch.cat([train.labels, val.labels])}
    add_scores(exam.results, "transfer", name, logits, test.labels, protocol, **words)


def _natural(exam: EvalContext, shift: Shift) -> None:
    logits, protocol = _logits(exam, shift)
    images = named(shift.source, range(len(logits)), None, some_pixels(shift.source))
    for score in scores(logits, shift.answers.to(exam.device)):
        words = {**protocol, "reading": score.protocol}
        exam.results.add(
            "robustness", shift.name, score.metric, score.hits, protocol=words, images=images
        )


def _corrupted(exam: EvalContext, name: str, root: Path, wnids: Sequence[str] | None) -> None:
    """Every corruption of a set from its files, and their mean."""
    right: dict[str, Float[Tensor, "severities images"]] = {}
    protocol, images, count = {}, "", 0
    kinds = corruptions_at(name, root)
    for number, kind in enumerate(kinds):
        hits: list[Bool[Tensor, " images"]] = []
        for severity in SEVERITIES:
            cell = open_cell(name, root, kind, severity, wnids)
            logits, protocol = _logits(exam, cell)
            protocol["notes"] = [note for note in cell.notes if not note.startswith(kind)]
            hits.append(scores(logits, cell.answers.to(exam.device))[0].hits)
            if len(hits[-1]) != (count := count or len(logits)):
                raise ValueError(f"{name}: {kind} {severity} has {len(logits)}, not {count} images")
            images = named(cell.source, range(len(logits)), None, some_pixels(cell.source))
        right[kind] = torch.stack(hits).double()
        words = {**protocol, "by_severity": right[kind].mean(1).tolist()}
        values, dataset = right[kind].mean(0), f"{name} {kind}"
        exam.results.add("robustness", dataset, "top-1", values, protocol=words, images=images)
        exam.tell(name, number + 1, len(kinds))
    accuracy = {kind: hits.mean(1).tolist() for kind, hits in right.items()}
    error = mean_corruption_error(accuracy)
    words = {**protocol, "left_out": list(error.left_out)}
    # Each cell has the same images, in the same order: one value for each is their mean.
    values = torch.stack([hits.mean(0) for kind, hits in right.items() if kind in NAMES]).mean(0)
    exam.results.add("robustness", name, "top-1", values, protocol=words, images=images)
    if exam.classes == 1000:
        n = len(values)
        exam.results.add("robustness", name, "mce", error.value, n=n, protocol=words)


def _logits(exam: EvalContext, shift: Shift) -> tuple[Tensor, dict[str, object]]:
    """What the classifier says to each image; none may be missing, as the answers are in order."""
    assert exam.classifier is not None
    crop: Crop = exam.crop if shift.crop == "resize" else exam.crop._replace(share=1.0)
    found: Features = exam.read(shift.source, crop, shift.name)
    if len(found.feats) < len(shift.source):
        lost = len(shift.source) - len(found.feats)
        raise ValueError(f"{shift.name}: {lost} of its images cannot be read")
    protocol: dict[str, object] = {
        **exam.protocol(**crop.words()),
        **exam.head,
        "source": "files",
        "notes": list(shift.notes),
    }
    return exam.classifier(found.feats), protocol


def _has_classes(exam: EvalContext, name: str) -> bool:
    """Whether the classifier tells the classes of a set, as far as their names can say."""
    classes = tuple(map(str.lower, exam.splits.train.classes or ()))
    wnids = bool(classes) and all(_WNID.fullmatch(c) for c in classes)
    if name.startswith("cifar10-"):
        return classes == _CIFAR10  # in this order: labels of its files are numbers
    if name.startswith("cifar100-"):
        in_order = list(classes) == sorted(classes)
        return (
            len(classes) == 100 and in_order and {"apple", "aquarium_fish", "worm"} <= set(classes)
        )
    if name.startswith("tiny-"):
        return len(classes) == 200 and wnids
    return len(classes) == 1000 and (wnids or classes[0].startswith("tench"))


def _wnids(exam: EvalContext, root: Path) -> Sequence[str] | None:
    """Classes of the logits as wnids, if that is what the training folders are called."""
    classes = exam.splits.train.classes or ()
    if classes and all(_WNID.fullmatch(name) for name in classes):
        return classes
    try:
        return imagenet_wnids(root) if exam.classes == 1000 else None
    except FileNotFoundError:
        return None
