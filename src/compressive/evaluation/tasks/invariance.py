"""Invariance: how far color changes move the features, relative to the distance of two images.

Smoothness measures the projection, which only a run has. This measures the features that `load`
and `embed` return, of any encoder.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from compressive.augment.ops import Images, normalize
from compressive.evaluation.color_changes import PERTURBATIONS, perturb
from compressive.evaluation.context import EvalContext
from compressive.evaluation.features import forward
from compressive.platforms.float64 import to_float64

IMAGES = 2000
_EQUAL = 1e-12  # smaller distances are rounding errors


class Distances(NamedTuple):
    """Distances 1 - cosine of feature vectors, in float64 on the host."""

    moved: Float[Tensor, "changes count"]  # of an image from each change, as in PERTURBATIONS
    apart: float  # mean over all pairs of different images


def run(context: EvalContext, *, images: int = IMAGES) -> None:
    """Record relative distances in percent, for each color change and their mean.

    They are means over `images` test images. An image that a change leaves as it is, such as a gray
    one by hue, counts as 0.
    """
    model, index = context.model, []

    def crops() -> Iterable[Images]:
        for batch in context.batches_at("test", context.some_places("test", images)):
            index.append(batch.index)
            yield context.crop.pixels(batch)

    def features(x: Images) -> Tensor:
        x = normalize(x, mean=model.mean, std=model.std)
        return forward(model.network, x, torch.float32)

    moved, apart = measure_distances(features, crops())
    if apart < _EQUAL:
        context.skip("invariance, which needs two images with different features")
        return
    protocol = {
        **context.preprocessing(),
        "value": "1 - cos(h(x), h(x')), in percent of its mean for pairs of different images",
        "mean_distance_of_two_images": apart,
        "perturbations": {each.name: each.amount for each in PERTURBATIONS},
        "precision": "float32",
    }
    name, fingerprint = context.splits.name, context.images("test", torch.cat(index))
    values = {"invariance": moved.mean(0)}
    values |= {f"invariance {p.name}": row for p, row in zip(PERTURBATIONS, moved, strict=True)}
    for task, value in values.items():
        percent = 100 * value / apart
        context.results.add(
            task, name, "relative_distance", percent, protocol=protocol, images=fingerprint
        )


def measure_distances(
    features: Callable[[Images], Float[Tensor, "batch feat"]], crops: Iterable[Images]
) -> Distances:
    """Measure how far each color change moves the features of crops in [0, 1], and any two images.

    The mean over pairs follows from the sum of the unit vectors: |sum|^2 = n + sum of cosines.
    """
    moved: list[Tensor] = []
    total, count = torch.zeros(()), 0
    for x in crops:
        h = _on_sphere(features(x))
        each = [_on_sphere(features(perturb(x, change))) for change in PERTURBATIONS]
        moved.append(torch.stack([0.5 * (h - other).square().sum(1) for other in each]).cpu())
        total, count = total + h.sum(0).cpu(), count + len(h)
    pairs = count * (count - 1)
    apart = (count**2 - total.square().sum().item()) / pairs if pairs else 0.0
    return Distances(torch.cat(moved, 1), apart)


def _on_sphere(h: Float[Tensor, "batch feat"]) -> Float[Tensor, "batch feat"]:
    return F.normalize(to_float64(h), dim=1)
