"""Accuracy on generated corrupted test images, and the mean corruption error."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment.ops import normalize
from compressive.corruptions.corrupt import corrupt, default_table
from compressive.corruptions.parameters import ALEXNET_ERROR, EXTRAS, NAMES
from compressive.evaluation.context import EvalContext
from compressive.evaluation.datasets.layouts import SEVERITIES
from compressive.evaluation.features import forward
from compressive.evaluation.tasks.linear import linear_classifier
from compressive.metrics import hits


class CorruptionError(NamedTuple):
    """A mean over types of corruption, and the missing ones of the 15 types."""

    value: float
    left_out: tuple[str, ...]


def run(context: EvalContext, *, images: int = 0, extras: bool = True) -> None:
    """Record the accuracy for 15 types (and 4 extra ones) at 5 severities each, and its mean.

    The classifier is that of the linear evaluation, or another that a task has set, trained on
    clean images. `images` limits the number of test images; 0: all.
    """
    classifier, frost = linear_classifier(context), context.options.frost
    names = [name for name in (*NAMES, *(EXTRAS if extras else ())) if name != "frost" or frost]
    if frost is None:
        context.skip("frost, which needs six photographs (--frost DIR); not in the mean")
    cells = [(name, severity) for name in names for severity in SEVERITIES]
    found: dict[tuple[str, int], list[Tensor]] = {cell: [] for cell in cells}
    places, model, index = context.some_places("test", images), context.model, []
    size = 2048 if model.size <= 64 and context.device.type != "cpu" else 256
    for number, batch in enumerate(context.batches_at("test", places, size)):
        crops = context.crop.pixels(batch).mul(255).round().byte()
        for cell in cells:
            x = corrupt(crops, *cell, index=batch.index, seed=context.seed, frost=frost)
            x = normalize(x / 255, mean=model.mean, std=model.std)
            logits = classifier(forward(model.network, x, context.dtype))
            found[cell].append(hits(logits, batch.label))
        index.append(batch.index)
        context.progress("corruptions", min(len(places), (number + 1) * size), len(places))
    right = {cell: torch.cat(parts).cpu().double() for cell, parts in found.items()}
    _record_accuracies(context, names, right, torch.cat(index))


def mean_corruption_error(accuracy: Mapping[str, Sequence[float]]) -> CorruptionError:
    """Return the mCE (Hendrycks & Dietterich 2019) from accuracies by type and severity.

    It is the mean over types of (mean error over severities) / (the same for AlexNet), defined for
    ImageNet-C only. Papers print it times 100. It is not comparable if types are left out.
    """
    kept = [name for name in ALEXNET_ERROR if name in accuracy]
    if not kept:
        raise ValueError(f"accuracy has none of the 15 corruptions, got {', '.join(accuracy)}")
    for name in kept:
        if len(accuracy[name]) != 5 or not all(0 <= value <= 1 for value in accuracy[name]):
            values = list(accuracy[name])
            raise ValueError(f"accuracy[{name!r}] must be 5 numbers from 0 to 1, got {values}")
    errors = {name: 1 - sum(accuracy[name]) / len(accuracy[name]) for name in kept}
    total = sum(errors[name] / ALEXNET_ERROR[name] for name in kept)
    return CorruptionError(total / len(kept), tuple(k for k in ALEXNET_ERROR if k not in kept))


def _record_accuracies(
    context: EvalContext,
    names: Sequence[str],
    right: dict[tuple[str, int], Float[Tensor, " count"]],
    index: Int[Tensor, " count"],
) -> None:
    protocol = context.protocol(
        source="generated here from the crops as bytes, no JPEG in between",
        table=f"{default_table(context.model.size)} pixels",
        **context.head,
    )
    images = context.images("test", index)
    official = [name for name in names if name in NAMES]
    cells = [right[name, severity] for name in official for severity in SEVERITIES]
    left_out = sorted(set(NAMES) - set(official))
    add, name = context.results.add, f"{context.splits.name}-C"
    of_mean = {**protocol, "types": len(official), "left_out": left_out}
    mean = torch.stack(cells).mean(0)
    add("corruptions", name, "top-1", mean, protocol=of_mean, images=images)
    for kind in names:
        each = [right[kind, severity] for severity in SEVERITIES]
        task = "corruption" if kind in NAMES else "extra corruption"
        of_kind = {**protocol, "by_severity": [float(values.mean()) for values in each]}
        values = torch.stack(each).mean(0)
        add(task, f"{name} {kind}", "top-1", values, protocol=of_kind, images=images)
    if context.classes == 1000:
        by_kind = {k: [float(right[k, s].mean()) for s in SEVERITIES] for k in official}
        error = mean_corruption_error(by_kind).value
        add("corruptions", name, "mce", error, n=len(mean), protocol=of_mean)
