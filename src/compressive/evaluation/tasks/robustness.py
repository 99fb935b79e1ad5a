"""Robustness: accuracy of the linear classifier on test sets with a distribution shift."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compressive.corruptions.parameters import NAMES
from compressive.data.fingerprint import DatasetFingerprint
from compressive.evaluation.context import EvalContext
from compressive.evaluation.datasets import shifts
from compressive.evaluation.datasets.imagenet_labels import imagenet_wnids
from compressive.evaluation.datasets.layouts import SEVERITIES
from compressive.evaluation.datasets.shifts import CELLS, SHIFTS, GroundTruth, Shift
from compressive.evaluation.tasks.corruption import mean_corruption_error
from compressive.evaluation.tasks.linear import linear_classifier
from compressive.platforms.float64 import to_float64

_WNID = re.compile(r"n\d{8}")
_CIFAR10 = tuple(
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
)


class Score(NamedTuple):
    """One column of a results table; the mean of `hits` is the accuracy."""

    metric: str
    protocol: str
    hits: Bool[Tensor, " items"]


def run(context: EvalContext) -> None:
    """Record scores on each shifted test set that has the classes of this data set."""
    root = context.options.benchmark_root
    if root is None:
        context.skip("robustness, which needs the folder of its sets (--benchmark-root DIR)")
        return
    if not any(has_classes_of(context, name) for name in SHIFTS):
        context.skip(f"robustness: no shifted set has the classes of {context.splits.name}")
        return
    wnids = _classifier_wnids(context, root)
    linear_classifier(context)
    for name in SHIFTS:
        if not has_classes_of(context, name):
            context.skip(f"{name}, which needs a classifier with the classes of that set")
            continue
        try:
            if name in CELLS:
                _evaluate_corruptions(context, name, root, wnids)
            else:
                evaluate_shift(context, shifts.open_shift(name, root, wnids))
        except (FileNotFoundError, ValueError) as problem:
            context.skip(str(problem))


def evaluate_shift(context: EvalContext, shift: Shift) -> None:
    """Record every score of one shifted test set."""
    logits, protocol = _logits_and_protocol(context, shift)
    images, add = DatasetFingerprint(shift.source).of(), context.results.add
    for score in scores(logits, shift.answers.to(context.device)):
        details, hits = {**protocol, "reading": score.protocol}, score.hits
        add("robustness", shift.name, score.metric, hits, protocol=details, images=images)


def _evaluate_corruptions(
    context: EvalContext, name: str, root: Path, wnids: Sequence[str] | None
) -> None:
    """Record the accuracy on every corruption of a published set, and its mean."""
    right: dict[str, Float[Tensor, "severities images"]] = {}
    protocol, images, count = {}, "", 0
    kinds, add = shifts.corruptions_at(name, root), context.results.add
    for number, kind in enumerate(kinds):
        hits: list[Bool[Tensor, " images"]] = []
        for severity in SEVERITIES:
            cell = shifts.open_cell(name, root, kind, severity, wnids)
            logits, protocol = _logits_and_protocol(context, cell)
            protocol["notes"] = [note for note in cell.notes if not note.startswith(kind)]
            hits.append(scores(logits, cell.answers.to(context.device))[0].hits)
            if len(hits[-1]) != (count := count or len(logits)):
                raise ValueError(f"{name}: {kind} {severity} has {len(logits)}, not {count} images")
            images = DatasetFingerprint(cell.source).of()
        right[kind] = to_float64(torch.stack(hits))
        details = {**protocol, "by_severity": right[kind].mean(1).tolist()}
        values = right[kind].mean(0)
        add("robustness", f"{name} {kind}", "top-1", values, protocol=details, images=images)
        context.progress(name, number + 1, len(kinds), "")
    error = mean_corruption_error({kind: hits.mean(1).tolist() for kind, hits in right.items()})
    details = {**protocol, "left_out": list(error.left_out)}
    # All cells have the same images in the same order, so that they can be averaged per image.
    values = torch.stack([hits.mean(0) for kind, hits in right.items() if kind in NAMES]).mean(0)
    add("robustness", name, "top-1", values, protocol=details, images=images)
    if context.classes == 1000:
        add("robustness", name, "mce", error.value, n=len(values), protocol=details)


def _logits_and_protocol(context: EvalContext, shift: Shift) -> tuple[Tensor, dict[str, object]]:
    """Return the logits of every image and the protocol.

    Raise ValueError if an image is unreadable, because the labels are in the order of the images.
    """
    crop = context.crop if shift.crop == "resize" else context.crop.whole()
    found = context.features_of(shift.source, crop, shift.name)
    if len(found.feats) < len(shift.source):
        lost = len(shift.source) - len(found.feats)
        raise ValueError(f"{shift.name}: {lost} of its images cannot be read")
    protocol: dict[str, object] = {
        **context.protocol(**crop.protocol()),
        **context.head,
        "source": "files",
        "notes": list(shift.notes),
    }
    return linear_classifier(context)(found.feats), protocol


def has_classes_of(context: EvalContext, name: str) -> bool:
    """Return whether the classifier has the classes of a shifted set, from the class names."""
    classes = tuple(map(str.lower, context.splits.train.classes or ()))
    wnids = bool(classes) and all(_WNID.fullmatch(c) for c in classes)
    if name.startswith("cifar10-"):
        return classes == _CIFAR10  # the order matters: labels in its files are numbers
    if name.startswith("cifar100-"):
        is_cifar = len(classes) == 100 and {"apple", "aquarium_fish", "worm"} <= set(classes)
        return is_cifar and list(classes) == sorted(classes)
    if name.startswith("tiny-"):
        return len(classes) == 200 and wnids
    return len(classes) == 1000 and (wnids or classes[0].startswith("tench"))


def _classifier_wnids(context: EvalContext, root: Path) -> Sequence[str] | None:
    """Return the wnids of the logits from the training folders or `root`, or None if unknown."""
    classes = context.splits.train.classes or ()
    if classes and all(_WNID.fullmatch(name) for name in classes):
        return classes
    try:
        return imagenet_wnids(root) if context.classes == 1000 else None
    except FileNotFoundError:
        return None


def scores(logits: Float[Tensor, "batch classes"], answers: GroundTruth) -> tuple[Score, ...]:
    """Return every score of a robustness set: those of the paper first, then the usual ones."""
    shape = (len(answers.right), answers.classes)
    if logits.shape != shape:
        raise ValueError(f"logits must be (images, classes), {shape}, got {tuple(logits.shape)}")
    if answers.owner is None:
        every = correct(logits, answers.right)
        plain = Score("top-1", f"argmax over all {logits.shape[1]} classes (the paper's)", every)
        if answers.allowed is None:
            return (plain,)
        masked = correct(logits, answers.right, answers.allowed)
        among = f"argmax over the {len(answers.allowed)} classes of the set (the community's)"
        return plain, Score("top-1 masked", among, masked)
    assert answers.anchors is not None
    assert answers.neighbors is not None
    projected = video_logits(logits, answers.owner, answers.video_classes)
    frames = correct(projected, answers.right)
    by = "highest logit per video class"
    return (
        Score("pm0", f"{by}, anchor frames (the paper's)", frames[answers.anchors]),
        Score("frames", f"{by}, all frames (the paper's other reading)", frames),
        Score(
            "pm10",
            f"{by}, anchors right with all neighbors within 10 frames (the community's)",
            with_neighbors(frames, answers.anchors, answers.neighbors),
        ),
    )


def correct(
    logits: Float[Tensor, "batch classes"],
    right: Int[Tensor, "batch most"],
    allowed: Int[Tensor, " some"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Return whether the highest logit, of all or of the allowed classes, is a correct class.

    The first of equal logits counts. A row with NaN is wrong.
    """
    if allowed is None:
        choice = logits.argmax(1)
    else:
        logits = logits[:, allowed]
        choice = allowed[logits.argmax(1)]
    return (choice[:, None] == right).any(1) & ~logits.isnan().any(1)


def video_logits(
    logits: Float[Tensor, "batch ids"], owner: Int[Tensor, " ids"], classes: int
) -> Float[Tensor, "batch video_classes"]:
    """Return the highest logit among the ImageNet ids of each video class.

    It is -inf for a class without ids, because 0 would win if all other logits are negative.
    """
    # Ids without a class go to an extra class that is dropped: a mask would synchronize with the
    # host.
    target = torch.where(owner < 0, classes, owner).expand(len(logits), -1)
    empty = logits.new_full((len(logits), classes + 1), -torch.inf)
    return empty.scatter_reduce(1, target, logits, "amax")[:, :classes]


def with_neighbors(
    hits: Bool[Tensor, " batch"],
    anchors: Int[Tensor, " anchors"],
    neighbors: Int[Tensor, "anchors around"],
) -> Bool[Tensor, " anchors"]:
    """Return pm-k: an anchor is right if it and all its neighbors are right (-1: no neighbor)."""
    return hits[anchors] & (hits[neighbors.clamp(min=0)] | (neighbors < 0)).all(1)
