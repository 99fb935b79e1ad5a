"""L-BFGS for softmax regression, several l2 penalties in one batch of linear algebra.

All problems share their features, so that a step is two products of matrices for all of them: one
gives how the logits change along the directions, one the gradients. The line search in between
only adds logits. Problems that are done leave the batch.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_HISTORY = 10  # 20 and 40 saved no steps on any of the seven kinds of features tried
_REFRESH = 10  # steps between looks at the curvature; every step saved no steps
_TRIALS = 12  # of a line search: bisection alone would have narrowed it 4,000 times

# Shapes are checked at the two doors alone: inside, where every step passes many times, the
# checks of a test run would take longer than the work.
Labels = Tensor  # count
PerProblem = Tensor  # problems
Weights = Tensor  # problems, axes, classes
Logits = Tensor  # count, problems, classes


class Minimum(NamedTuple):
    """Where each problem ended."""

    w: Float[Tensor, "problems axes classes"]
    steps: Int[Tensor, " problems"]
    converged: Bool[Tensor, " problems"]


def cross_entropy(
    z: Float[Tensor, "count problems classes"], labels: Int[Tensor, " count"]
) -> tuple[Float[Tensor, " problems"], Float[Tensor, "count problems classes"]]:
    """Sum over examples, and its slope in the logits: probabilities less the one-hot label.

    Both are exact to rounding also where the label has nearly all the probability: what is left
    to the other classes is added up, not subtracted from 1. Small penalties live on that rest.
    """
    own = labels[:, None, None].expand(-1, z.shape[1], 1)
    top = z.amax(2, keepdim=True)
    behind = z.gather(2, own) - top
    # exp(-60) is nothing beside rounding; smaller numbers would be subnormal in float32, and slow.
    others = (z - top).clamp_(min=-60).exp_().scatter_(2, own, 0)
    rest = others.sum(2, keepdim=True)
    total = rest + behind.exp()
    loss = (torch.log1p(rest + torch.expm1(behind)) - behind).sum((0, 2), dtype=torch.float64)
    residual = others.div_(total).scatter_(2, own, -rest / total)
    return loss.to(z.dtype), residual


class _Pair(NamedTuple):
    """A step, the change of the gradient over it, and one over their product."""

    step: Weights
    change: Weights
    weight: PerProblem


class _Point(NamedTuple):
    """Where the problems are, and what is known there."""

    w: Weights
    ridge: Tensor  # problems, axes, 1: l2, and 0 for the bias
    z: Logits
    residual: Logits
    loss: PerProblem
    gradient: Weights


class _Ray(NamedTuple):
    """Directions from a point: the loss along each is a convex function of one number."""

    direction: Weights
    dz: Logits
    slope: PerProblem
    linear: PerProblem  # of the penalty
    quadratic: PerProblem


def minimize(
    x: Float[Tensor, "count axes"],
    labels: Int[Tensor, " count"],
    penalty: Float[Tensor, " problems"],
    start: Float[Tensor, "problems axes classes"],
    *,
    steps: int,
    tolerance: float,
) -> Minimum:
    """Minimize summed cross-entropy of x w plus penalty / 2 |w|^2, the last axis not penalized.

    The columns of x should be about orthogonal: the curvature is taken to be diagonal along them,
    squared length times mean p (1 - p), and history corrects it. A problem has converged when
    g' H g / 2 with this curvature's inverse H is at most `tolerance` of its loss.
    """
    ridge = penalty[:, None, None].repeat(1, x.shape[1], 1)
    ridge[:, -1] = 0
    found = Minimum(
        start.clone(), penalty.new_zeros(len(start)).long(), penalty.new_zeros(len(start)).bool()
    )
    active = torch.arange(len(start), device=x.device)
    z = _logits(x, start)
    loss, residual = cross_entropy(z, labels)
    loss = loss + _dot(ridge * start, start) / 2
    here = _Point(start, ridge, z, residual, loss, _gradient(x, residual, ridge * start))
    length, pairs = x.square().sum(0), list[_Pair]()
    stuck = torch.zeros_like(active, dtype=torch.bool)
    inverse = _inverse_curvature(here, length)
    for step in range(steps + 1):
        if step % _REFRESH == 0:
            inverse = _inverse_curvature(here, length)
        is_done = _dot(here.gradient, inverse * here.gradient) / 2 <= tolerance * here.loss
        ends = is_done | stuck | (step == steps)
        if ends.any():
            at = active[ends]
            found.w[at], found.steps[at], found.converged[at] = here.w[ends], step, is_done[ends]
            if ends.all():
                break
            kept = ~ends
            active, stuck, inverse, here, pairs = _keep(kept, active, stuck, inverse, here, pairs)
        ray = _ray(x, here, _direction(here.gradient, inverse, pairs))
        there, failed = _search(x, labels, here, ray)
        pairs = [*pairs[1 - _HISTORY :], _pair(here, there)]
        if failed.any():
            # Rounding has spoiled the history, or, without any, there is nothing left to gain.
            stuck, pairs = failed & (len(pairs) == 1), []
        here = there
    return found


def _dot(a: Weights, b: Weights) -> PerProblem:
    return (a * b).flatten(1).sum(1)


def _logits(x: Tensor, w: Weights) -> Logits:
    return (x @ w.transpose(0, 1).flatten(1)).unflatten(1, (len(w), -1))


def _gradient(x: Tensor, residual: Logits, pull: Weights) -> Weights:
    by_axis = (x.T @ residual.flatten(1)).unflatten(1, residual.shape[1:])
    return by_axis.transpose(0, 1) + pull


def _inverse_curvature(here: _Point, length: Tensor) -> Weights:
    """|residual| is p, or 1 - p at the label: p (1 - p) either way."""
    sure = here.residual.abs()
    spread = (sure * (1 - sure)).mean(0)
    curvature = length[:, None] * spread[:, None, :] + here.ridge
    # A class that is certain everywhere has none, and then no gradient either.
    return 1 / curvature.clamp(min=torch.finfo(curvature.dtype).tiny ** 0.5)


def _keep(
    kept: Tensor, active: Tensor, stuck: Tensor, inverse: Tensor, here: _Point, pairs: list[_Pair]
) -> tuple[Tensor, Tensor, Tensor, _Point, list[_Pair]]:
    w, ridge, z, residual, loss, gradient = here
    here = _Point(w[kept], ridge[kept], z[:, kept], residual[:, kept], loss[kept], gradient[kept])
    pairs = [_Pair(*(each[kept] for each in pair)) for pair in pairs]
    return active[kept], stuck[kept], inverse[kept], here, pairs


def _direction(gradient: Weights, inverse: Weights, pairs: list[_Pair]) -> Weights:
    """Minus the gradient times the inverse curvature, as history corrects it (two loops)."""
    q, shares = gradient, []
    for pair in reversed(pairs):
        shares.append(pair.weight * _dot(pair.step, q))
        q = q - shares[-1][:, None, None] * pair.change
    q = q * inverse
    if pairs:
        last = pairs[-1]
        ahead = last.weight * _dot(last.change, inverse * last.change)
        # The diagonal in the unit of the last step.
        q = q / torch.where(ahead > 0, ahead, 1)[:, None, None]
    for pair, share in zip(pairs, reversed(shares), strict=True):
        q = q + (share - pair.weight * _dot(pair.change, q))[:, None, None] * pair.step
    return -q


def _ray(x: Tensor, here: _Point, direction: Weights) -> _Ray:
    slope = _dot(here.gradient, direction)
    pulled = here.ridge * direction
    return _Ray(
        direction, _logits(x, direction), slope, _dot(pulled, here.w), _dot(pulled, direction)
    )


def _search(x: Tensor, labels: Labels, here: _Point, ray: _Ray) -> tuple[_Point, Tensor]:
    """Go along the rays to where the slope is less than nine tenths of what it was, either way.

    Slopes decide, as losses differ by less than rounding near the end. A loss may not rise.
    """
    t = torch.ones_like(ray.slope)
    low, high = torch.zeros_like(t), torch.full_like(t, torch.inf)
    slope_low, slope_high = ray.slope, ray.slope
    rounding = 100 * torch.finfo(t.dtype).eps  # logits near 20 have some of their own
    z, residual, loss, good = here.z, here.residual, here.loss, ray.slope >= 0
    for _ in range(_TRIALS):
        z = torch.addcmul(here.z, t[:, None], ray.dz)
        fitted, residual = cross_entropy(z, labels)
        loss = fitted + _dot(here.ridge * here.w, here.w) / 2
        loss = loss + t * ray.linear + t * t * ray.quadratic / 2
        slope = (residual * ray.dz).sum((0, 2)) + ray.linear + t * ray.quadratic
        good = slope.abs() <= 0.9 * ray.slope.abs()
        good &= (slope <= 0) | (loss <= here.loss * (1 + rounding))
        if good.all():
            break
        short, far = ~good & (slope < 0), ~good & (slope >= 0)
        low, slope_low = torch.where(short, t, low), torch.where(short, slope, slope_low)
        high, slope_high = torch.where(far, t, high), torch.where(far, slope, slope_high)
        between = low - (high - low) * slope_low / (slope_high - slope_low)
        margin = (high - low) / 10
        between = torch.minimum(torch.maximum(between, low + margin), high - margin)
        further = t * (ray.slope / (ray.slope - slope)).clamp(2, 10)
        t = torch.where(good, t, torch.where(high.isinf(), further, between))
    w = here.w + t[:, None, None] * ray.direction
    there = _Point(w, here.ridge, z, residual, loss, _gradient(x, residual, here.ridge * w))
    return (there if good.all() else _merge(good, there, here)), ~good


def _merge(good: Tensor, there: _Point, here: _Point) -> _Point:
    """Where the search failed a problem stays."""
    last, mid, only = good[:, None, None], good[:, None], good
    masks = (last, last, mid, mid, only, last)
    return _Point(*(torch.where(m, a, b) for m, a, b in zip(masks, there, here, strict=True)))


def _pair(here: _Point, there: _Point) -> _Pair:
    step, change = there.w - here.w, there.gradient - here.gradient
    along = _dot(step, change)
    # Rounding can turn a curvature of almost 0 negative: such a pair counts for nothing.
    weight = torch.where(along > 0, 1 / along, 0)
    return _Pair(step, change, weight)
