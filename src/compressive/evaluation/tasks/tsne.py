"""Exact t-SNE for the gallery: a map of points in the plane that keeps neighbors close."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.checks import full_precision, validates_inputs
from compressive.platforms.float64 import to_float64

PERPLEXITY, STEPS = 30.0, 750
# Early steps with exaggerated attraction; with 100 steps some maps end 15 % worse.
_EARLY, _EXAGGERATION = 250, 12.0
_BISECTIONS = 60  # of the width of each Gaussian: 17 digits, minus the steps to find its scale


@validates_inputs
def tsne(
    x: Float[Tensor, "count dim"],
    *,
    perplexity: float = PERPLEXITY,
    steps: int = STEPS,
    progress: Callable[[int, int], None] | None = None,
) -> Float[Tensor, "count 2"]:
    """Return a map of up to a few thousand points.

    The map is deterministic because it starts from the two main axes. Time and memory are quadratic
    in the number of points. The perplexity is at most a third of the points. The learning rate
    grows with their number as in Belkina et al. (Nature Communications 10, 2019); momenta and gains
    are those of van der Maaten.
    """
    if x.dim() != 2 or len(x) < 4 or x.shape[1] < 2:
        raise ValueError(f"a map needs 4 points in 2 dimensions or more, got {tuple(x.shape)}")
    if not x.isfinite().all():
        raise ValueError("a map needs finite numbers, got NaN or infinity")
    with torch.no_grad(), full_precision(x):
        exact, device = to_float64(x), x.device
        exact = exact - exact.mean(0)
        p = joint_probabilities(exact, perplexity).float().to(device)
        y = _main_axes(exact)
        y = (1e-4 * y / y[:, 0].std().clamp(min=1e-12)).float().to(device)
        rate = max(len(x) / _EXAGGERATION, 50.0)
        update, gains = torch.zeros_like(y), torch.ones_like(y)
        for step in range(steps):
            early = step < _EARLY
            slope = kl_gradient(p, y, _EXAGGERATION if early else 1.0)
            turned = update * slope < 0
            gains = torch.where(turned, gains + 0.2, gains * 0.8).clamp(min=0.01)
            update = (0.5 if early else 0.8) * update - rate * gains * slope
            y = y + update
            if progress is not None and step % 10 == 9:
                progress(step + 1, steps)
        return y - y.mean(0)


def joint_probabilities(
    x: Float[Tensor, "count dim"], perplexity: float
) -> Float[Tensor, "count count"]:
    """Return the neighbor probabilities of pairs: symmetric, of sum 1, 0 on the diagonal.

    Each point has a Gaussian over the others whose entropy is the logarithm of the perplexity.
    """
    length = x.square().sum(1)
    apart = (length[:, None] + length - 2 * x @ x.mT).clamp(min=0).fill_diagonal_(math.inf)
    apart = apart - apart.min(1, keepdim=True).values  # so that not all weights of a row vanish
    entropy = math.log(min(perplexity, (len(x) - 1) / 3))
    low, high = torch.zeros_like(length), torch.full_like(length, math.inf)
    sharpness = 1 / x.var(0).sum().clamp(min=1e-12).expand_as(length)

    def conditional() -> Tensor:
        return (-sharpness[:, None] * apart).softmax(1)

    for _ in range(_BISECTIONS):
        too_wide = torch.special.entr(conditional()).sum(1) > entropy
        low = torch.where(too_wide, sharpness, low)
        high = torch.where(too_wide, high, sharpness)
        sharpness = torch.where(high.isinf(), 2 * low, (low + high) / 2)
    p = conditional()
    return (p + p.mT) / (2 * len(x))


def _main_axes(x: Float[Tensor, "count dim"]) -> Float[Tensor, "count 2"]:
    """Project centered points onto the two directions of the largest variance."""
    axes = torch.linalg.eigh(x.mT @ x).eigenvectors[:, -2:].flip(1)
    # Solvers choose the sign; make the largest entry positive.
    peak = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return x @ (axes * peak.sign())


def kl_gradient(p: Tensor, y: Tensor, exaggeration: float) -> Tensor:
    """Return the gradient of KL(p || q), where q has the tails of Student's t."""
    apart = (y[:, None, 0] - y[:, 0]).square_()
    apart += (y[:, None, 1] - y[:, 1]).square_()
    near = apart.add_(1).reciprocal_().fill_diagonal_(0)
    pull = (near * (-1 / near.sum())).add_(p, alpha=exaggeration).mul_(near)
    return 4 * (pull.sum(1, keepdim=True) * y - pull @ y)
