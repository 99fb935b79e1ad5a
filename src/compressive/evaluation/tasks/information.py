"""Information terms of the objectives, measured on new pairs of views of test images.

The networks are in evaluation mode and do not change.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressive.augment.ops import IMAGENET_COLORS, Channels, augment_pair
from compressive.augment.params import View
from compressive.checks import autocast
from compressive.data.loaders import Batch
from compressive.distributions.vmf import VonMisesFisher
from compressive.evaluation.context import EvalContext
from compressive.evaluation.features import remember_weights
from compressive.evaluation.frozen_model import evaluation_mode
from compressive.evaluation.tasks.smoothness import keyed_sample
from compressive.methods import Method
from compressive.objectives import residual_terms
from compressive.rng import image_keys
from compressive.train.step import view_pair

_VIEWS, _Z = 2**32 - 1, 2**32 - 2  # epochs that no run reaches, for new views and for their z

PerImage = Float[Tensor, " count"]


class Information(NamedTuple):
    """Terms per image, in nats, averaged over both directions."""

    index: Int[Tensor, " count"]  # indices of the images
    positive_cosine: PerImage  # cosine of the projections of X and Y
    residual: PerImage | None  # I(X;Z|Y); compressed methods only
    reducible_residual: PerImage | None  # its part above the floor at equal means
    predictive: PerImage | None  # I(Y;Z), contrastive methods only: log K - nll
    bound: float | None  # log K of the batches, the largest value of `predictive`
    dropped: int  # number of images in batches with another K than the first
    protocol: dict[str, Any]


def run(context: EvalContext, *, batch_size: int = 256, images: int = 0) -> None:
    """Record the terms on test images; the candidates of an image are its batch.

    `images` limits the number of test images; 0: all.
    """
    method, config = context.model.method, context.model.config
    if method is None or config is None:
        why = context.model.why_no_method or "which needs the heads of a run"
        context.skip(f"information, {why}")
        return
    places = context.features("test").index.cpu()  # readable images only, so that batches are full
    # Shuffle: data sets are sorted by class, and candidates of one class are harder to distinguish.
    random = torch.Generator().manual_seed(context.seed)
    places = places[torch.randperm(len(places), generator=random)][: images or None]
    found = measure_information(
        method,
        context.batches_at("test", places, min(batch_size, len(places))),
        view_pair(config.views),
        size=context.model.size,
        seed=context.seed,
        precision=context.dtype,
        channels=Channels(context.model.mean, context.model.std),
    )
    protocol = {**found.protocol, "bound": found.bound, "images_left_out": found.dropped}
    protocol["candidates"] = "at random"
    named = context.images("test", found.index)
    for metric in ("residual", "reducible_residual", "predictive", "positive_cosine"):
        values = getattr(found, metric)
        if values is not None:
            context.results.add(
                "information", context.splits.name, metric, values, protocol=protocol, images=named
            )


@torch.no_grad()
def measure_information(
    method: Method,
    batches: Iterable[Batch],
    pair: tuple[View, View],
    *,
    size: int,
    seed: int = 0,
    draws: int = 1,
    precision: torch.dtype = torch.float32,
    channels: Channels = IMAGENET_COLORS,
) -> Information:
    """Measure the terms on new views, averaged over `draws` pairs per image.

    The residual is its expectation over z in closed form. `predictive` uses one z per view, drawn
    with the key of the image, or the mode if training uses the mode. It measures how well an image
    is identified among the K candidates of its batch and is comparable only at equal K. For
    contrastive methods, batches of another length than the first, such as the last one, are
    therefore dropped and counted.
    """
    if draws < 1:
        raise ValueError(f"draws must be 1 pair of views or more, got {draws}")
    length, dropped, index, measured = 0, 0, [], []
    with evaluation_mode(method), _unchanged(method):
        for batch in batches:
            length = length or len(batch.index)
            if method.bound(length) is not None and len(batch.index) != length:
                dropped += len(batch.index)
                continue
            index.append(batch.index)
            options = (size, seed, precision, channels)
            made = [_measure(method, batch, pair, i, *options) for i in range(draws)]
            mean = {name: torch.stack([each[name] for each in made]).mean(0) for name in made[0]}
            measured.append(mean)
    if not index:
        raise ValueError("batches must hold one image or more, got none")
    bound = method.bound(length)
    protocol = {
        "residual": "KL[e(z|x) || b(z|y)], closed form",
        "z": "sample" if _is_sampled(method) else "mode",
        "batch": length,
        "draws": draws,
        "size": size,
        "antialias": pair[0].antialias,
        "views": [asdict(view) for view in pair],
        "seed": seed,
        "precision": str(precision).removeprefix("torch."),
    }
    terms = {name: torch.cat([each[name] for each in measured]).cpu() for name in measured[0]}
    return Information(
        torch.cat(index).cpu(),
        terms["positive_cosine"],
        *(terms.get(name) for name in ("residual", "reducible_residual", "predictive")),
        bound=bound,
        dropped=dropped,
        protocol=protocol,
    )


def _measure(
    method: Method,
    batch: Batch,
    pair: tuple[View, View],
    draw: int,
    size: int,
    seed: int,
    precision: torch.dtype,
    channels: Channels,
) -> dict[str, Tensor]:
    """Measure the terms of the method on one new pair of views.

    Rows of X come first, then rows of Y. A term is the mean of both directions.
    """
    twice = torch.cat([batch.index, batch.index])
    view = 2 * draw + (torch.arange(len(twice), device=twice.device) >= len(batch.index)).long()
    keys = image_keys(twice, seed=seed, epoch=_VIEWS, view=view)
    height, width = batch.height, batch.width
    views = augment_pair(
        batch.images, keys, pair, size, height=height, width=width, channels=channels
    )
    images = torch.cat(views)
    with autocast(images.device, precision):
        found = method.embeddings(images)
    r_x, r_y = found.r.chunk(2)
    z, terms = found.mu, {"positive_cosine": (r_x * r_y).sum(1)}
    if method.channel is not None and found.mu_b is not None:
        e = VonMisesFisher(found.mu, method.channel.kappa_e)
        b = VonMisesFisher(found.mu_b, method.channel.kappa_b)
        at = image_keys(twice, seed=seed, epoch=_Z, view=view)
        z = keyed_sample(e, at) if _is_sampled(method) else method.channel.sample(e)
        rates = residual_terms(z, e, b, "analytic", reparameterized=False)
        terms["residual"] = rates.residual.view(2, -1).mean(0)
        terms["reducible_residual"] = rates.reducible.view(2, -1).mean(0)
    if found.target is not None and (predictive := method.predictive(z, found.target)) is not None:
        terms["predictive"] = predictive
    return terms


def _is_sampled(method: Method) -> bool:
    return method.channel is None or method.channel.is_reparameterized


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Assert that no weight and no batch-norm statistic changes."""
    changed = remember_weights(module)
    yield
    name = changed()
    assert not name, f"{name} changed during an evaluation"
