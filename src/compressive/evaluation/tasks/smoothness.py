"""Smoothness: local Lipschitz estimates of e(z|x) under color changes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment.ops import IMAGENET_COLORS, Channels, Images, center_crop, normalize
from compressive.checks import autocast, check_one_of, check_positive, validates_inputs
from compressive.data.loaders import Batch
from compressive.distributions.vmf import VonMisesFisher
from compressive.evaluation.color_changes import PERTURBATIONS, perturb
from compressive.evaluation.context import EvalContext
from compressive.evaluation.frozen_model import mean_direction
from compressive.platforms.float64 import to_float64
from compressive.rng import Keys, image_keys, uniforms

Place = Literal["mode", "sample", "mean"]
PLACES = get_args(Place)

PAPER_IMAGES = {"train": 10_000, "test": 50_000}
# Smaller changes are rounding errors: gray images under hue or saturation, white images under
# brightness. A color difference of one gray level under saturation is 8e-4 before resizing.
_ROUNDING = 1e-5
_Z_EPOCH, _VIEW = 2**32 - 1, 2**32 - 2  # no run reaches the epoch; no other module draws the view


class LocalEstimates(NamedTuple):
    """Estimates for one perturbation, one per image that it changes, in float64 on the host."""

    index: Int[Tensor, " count"]  # indices of these images
    value: Float[Tensor, " count"]  # |log e(z|x) - log e(z|x')| / ||dx||, pixels in [0, 1]
    normalized: Float[Tensor, " count"]  # the same with ||dx|| of normalized images
    squared: Float[Tensor, " count"]  # KL[e(z|x) || e(z|x')] / ||dx||^2, pixels in [0, 1]
    dropped: int  # number of images that it does not change

    @property
    def mean(self) -> float:
        """Mean of `value`, as the paper prints it."""
        return self.value.mean().item()

    @property
    def bound(self) -> float:
        """Lower bound of the Lipschitz constant: the root of the largest `squared`."""
        return math.sqrt(max(self.squared.tolist(), default=math.nan))


class Smoothness(NamedTuple):
    """Estimates by the name of the perturbation, and their protocol."""

    local: dict[str, LocalEstimates]
    protocol: dict[str, Any]


class Histogram(NamedTuple):
    """Values in equal bins; densities are relative to all values."""

    edges: Float[Tensor, " edges"]
    density: Float[Tensor, " bins"]  # its sum times the width of a bin is 1 - beyond
    beyond: float  # fraction of values above the last edge


def run(context: EvalContext, *, images: Mapping[str, int] = PAPER_IMAGES) -> None:
    """Record the estimates on at most `images` train and test images."""
    method = context.model.method
    if method is None:
        why = context.model.why_no_method or "which needs the projection of a run"
        context.skip(f"smoothness, {why}")
        return
    for split in ("train", "test"):
        found = measure_smoothness(
            mean_direction(method),
            _random_images(context, split, images[split]),
            size=context.model.size,
            seed=context.seed,
            antialias=context.model.antialias,
            channels=Channels(context.model.mean, context.model.std),
        )
        for name, local in found.local.items():
            _record_local(context, split, name, local, found.protocol)
        _record_mean(context, split, found)


def _record_local(
    context: EvalContext, split: str, name: str, local: LocalEstimates, protocol: dict[str, Any]
) -> None:
    dataset = f"{context.splits.name} {split}"
    if not len(local.value):
        context.skip(f"smoothness, {name}: it changes no image of {dataset}")
        return
    edges, density, beyond = histogram(local.value)
    shape = {"edges": edges.tolist(), "density": density.tolist(), "share_beyond": beyond}
    mean = float(local.normalized.mean())
    details = {"unchanged_images": local.dropped, "mean_in_normalized_units": mean}
    details = {**protocol, **details, "histogram": shape}
    bound = {**protocol, "largest": local.bound**2}
    add, task = context.results.add, f"smoothness {name}"
    images = context.images(split, local.index)
    add(task, dataset, "lipschitz", local.value, protocol=details, images=images)
    add(task, dataset, "lipschitz_squared_kl", local.squared, protocol=bound, images=images)


def _record_mean(context: EvalContext, split: str, found: Smoothness) -> None:
    """Record the mean over changes, of the images that every change affects.

    Changes that affect no image are left out, such as those of hue if all images are gray.
    """
    used = [local for local in found.local.values() if len(local.index)]
    kept = [set(local.index.tolist()) for local in used] or [set[int]()]
    index = torch.tensor(sorted(set.intersection(*kept)), dtype=torch.int64)
    if not len(index):
        return
    each = [local.value[torch.isin(local.index, index)] for local in used]
    context.results.add(
        "smoothness",
        f"{context.splits.name} {split}",
        "lipschitz",
        torch.stack(each).mean(0),
        protocol={**found.protocol, "changes": len(each)},
        images=context.images(split, index),
    )


def _random_images(context: EvalContext, split: str, most: int) -> Iterator[Batch]:
    """Return at most `most` images of a split, drawn by the seed."""
    count, random = len(context.source(split)), torch.Generator().manual_seed(context.seed)
    chosen = torch.randperm(count, generator=random)[:most].sort().values
    return context.batches_at(split, chosen)


@validates_inputs
def measure_smoothness(
    direction: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    size: int,
    kappa: float = 1024.0,
    z: Place = "mode",
    seed: int = 0,
    precision: torch.dtype = torch.float32,
    antialias: bool = False,
    channels: Channels = IMAGENET_COLORS,
) -> Smoothness:
    """Measure how fast log e(z|x) changes under eight color changes of central crops (App. G).

    e(z|x) = vMF(mu(x), kappa); `direction` returns mu of normalized images. Both sides have the
    same kappa, so that |log e(z|x) - log e(z|x')| = kappa |z.(mu(x) - mu(x'))|. SimCLR has no
    kappa. It is measured with that of C-SimCLR, so that only directions are compared. C-BYOL would
    use 16384. z is the `mode` mu(x), which gives kappa (1 - cos); a `sample` of e(z|x) for each
    image, independent of its batch; or the `mean` A_n(kappa) mu(x), which gives the KL divergence.
    """
    check_positive(kappa=kappa)
    check_one_of(PLACES, z=z)
    index, found = [], []
    with torch.no_grad():
        for batch in batches:
            x = center_crop(
                batch.images, size, height=batch.height, width=batch.width, antialias=antialias
            )
            e = VonMisesFisher(_directions(direction, x, precision, channels), kappa)
            at = e.mode if z == "mode" else e.mean
            if z == "sample":
                keys = image_keys(batch.index, seed=seed, epoch=_Z_EPOCH, view=_VIEW)
                at = keyed_sample(e, keys)
            readings = []
            for perturbation in PERTURBATIONS:
                changed = perturb(x, perturbation)
                mu = _directions(direction, changed, precision, channels)
                readings.append(_distances(changed - x, e, mu, at, kappa, channels.std))
            found.append(torch.stack(readings))
            index.append(batch.index)
    if not index:
        raise ValueError("batches must hold one image or more for an estimate, got none")
    place, values = torch.cat(index).cpu(), torch.cat(found, 2).cpu()
    pairs = zip(PERTURBATIONS, values, strict=True)
    local = {perturbation.name: _local_estimates(place, rows) for perturbation, rows in pairs}
    protocol = {
        **{"kappa": kappa, "z": z, "seed": seed},
        "value": "kappa |z.(mu(x) - mu(x'))| / ||dx||",
        "squared": "kappa A_n(kappa) (1 - mu(x).mu(x')) / ||dx||^2",
        "norm": f"L2 over all {3 * size**2} values",
        "unit": "pixels in [0, 1]; `normalized`: over the standard deviation of each channel",
        "perturbations": {each.name: each.amount for each in PERTURBATIONS},
        "crop": f"central square at {size} pixels, Keys bicubic a=-0.5, antialias={antialias}",
        "dropped": f"images in which no value changes by more than {_ROUNDING:g}",
        "precision": str(precision).removeprefix("torch."),
        "images": len(place),
    }
    return Smoothness(local, protocol)


@validates_inputs
def histogram(values: Float[Tensor, " count"], bins: int = 100) -> Histogram:
    """Count values in equal bins from 0 to their 99.5th percentile."""
    if values.ndim != 1 or not len(values):
        shape = tuple(values.shape)
        raise ValueError(f"values must be (count,) with 1 value or more, got {shape}")
    if bins < 1:
        raise ValueError(f"bins must be 1 or more, got {bins}")
    values = values.cpu().double()
    top = values.quantile(0.995).item() or 1.0  # all values are 0 if nothing moves the direction
    edges = torch.linspace(0, top, bins + 1, dtype=torch.float64)
    density = torch.histogram(values, edges).hist / len(values) / edges.diff()
    return Histogram(edges, density, (values > edges[-1]).double().mean().item())


def keyed_sample(e: VonMisesFisher, keys: Keys) -> Float[Tensor, "batch dim"]:
    """Draw a sample of e for each key, independent of the batch and the device."""
    u = uniforms(keys, 2 * ((e.dim + 1) // 2))
    near, far = (1 - u).log().mul(-2).sqrt().chunk(2, 1)[0], 2 * math.pi * u.chunk(2, 1)[1]
    noise = torch.cat([near * far.cos(), near * far.sin()], 1)[:, : e.dim]  # Box and Muller 1958
    return e.from_noise(noise.to(e.mean_direction.dtype).to(e.mean_direction.device))


def _directions(
    direction: Callable[[Tensor], Tensor],
    images: Tensor,
    precision: torch.dtype,
    channels: Channels,
) -> Float[Tensor, "batch dim"]:
    """Return mu of images in [0, 1], in float64: 1 - cos subtracts nearly equal numbers."""
    with autocast(images.device, precision):
        mu = direction(normalize(images, mean=channels.mean, std=channels.std))
    return F.normalize(to_float64(mu), dim=1)


def _distances(
    dx: Images, e: VonMisesFisher, mu: Tensor, z: Tensor, kappa: float, scales: Sequence[float]
) -> Float[Tensor, "5 batch"]:
    """Return the largest change of a pixel, ||dx|| in both units, change of log e(z|x), KL."""
    apart = e.mean_direction - mu
    by_channel = to_float64(torch.linalg.vector_norm(dx.flatten(2), dim=2))
    std = [each / scale for each, scale in zip(by_channel.unbind(1), scales, strict=True)]
    return torch.stack(
        [
            to_float64(dx.abs().amax((1, 2, 3))),
            torch.linalg.vector_norm(by_channel, dim=1),
            torch.linalg.vector_norm(torch.stack(std, 1), dim=1),
            kappa * (z * apart).sum(1).abs(),
            kappa * e.mean_resultant_length * 0.5 * apart.square().sum(1),
        ]
    )


def _local_estimates(
    index: Int[Tensor, " count"], readings: Float[Tensor, "5 count"]
) -> LocalEstimates:
    kept = ~(readings[0] <= _ROUNDING)  # keeps NaN, so that it shows in the results
    _, pixels, normalized, change, kl = readings[:, kept]
    values = change / pixels, change / normalized, kl / pixels.square()
    return LocalEstimates(index[kept], *values, dropped=int((~kept).sum()))
