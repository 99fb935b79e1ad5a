"""Newton's method for softmax regression, several l2 penalties in one batch of linear algebra.

Directions come from preconditioned conjugate gradients, whose steps are two products of matrices
for all problems: all share their features. The line search only adds logits. Problems that are
done leave the batch.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_LEFT = 0.3  # of the residual, by the conjugate gradients; with 0.1 all takes half as long again
_ROOM = 2**26  # numbers at most in the curvature within classes: 256 MB in float32
_TRIALS = 12  # of a line search: bisection alone would have narrowed it 4,000 times

# Shapes are checked at the doors alone: inside, where every step passes many times, the checks of
# a test run would take longer than the work.
Labels = Tensor  # count
PerProblem = Tensor  # problems
Weights = Tensor  # problems, axes, classes
Logits = Tensor  # count, problems, classes


class Minimum(NamedTuple):
    """Where each problem ended."""

    w: Float[Tensor, "problems axes classes"]
    steps: Int[Tensor, " problems"]
    converged: Bool[Tensor, " problems"]


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
    fallback: Float[Tensor, "problems axes classes"] | None = None,
    *,
    steps: int,
    tolerance: float,
) -> Minimum:
    """Minimize summed cross-entropy of x w plus penalty / 2 |w|^2, the last axis not penalized.

    A problem has converged when a Newton step promised a gain of at most `tolerance` of its loss,
    and was made. Each begins at `start`, or at `fallback` where that has the lower loss. `steps`
    bounds those of the conjugate gradients.
    """
    ridge = penalty[:, None, None].repeat(1, x.shape[1], 1)
    ridge[:, -1] = 0
    here = _arrive(x, labels, ridge, start)
    if fallback is not None:
        other = _arrive(x, labels, ridge, fallback)
        here = _merge(here.loss <= other.loss, here, other)
    length, taken, blocks = x.square().sum(0), 0, None
    active = torch.arange(len(start), device=x.device)
    found = Minimum(start.clone(), torch.zeros_like(active), active < 0)
    while True:
        ray, used, blocks = _newton(x, labels, here, length, blocks, steps - taken)
        taken += used
        is_done = -ray.slope / 2 <= tolerance * here.loss
        here, is_stuck = _search(x, labels, here, ray)
        ends = is_done | is_stuck | (taken >= steps)
        at = active[ends]
        found.w[at], found.steps[at], found.converged[at] = here.w[ends], taken, is_done[ends]
        if ends.all():
            return found
        active, here = active[~ends], _part(~ends, here)
        blocks = None if blocks is None else _Blocks(*(each[~ends] for each in blocks))


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


def _dot(a: Weights, b: Weights) -> PerProblem:
    return (a * b).flatten(1).sum(1)


def _logits(x: Tensor, w: Weights) -> Logits:
    return (x @ w.transpose(0, 1).flatten(1)).unflatten(1, (len(w), -1))


def _gradient(x: Tensor, residual: Logits, pull: Weights) -> Weights:
    by_axis = (x.T @ residual.flatten(1)).unflatten(1, residual.shape[1:])
    return by_axis.transpose(0, 1) + pull


def _arrive(x: Tensor, labels: Labels, ridge: Tensor, w: Weights) -> _Point:
    z = _logits(x, w)
    loss, residual = cross_entropy(z, labels)
    loss = loss + _dot(ridge * w, w) / 2
    return _Point(w, ridge, z, residual, loss, _gradient(x, residual, ridge * w))


def _part(kept: Tensor, here: _Point) -> _Point:
    w, ridge, z, residual, loss, gradient = here
    return _Point(w[kept], ridge[kept], z[:, kept], residual[:, kept], loss[kept], gradient[kept])


class _Blocks(NamedTuple):
    """Curvature within each class, whole: what to divide by where a diagonal will not do."""

    scale: Weights  # to a diagonal of ones
    factor: Tensor  # problems, classes, axes, axes: Cholesky's

    @classmethod
    def of(cls, x: Tensor, bend: Logits, ridge: Tensor) -> "_Blocks":
        """`bend` is p (1 - p)."""
        _, problems, classes = bend.shape
        found = x.new_empty(problems, classes, x.shape[1], x.shape[1])
        for problem in range(problems):
            for one in range(classes):
                found[problem, one] = x.T @ (bend[:, problem, one, None] * x)
        diagonal = found.diagonal(dim1=2, dim2=3)
        diagonal += ridge.mT
        scale = diagonal.clamp(min=torch.finfo(x.dtype).tiny ** 0.5).rsqrt()
        found.mul_(scale[..., None]).mul_(scale[..., None, :])
        # Rounding may have left it with no square root.
        diagonal += 30 * torch.finfo(x.dtype).eps * x.shape[1] ** 0.5
        return cls(scale.mT, torch.linalg.cholesky(found))

    def divide(self, rest: Weights) -> Weights:
        scaled = (self.scale * rest).mT[..., None]
        return self.scale * torch.cholesky_solve(scaled, self.factor)[..., 0].mT


def _newton(
    x: Tensor, labels: Labels, here: _Point, length: Tensor, blocks: _Blocks | None, most: int
) -> tuple[_Ray, int, _Blocks | None]:
    """Minimize the quadratic model by conjugate gradients, as far as it is worth.

    The preconditioner takes the curvature to be diagonal: of a column of x its squared length
    times the mean of p (1 - p). That is near the truth where the columns are orthogonal. Where it
    is not, after a number of steps that cost about as much, `blocks` take its place; they serve
    the next call as well.
    """
    own = labels[:, None, None].expand(-1, here.z.shape[1], 1)
    sure = here.residual.abs()  # p, or 1 - p at the label
    curvature = length[:, None] * (sure * (1 - sure)).mean(0)[:, None] + here.ridge
    # A class that is certain everywhere has none, and then no gradient either.
    inverse = 1 / curvature.clamp(min=torch.finfo(sure.dtype).tiny ** 0.5)
    p = sure.scatter(2, own, 1 - sure.gather(2, own))

    def divide(rest: Weights) -> Weights:
        found = inverse * rest if blocks is None else blocks.divide(rest)
        return found - found.mean(2, keepdim=True)  # softmax does not see a shift of all classes

    direction, dz = torch.zeros_like(here.w), torch.zeros_like(here.z)
    rest = -here.gradient
    q = divide(rest)
    size = _dot(rest, q)
    first, is_running = size, size > 0
    patience = x.shape[1] // 8 if q.numel() * x.shape[1] <= _ROOM else most
    used = 0
    while used < most:
        used += 1
        qz = _logits(x, q)
        # Softmax does not see a shift of all logits. Without that of the label's, what it sees
        # of a nearly certain prediction is not the small difference of large numbers.
        qz_seen = qz - qz.gather(2, own)
        bent = p * (qz_seen - (p * qz_seen).sum(2, keepdim=True))
        product = _gradient(x, bent, here.ridge * q)
        along = torch.where(is_running, size / _dot(q, product), 0)
        direction += along[:, None, None] * q
        dz += along[:, None] * qz
        rest = rest - along[:, None, None] * product
        is_slow = used == patience
        if is_slow:
            blocks = _Blocks.of(x, sure * (1 - sure), here.ridge)
            first = _dot(here.gradient, divide(here.gradient))
        s = divide(rest)
        size, before = _dot(rest, s), size
        is_running = is_running & (size > _LEFT**2 * first)
        if not is_running.any():
            break
        again = is_running & (not is_slow)
        q = s + torch.where(again, size / before, 0)[:, None, None] * q
    pulled = here.ridge * direction
    linear, quadratic = _dot(pulled, here.w), _dot(pulled, direction)
    return _Ray(direction, dz, _dot(here.gradient, direction), linear, quadratic), used, blocks


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
    """One point where it is good, the other elsewhere."""
    last, mid, only = good[:, None, None], good[:, None], good
    masks = (last, last, mid, mid, only, last)
    return _Point(*(torch.where(m, a, b) for m, a, b in zip(masks, there, here, strict=True)))
