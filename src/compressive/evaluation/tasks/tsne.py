"""Exact t-SNE: points with many coordinates on a plane, neighbors beside each other."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.checks import full_precision, validates_inputs

PERPLEXITY, STEPS = 30.0, 750
# Steps in which attraction is that many times too strong; with 100 some maps end 15 % worse.
_EARLY, _EXAGGERATION = 250, 12.0
_NARROWINGS = 60  # of each Gaussian's width: 17 digits, less what finding its scale takes


@validates_inputs
def tsne(
    x: Float[Tensor, "count dim"], *, perplexity: float = PERPLEXITY, steps: int = STEPS
) -> Float[Tensor, "count 2"]:
    """A map of up to some thousand points; no random numbers, as it starts from two main axes.

    Work and memory are quadratic in the number of points. Of few points each has at most a third
    as its neighbors, whatever the perplexity. The rate grows with their number as of Belkina et al.
    (Nature Communications 10, 2019); momenta and gains are those of van der Maaten.
    """
    if x.dim() != 2 or len(x) < 4 or x.shape[1] < 2:
        raise ValueError(f"a map needs 4 points in 2 dimensions or more, got {tuple(x.shape)}")
    if not x.isfinite().all():
        raise ValueError("a map needs finite numbers, got NaN or infinity")
    with torch.no_grad(), full_precision(x):
        x = x.double() - x.double().mean(0)
        p = joint_probabilities(x, perplexity).float()
        y = _main_axes(x)
        y = (1e-4 * y / y[:, 0].std().clamp(min=1e-12)).float()
        rate = max(len(x) / _EXAGGERATION, 50.0)
        update, gains = torch.zeros_like(y), torch.ones_like(y)
        for step in range(steps):
            early = step < _EARLY
            slope = _gradient(p, y, _EXAGGERATION if early else 1.0)
            turned = update * slope < 0
            gains = torch.where(turned, gains + 0.2, gains * 0.8).clamp(min=0.01)
            update = (0.5 if early else 0.8) * update - rate * gains * slope
            y = y + update
        return y - y.mean(0)


def joint_probabilities(
    x: Float[Tensor, "count dim"], perplexity: float
) -> Float[Tensor, "count count"]:
    """How much two points are neighbors: symmetric, of sum 1, 0 on the diagonal.

    Each point sees the others under a Gaussian whose entropy is the logarithm of the perplexity.
    """
    length = x.square().sum(1)
    apart = (length[:, None] + length - 2 * x @ x.mT).clamp(min=0).fill_diagonal_(math.inf)
    apart = apart - apart.min(1, keepdim=True).values  # so that no row's weights all vanish
    entropy = math.log(min(perplexity, (len(x) - 1) / 3))
    low, high = torch.zeros_like(length), torch.full_like(length, math.inf)
    sharpness = 1 / x.var(0).sum().clamp(min=1e-12).expand_as(length)

    def seen() -> Tensor:
        return (-sharpness[:, None] * apart).softmax(1)

    for _ in range(_NARROWINGS):
        too_wide = torch.special.entr(seen()).sum(1) > entropy
        low = torch.where(too_wide, sharpness, low)
        high = torch.where(too_wide, high, sharpness)
        sharpness = torch.where(high.isinf(), 2 * low, (low + high) / 2)
    p = seen()
    return (p + p.mT) / (2 * len(x))


def _main_axes(x: Float[Tensor, "count dim"]) -> Float[Tensor, "count 2"]:
    """Centered points along the two directions in which they vary most."""
    axes = torch.linalg.eigh(x.mT @ x).eigenvectors[:, -2:].flip(1)
    # Which end is up is the solver's choice; here the larger entry is.
    peak = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return x @ (axes * peak.sign())


def _gradient(p: Tensor, y: Tensor, exaggeration: float) -> Tensor:
    """Of the divergence KL(p || q), q falling off as Student's t with one degree of freedom."""
    apart = (y[:, None, 0] - y[:, 0]).square_()
    apart += (y[:, None, 1] - y[:, 1]).square_()
    near = apart.add_(1).reciprocal_().fill_diagonal_(0)
    pull = (near * (-1 / near.sum())).add_(p, alpha=exaggeration).mul_(near)
    return 4 * (pull.sum(1, keepdim=True) * y - pull @ y)
