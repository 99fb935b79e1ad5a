"""Geometry of the features of test images: alignment, uniformity, RankMe, effective rank."""

from dataclasses import asdict, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from compressive.augment.ops import augment_pair
from compressive.augment.params import View
from compressive.config import Config
from compressive.data.loaders import Batch
from compressive.evaluation.context import EvalContext
from compressive.evaluation.features import forward
from compressive.metrics import effective_rank, uniformity
from compressive.platforms.float64 import to_float64
from compressive.rng import image_keys
from compressive.train.step import view_pair

RANKED = 25_600  # images of RankMe, as its authors use
_VIEWS_EPOCH = 2**32 - 3  # no run reaches it, so that the views are new


def run(
    context: EvalContext, *, uniformity_images: int = 10_000, alignment_images: int = 0
) -> None:
    """Record the geometry; the time of uniformity is quadratic in `uniformity_images`.

    `alignment_images` limits the number of test images of alignment; 0: all.
    """
    name, test = context.splits.name, context.features("test")
    random = torch.Generator().manual_seed(context.seed)
    feats = test.feats[torch.randperm(len(test.feats), generator=random).to(context.device)]
    on = "normalized h"
    few, ranked = feats[:uniformity_images], feats[:RANKED]
    centered = "h, centered; exp of the entropy of the singular values"
    metrics = {
        "uniformity": (uniformity(few), len(few), {"on": on, "t": 2, "pairs": "all"}),
        "RankMe": (effective_rank(ranked), len(ranked), {"on": "h"}),
        "effective rank": (effective_rank(ranked, center=True), len(ranked), {"on": centered}),
    }
    for metric, (value, n, details) in metrics.items():
        protocol = context.protocol(**details)
        context.results.add("geometry", name, metric, float(value), n=n, protocol=protocol)
    views, distances, index = evaluation_views(context), [], []
    for batch in context.batches_at("test", context.some_places("test", alignment_images)):
        pair = [context.renormalize(view) for view in augmented_pair(context, batch, views)]
        h = [forward(context.model.network, view, context.dtype) for view in pair]
        x, y = (F.normalize(to_float64(each), dim=1) for each in h)
        distances.append((x - y).square().sum(1))
        index.append(batch.index)
    augmentations = "the run's own" if context.model.config else "the paper's"
    details = {"augmentations": augmentations, "views": [asdict(view) for view in views]}
    protocol = context.protocol(on=on, alpha=2, **details)
    images = context.images("test", torch.cat(index))
    values = torch.cat(distances)
    context.results.add("geometry", name, "alignment", values, protocol=protocol, images=images)


def evaluation_views(context: EvalContext) -> tuple[View, View]:
    """Return the augmentations of the run, or those of the paper if the model is not a run's."""
    model = context.model
    settings = (model.config or Config()).views
    return view_pair(replace(settings, size=model.size, antialias=model.antialias))


def augmented_pair(
    context: EvalContext, batch: Batch, views: tuple[View, View]
) -> tuple[Tensor, Tensor]:
    """Return two new views of each image, the first pair in the gallery."""
    number = torch.arange(2, device=context.device).repeat_interleave(len(batch.index))
    index = torch.cat([batch.index, batch.index])
    keys = image_keys(index, seed=context.seed, epoch=_VIEWS_EPOCH, view=number)
    height, width, size = batch.height, batch.width, context.model.size
    return augment_pair(batch.images, keys, views, size, height=height, width=width)
