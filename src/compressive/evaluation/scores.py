"""Record the same scores for every classifier and every data set, from logits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compressive.evaluation.context import EvalContext, FeatureClassifier
from compressive.evaluation.predictions import write_predictions
from compressive.evaluation.results import Results
from compressive.metrics import Labels, Logits, confidence_bin, ece, hits


def per_class_values(right: Bool[Tensor, " batch"], labels: Labels) -> Float[Tensor, " batch"]:
    """Return values per image whose mean and variance are those of the mean over classes.

    Deviations in rare classes have larger weights (infinitesimal jackknife).
    """
    hits, counts = right.double(), labels.bincount()
    present = (counts > 0).sum()
    recall = hits.new_zeros(len(counts)).index_add(0, labels, hits) / counts.clamp(min=1)
    weights = len(labels) / (counts.clamp(min=1) * present)
    return recall.sum() / present + weights[labels] * (hits - recall[labels])


def add_scores(
    results: Results,
    task: str,
    dataset: str,
    logits: Logits,
    labels: Labels,
    protocol: dict[str, Any],
    *,
    seen: Int[Tensor, " train"],
    classes: Sequence[str] | None = None,
    images: str = "",
) -> float:
    """Record accuracy and calibration of test logits; return the top-1 accuracy.

    Images of classes that are not in `seen`, the training labels, count as wrong. They are left
    out of the NLL, which would be infinite.
    """
    logits, labels = logits.cpu().double(), labels.cpu()
    right = hits(logits, labels)
    log_p = logits.log_softmax(1)
    p, log_y = log_p.exp(), log_p.gather(1, labels[:, None])[:, 0]
    known = torch.isin(labels, seen.cpu())
    if not known.all():
        protocol = {**protocol, "left_out_of_nll": int((~known).sum())}
    values = {
        "top-1": right,
        "mean per class": per_class_values(right, labels),
        "nll": -log_y[known],
        "brier": 1 - 2 * log_y.exp() + p.square().sum(1),
    }
    if logits.shape[1] > 5:
        values["top-5"] = hits(logits, labels, 5) & known
    for metric, value in values.items():
        more = {"per_class": recall(right, labels, classes)} if metric == "mean per class" else {}
        which = images if len(value) == len(labels) else ""
        results.add(task, dataset, metric, value, protocol={**protocol, **more}, images=which)
    bins = {**protocol, "bins": "15 of equal width", "reliability": reliability(p, right)}
    results.add(task, dataset, "ece", float(ece(logits, labels)), n=len(labels), protocol=bins)
    return float(right.double().mean())


def recall(
    hits: Bool[Tensor, " batch"], labels: Labels, classes: Sequence[str] | None = None
) -> dict[str, float]:
    """Return the accuracy within each class that occurs, by its name."""
    found = {}
    for c in torch.unique(labels).tolist():
        name = classes[c] if classes is not None and c < len(classes) else str(c)
        found[name] = float(hits[labels == c].double().mean())
    return found


def reliability(
    p: Float[Tensor, "batch classes"], hits: Bool[Tensor, " batch"], bins: int = 15
) -> list[tuple[float, float, int]]:
    """Return mean confidence, accuracy and number of images of each bin that is not empty."""
    confidence = p.amax(1)
    bin_of = confidence_bin(confidence, bins)
    found = []
    for b in range(bins + 1):
        inside = bin_of == b
        if inside.any():
            mean, right = confidence[inside].mean(), hits[inside].double().mean()
            found.append((float(mean), float(right), int(inside.sum())))
    return found


def add_test_scores(
    context: EvalContext, task: str, classifier: FeatureClassifier, protocol: dict[str, Any]
) -> None:
    """Record the scores of a classifier on the test features, and write its predictions."""
    test = context.features("test")
    logits = classifier(test.feats)
    add_scores(
        context.results,
        task,
        context.splits.name,
        logits,
        test.labels,
        protocol,
        seen=context.features("train").labels,
        classes=context.splits.test.classes,
        images=context.images("test", test.index),
    )
    if context.options.out is not None:  # after the results, which may not fit on the disk
        parts = context, task, logits, context.options.out
        context.after_results.append(partial(write_predictions, *parts))
