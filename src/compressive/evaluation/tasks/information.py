"""Information on held-out pairs: the meter of the objectives, where nothing was learned.

Two views of each image are new, the networks run in evaluation mode, and nothing in them changes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressive.augment.ops import augment_pair
from compressive.augment.params import View
from compressive.checks import autocast
from compressive.data.loaders import Batch
from compressive.distributions.vmf import VonMisesFisher
from compressive.evaluation.tasks.smoothness import keyed_sample
from compressive.methods import Method
from compressive.objectives import residual_terms
from compressive.rng import image_keys

_VIEWS, _Z = 2**32 - 1, 2**32 - 2  # epochs that no run reaches: new views, and a z for each

PerImage = Float[Tensor, " count"]


class Mean(NamedTuple):
    """A mean over images and its standard error."""

    value: float
    error: float


class Information(NamedTuple):
    """What the views of held-out images tell, in nats; per image, mean of both directions."""

    index: Int[Tensor, " count"]  # places of the images
    positive_cosine: PerImage  # cosine of the projections of X and Y
    residual: PerImage | None  # I(X;Z|Y); compressed methods only
    reducible_residual: PerImage | None  # its part above the floor at equal means
    predictive: PerImage | None  # I(Y;Z), contrastive methods only: log K - nll
    bound: float | None  # log K of the batches, the most that predictive can show
    dropped: int  # images of batches with another K than the first
    protocol: dict[str, Any]

    def means(self) -> dict[str, Mean]:
        """What there is, by name."""
        named = {name: getattr(self, name) for name in _Meter._fields}
        return {name: mean(values) for name, values in named.items() if values is not None}


class _Meter(NamedTuple):
    """The per-image fields of Information."""

    positive_cosine: Tensor
    residual: Tensor | None
    reducible_residual: Tensor | None
    predictive: Tensor | None


def mean(values: PerImage) -> Mean:
    """Mean and standard error, NaN for one image.

    Candidates of one batch are common to its images, so that the error of `predictive` is nearly,
    not exactly, that of independent values.
    """
    return Mean(values.mean().item(), values.std().item() / math.sqrt(len(values)))


def direction_of(method: Method) -> Callable[[Tensor], Tensor]:
    """Return mu(x) of normalized images in evaluation mode: the mean direction of e(z|x).

    It is the projection in SimCLR, and the prediction where there is a predictor (MoCo v3, BYOL,
    SimSiam). Plain methods use the same point without the noise.
    """

    @torch.no_grad()
    def direction(images: Tensor) -> Tensor:
        with _evaluating(method):
            return method.embeddings(images).mu

    return direction


@torch.no_grad()
def information(
    method: Method,
    batches: Iterable[Batch],
    pair: tuple[View, View],
    *,
    size: int,
    seed: int = 0,
    draws: int = 1,
    precision: torch.dtype = torch.float32,
) -> Information:
    """The meter on pairs of views that no run has seen, `draws` pairs of each image averaged.

    The residual is its expectation over z in closed form. `predictive` takes one z per view, drawn
    by the image's key, or at the mode where training does. It seeks among the candidates of a batch
    and can only be compared at one K: batches of another length than the first, such as a rest at
    the end, are left out where a method is contrastive, and counted.
    """
    if draws < 1:
        raise ValueError(f"draws must be 1 pair of views or more, got {draws}")
    length, dropped, index, meters = 0, 0, [], []
    with _evaluating(method), _unchanged(method):
        for batch in batches:
            length = length or len(batch.index)
            if method.bound(length) is not None and len(batch.index) != length:
                dropped += len(batch.index)
                continue
            index.append(batch.index)
            made = [_meter(method, batch, pair, size, seed, i, precision) for i in range(draws)]
            meters.append(_joined(lambda parts: torch.stack(parts).mean(0), made))
    if not index:
        raise ValueError("batches must hold one image or more for a meter, got none")
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
    meter = _joined(lambda parts: torch.cat(parts).cpu(), meters)
    place = torch.cat(index).cpu()
    return Information(place, *meter, bound=bound, dropped=dropped, protocol=protocol)


def _joined(join: Callable[[list[Tensor]], Tensor], meters: list[_Meter]) -> _Meter:
    """Many meters as one; what is None in them stays None."""

    def joined(name: str) -> Tensor | None:
        parts = [part for meter in meters if (part := getattr(meter, name)) is not None]
        return join(parts) if parts else None

    positive_cosine = join([meter.positive_cosine for meter in meters])
    return _Meter(
        positive_cosine, joined("residual"), joined("reducible_residual"), joined("predictive")
    )


def _meter(
    method: Method,
    batch: Batch,
    pair: tuple[View, View],
    size: int,
    seed: int,
    draw: int,
    precision: torch.dtype,
) -> _Meter:
    """The meter of one new pair of views; rows are those of X, then those of Y."""
    twice = torch.cat([batch.index, batch.index])
    view = 2 * draw + (torch.arange(len(twice), device=twice.device) >= len(batch.index)).long()
    keys = image_keys(twice, seed=seed, epoch=_VIEWS, view=view)
    views = augment_pair(batch.images, keys, pair, size, height=batch.height, width=batch.width)
    images = torch.cat(views)
    with autocast(images.device, precision):
        found = method.embeddings(images)
    r_x, r_y = found.r.chunk(2)
    z, residual, reducible_residual = found.mu, None, None
    if method.channel is not None and found.mu_b is not None:
        e = VonMisesFisher(found.mu, method.channel.kappa_e)
        b = VonMisesFisher(found.mu_b, method.channel.kappa_b)
        at = image_keys(twice, seed=seed, epoch=_Z, view=view)
        z = keyed_sample(e, at) if _is_sampled(method) else method.channel.sample(e)
        terms = residual_terms(z, e, b, "analytic", reparameterized=False)
        residual, reducible_residual = _both(terms.residual), _both(terms.reducible)
    predictive = None if found.target is None else method.predictive(z, found.target)
    return _Meter((r_x * r_y).sum(1), residual, reducible_residual, predictive)


def _both(directions: Tensor) -> Tensor:
    """Return one value per image: the mean of both directions."""
    return directions.view(2, -1).mean(0)


def _is_sampled(method: Method) -> bool:
    return method.channel is None or method.channel.is_reparameterized


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every part in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Proof that no weight and no statistic of a batch norm has moved."""
    before = {name: value.clone() for name, value in _state(module)}
    yield
    for name, value in _state(module):
        same = torch.allclose(value, before[name], rtol=0, atol=0, equal_nan=True)
        assert same, f"{name} changed during an evaluation"


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
