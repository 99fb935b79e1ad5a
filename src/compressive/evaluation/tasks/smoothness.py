"""Smoothness: how fast e(z|x) changes with the colors of an image, as local Lipschitz estimates."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment.ops import (
    STD,
    Images,
    brightness,
    center_crop,
    contrast,
    hue,
    normalize,
    saturation,
)
from compressive.augment.params import Numbers
from compressive.checks import autocast, check_one_of, check_positive, validates_inputs
from compressive.data.loaders import Batch
from compressive.distributions.vmf import VonMisesFisher
from compressive.rng import Keys, image_keys, uniforms

Place = Literal["mode", "sample", "mean"]
PLACES = get_args(Place)

# Below this in every pixel a change is rounding, not color: gray images under hue or saturation,
# white ones under brightness. One gray level of color under saturation is 8e-4 before resizing.
_ROUNDING = 1e-5
_HELD = 2**32 - 1  # an epoch that no run reaches, and a view of it that no other room takes


class Perturbation(NamedTuple):
    """One change of color by the largest strength that training knows."""

    name: str
    operator: Callable[[Images, Numbers], Images]
    amount: float  # added to brightness and hue; contrast and saturation are multiplied by it


PERTURBATIONS = (  # paper, table of augmentations: 0.4, 0.4, 0.2, 0.1
    Perturbation("brightness+", brightness, 0.4),
    Perturbation("brightness-", brightness, -0.4),
    Perturbation("contrast+", contrast, 1.4),
    Perturbation("contrast-", contrast, 0.6),
    Perturbation("saturation+", saturation, 1.2),
    Perturbation("saturation-", saturation, 0.8),
    Perturbation("hue+", hue, 0.1),
    Perturbation("hue-", hue, -0.1),
)


class Local(NamedTuple):
    """Estimates for one perturbation, one per image that it changes, in float64 on the host."""

    index: Int[Tensor, " count"]  # places of these images
    value: Float[Tensor, " count"]  # |log e(z|x) - log e(z|x')| / ||dx||, pixels in [0, 1]
    normalized: Float[Tensor, " count"]  # the same with ||dx|| of normalized images
    squared: Float[Tensor, " count"]  # KL[e(z|x) || e(z|x')] / ||dx||^2, pixels in [0, 1]
    dropped: int  # images that it does not change

    @property
    def mean(self) -> float:
        """Mean of `value`, as the paper prints it."""
        return self.value.mean().item()

    @property
    def bound(self) -> float:
        """What the Lipschitz constant is at least: the root of the largest `squared`."""
        return math.sqrt(max(self.squared.tolist(), default=math.nan))


class Smoothness(NamedTuple):
    """Estimates by the name of the perturbation, and the choices that they rest on."""

    local: dict[str, Local]
    protocol: dict[str, Any]


class Histogram(NamedTuple):
    """Two sets of values over common bins; densities are of all values, beyond the bins too."""

    edges: Float[Tensor, " edges"]
    first: Float[Tensor, " bins"]  # its sum times the width of a bin is 1 - first_beyond
    first_beyond: float  # share of values above the last edge
    second: Float[Tensor, " bins"] | None
    second_beyond: float | None


def perturb(images: Images, perturbation: Perturbation) -> Images:
    """Images in [0, 1] after one change of color, clipped to [0, 1]."""
    amount = images.new_full((len(images),), perturbation.amount)
    return perturbation.operator(images, amount).clamp(0, 1)


@validates_inputs
def smoothness(
    direction: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    size: int,
    kappa: float = 1024.0,
    z: Place = "mode",
    seed: int = 0,
    precision: torch.dtype = torch.float32,
    antialias: bool = False,
) -> Smoothness:
    """How fast log e(z|x) changes with each of eight colors at central crops (paper, App. G).

    e(z|x) = vMF(mu(x), kappa), where `direction` gives mu of normalized images. As both sides have
    one kappa, |log e(z|x) - log e(z|x')| = kappa |z.(mu(x) - mu(x'))|. SimCLR has no kappa: with
    that of C-SimCLR for both, directions are compared; C-BYOL's own would be 16384. z is `mode`,
    mu(x), where this is kappa (1 - cos); a `sample` of e(z|x) for each image, which no batch
    changes; or the `mean` of e(z|x), A_n(kappa) mu(x), where it is the KL divergence.
    """
    check_positive(kappa=kappa)
    check_one_of(PLACES, z=z)
    index, found = [], []
    with torch.no_grad():
        for batch in batches:
            x = center_crop(
                batch.images, size, height=batch.height, width=batch.width, antialias=antialias
            )
            e = VonMisesFisher(_directions(direction, x, precision), kappa)
            at = _place(e, z, image_keys(batch.index, seed=seed, epoch=_HELD, view=_HELD - 1))
            readings = []
            for perturbation in PERTURBATIONS:
                changed = perturb(x, perturbation)
                mu = _directions(direction, changed, precision)
                readings.append(_read(changed - x, e, mu, at, kappa))
            found.append(torch.stack(readings))
            index.append(batch.index)
    if not index:
        raise ValueError("batches must hold one image or more for an estimate, got none")
    place, values = torch.cat(index).cpu(), torch.cat(found, 2).cpu()
    pairs = zip(PERTURBATIONS, values, strict=True)
    local = {perturbation.name: _local(place, rows) for perturbation, rows in pairs}
    protocol = {"kappa": kappa, "z": z, "seed": seed, **_stated(size, antialias, precision)}
    return Smoothness(local, protocol | {"images": len(place)})


@validates_inputs
def histogram(
    first: Float[Tensor, " count"], second: Float[Tensor, " others"] | None = None, bins: int = 100
) -> Histogram:
    """Equal bins from 0 to the 99.5th percentile of the first values, for both (spec: SimCLR's)."""
    for name, values in (("first", first), ("second", second)):
        if values is not None and (values.ndim != 1 or not len(values)):
            shape = tuple(values.shape)
            raise ValueError(f"{name} must be (count,) with 1 value or more, got {shape}")
    if bins < 1:
        raise ValueError(f"bins must be 1 or more, got {bins}")
    first = first.double().cpu()
    top = first.quantile(0.995).item() or 1.0  # all 0 where nothing moves the direction
    edges = torch.linspace(0, top, bins + 1, dtype=torch.float64)
    if second is None:
        return Histogram(edges, *_densities(first, edges), None, None)
    return Histogram(edges, *_densities(first, edges), *_densities(second.double().cpu(), edges))


def _stated(size: int, antialias: bool, precision: torch.dtype) -> dict[str, Any]:
    return {
        "value": "kappa |z.(mu(x) - mu(x'))| / ||dx||",
        "squared": "kappa A_n(kappa) (1 - mu(x).mu(x')) / ||dx||^2",
        "norm": f"L2 over all {3 * size**2} values",
        "unit": "pixels in [0, 1]; `normalized`: over the standard deviation of each channel",
        "perturbations": {each.name: each.amount for each in PERTURBATIONS},
        "crop": f"central square at {size} pixels, Keys bicubic a=-0.5, antialias={antialias}",
        "dropped": f"images in which no value changes by more than {_ROUNDING:g}",
        "precision": str(precision).removeprefix("torch."),
    }


def keyed_sample(e: VonMisesFisher, keys: Keys) -> Float[Tensor, "batch dim"]:
    """A sample of e for each key, by that key alone: no batch and no device changes it."""
    u = uniforms(keys, 2 * ((e.dim + 1) // 2))
    near, far = (1 - u).log().mul(-2).sqrt().chunk(2, 1)[0], 2 * math.pi * u.chunk(2, 1)[1]
    noise = torch.cat([near * far.cos(), near * far.sin()], 1)[:, : e.dim]  # Box and Muller 1958
    return e._from_noise(noise.to(e.mean_direction.dtype))


def _directions(
    direction: Callable[[Tensor], Tensor], images: Tensor, precision: torch.dtype
) -> Float[Tensor, "batch dim"]:
    """mu of images in [0, 1], in float64: 1 - cos is a difference of nearly equal numbers."""
    with autocast(images.device, precision):
        mu = direction(normalize(images))
    return F.normalize(mu.double(), dim=1)


def _place(e: VonMisesFisher, z: Place, keys: Keys) -> Float[Tensor, "batch dim"]:
    if z == "sample":
        return keyed_sample(e, keys)
    return e.mode if z == "mode" else e.mean


def _read(
    dx: Images, e: VonMisesFisher, mu: Tensor, z: Tensor, kappa: float
) -> Float[Tensor, "5 batch"]:
    """Largest change of a value, ||dx|| in both units, |log e(z|x) - log e(z|x')|, and the KL."""
    apart = e.mean_direction - mu
    channels = torch.linalg.vector_norm(dx.flatten(2), dim=2).double()
    std = [each / scale for each, scale in zip(channels.unbind(1), STD, strict=True)]
    return torch.stack(
        [
            dx.abs().amax((1, 2, 3)).double(),
            torch.linalg.vector_norm(channels, dim=1),
            torch.linalg.vector_norm(torch.stack(std, 1), dim=1),
            kappa * (z * apart).sum(1).abs(),
            kappa * e.mean_resultant_length * 0.5 * apart.square().sum(1),
        ]
    )


def _local(index: Int[Tensor, " count"], readings: Float[Tensor, "5 count"]) -> Local:
    kept = ~(readings[0] <= _ROUNDING)  # NaN is kept, and seen
    _, pixels, normalized, change, kl = readings[:, kept]
    values = change / pixels, change / normalized, kl / pixels.square()
    return Local(index[kept], *values, dropped=int((~kept).sum()))


def _densities(values: Tensor, edges: Tensor) -> tuple[Tensor, float]:
    counts = torch.histogram(values, edges).hist
    beyond = (values > edges[-1]).double().mean().item()
    return counts / len(values) / edges.diff(), beyond
