"""Newton's method for softmax regression with several l2 penalties in one batch.

Preconditioned conjugate gradients give the directions. Each of their steps takes two matrix
products for all problems, which share their features. The line search only adds logits. Problems
that have converged leave the batch.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_VALUES = 2**26  # limit for the curvature within classes: 256 MB in float32
_RELATIVE_RESIDUAL = 0.3  # of conjugate gradients; 0.1 takes 1.5 times as long in total
_TRIALS = 12  # of a line search: bisection alone narrows the interval by a factor of 4,000

# Only public functions check shapes: in inner functions, which tests call very often, the checks
# would take longer than the computation.
ClassIds = Tensor  # count
PerProblem = Tensor  # problems
Weights = Tensor  # problems, axes, classes
BatchLogits = Tensor  # count, problems, classes


class Minimum(NamedTuple):
    """The solution of each problem."""

    w: Float[Tensor, "problems axes classes"]
    steps: Int[Tensor, " problems"]
    converged: Bool[Tensor, " problems"]


class _Point(NamedTuple):
    """Current weights of the problems, with loss and gradient."""

    w: Weights
    ridge: Tensor  # problems, axes, 1: l2, and 0 for the bias
    z: BatchLogits
    residual: BatchLogits
    loss: PerProblem
    gradient: Weights


class _Ray(NamedTuple):
    """Directions of a line search, along which the loss is convex."""

    direction: Weights
    dz: BatchLogits
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
    block_values: int = BLOCK_VALUES,
) -> Minimum:
    """Minimize summed cross-entropy of x w plus penalty / 2 |w|^2; the last axis has no penalty.

    A problem has converged after a Newton step whose predicted gain was at most `tolerance` of
    its loss. It starts at `start`, or at `fallback` if that has a lower loss. `steps` is the
    largest number of steps of conjugate gradients. `block_values` bounds the memory of the
    second preconditioner; 0 turns it off.
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
        ray, used, blocks = _newton(x, labels, here, length, blocks, steps - taken, block_values)
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
    """Return the sum over examples and its gradient in the logits (probabilities minus one-hot).

    Both are exact up to rounding even if the label has nearly all the probability: the remainder
    is summed over the other classes, not subtracted from 1. Small penalties depend on it.
    """
    own = labels[:, None, None].expand(-1, z.shape[1], 1)
    top = z.amax(2, keepdim=True)
    behind = z.gather(2, own) - top
    # exp(-60) is below rounding; smaller numbers would be subnormal in float32, which is slow.
    others = (z - top).clamp_(min=-60).exp_().scatter_(2, own, 0)
    rest = others.sum(2, keepdim=True)
    total = rest + behind.exp()
    loss = (torch.log1p(rest + torch.expm1(behind)) - behind).sum((0, 2), dtype=torch.float64)
    residual = others.div_(total).scatter_(2, own, -rest / total)
    return loss.to(z.dtype), residual


def _dot(a: Weights, b: Weights) -> PerProblem:
    return (a * b).flatten(1).sum(1)


def _logits(x: Tensor, w: Weights) -> BatchLogits:
    return (x @ w.transpose(0, 1).flatten(1)).unflatten(1, (len(w), -1))


def _weight_gradient(x: Tensor, residual: BatchLogits, pull: Weights) -> Weights:
    by_axis = (x.T @ residual.flatten(1)).unflatten(1, residual.shape[1:])
    return by_axis.transpose(0, 1) + pull


def _arrive(x: Tensor, labels: ClassIds, ridge: Tensor, w: Weights) -> _Point:
    z = _logits(x, w)
    loss, residual = cross_entropy(z, labels)
    loss = loss + _dot(ridge * w, w) / 2
    return _Point(w, ridge, z, residual, loss, _weight_gradient(x, residual, ridge * w))


def _part(kept: Tensor, here: _Point) -> _Point:
    w, ridge, z, residual, loss, gradient = here
    return _Point(w[kept], ridge[kept], z[:, kept], residual[:, kept], loss[kept], gradient[kept])


class _Blocks(NamedTuple):
    """Preconditioner with the full curvature within each class, for when a diagonal is too slow."""

    scale: Weights  # scales the diagonal to ones
    inverse: Tensor  # problems, classes, axes, axes: of the scaled curvature

    @classmethod
    def of(cls, x: Tensor, bend: BatchLogits, ridge: Tensor) -> "_Blocks":
        """Factor the curvature; `bend` is p (1 - p)."""
        _, problems, classes = bend.shape
        found = x.new_empty(problems, classes, x.shape[1], x.shape[1])
        for problem in range(problems):
            for one in range(classes):
                found[problem, one] = x.T @ (bend[:, problem, one, None] * x)
        diagonal = found.diagonal(dim1=2, dim2=3)
        diagonal += ridge.mT
        scale = diagonal.clamp(min=torch.finfo(x.dtype).tiny ** 0.5).rsqrt()
        found.mul_(scale[..., None]).mul_(scale[..., None, :])
        # Keep it positive definite despite rounding.
        diagonal += 30 * torch.finfo(x.dtype).eps * x.shape[1] ** 0.5
        # A product with the inverse is parallel. Solving with a factor goes row by row, in every
        # step. On a CPU both take the same time and as many steps.
        return cls(scale.mT, torch.cholesky_inverse(torch.linalg.cholesky(found)))

    def divide(self, rest: Weights) -> Weights:
        scaled = (self.scale * rest).mT[..., None]
        return self.scale * (self.inverse @ scaled)[..., 0].mT


def _newton(
    x: Tensor,
    labels: ClassIds,
    here: _Point,
    length: Tensor,
    blocks: _Blocks | None,
    most: int,
    block_values: int,
) -> tuple[_Ray, int, _Blocks | None]:
    """Minimize the quadratic model approximately by conjugate gradients.

    The preconditioner is diagonal: the squared length of a column of x times the mean of
    p (1 - p). It is accurate if the columns are orthogonal. If conjugate gradients have not
    converged after as many steps as `blocks` cost, `blocks` replace it, also in the next call.
    """
    own = labels[:, None, None].expand(-1, here.z.shape[1], 1)
    sure = here.residual.abs()  # p, or 1 - p at the label
    curvature = length[:, None] * (sure * (1 - sure)).mean(0)[:, None] + here.ridge
    # A class with probability 0 or 1 everywhere has no curvature and no gradient.
    inverse = 1 / curvature.clamp(min=torch.finfo(sure.dtype).tiny ** 0.5)
    p = sure.scatter(2, own, 1 - sure.gather(2, own))

    def divide(rest: Weights) -> Weights:
        found = inverse * rest if blocks is None else blocks.divide(rest)
        return found - found.mean(2, keepdim=True)  # softmax is invariant to a shift of all classes

    direction, dz = torch.zeros_like(here.w), torch.zeros_like(here.z)
    rest = -here.gradient
    q = divide(rest)
    size = _dot(rest, q)
    first, is_running = size, size > 0
    patience = x.shape[1] // 8 if q.numel() * x.shape[1] <= block_values else most
    used = 0
    while used < most:
        used += 1
        qz = _logits(x, q)
        # Softmax is invariant to a shift of all logits. Subtracting that of the label avoids
        # small differences of large numbers if a prediction is nearly certain.
        qz_seen = qz - qz.gather(2, own)
        bent = p * (qz_seen - (p * qz_seen).sum(2, keepdim=True))
        product = _weight_gradient(x, bent, here.ridge * q)
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
        is_running = is_running & (size > _RELATIVE_RESIDUAL**2 * first)
        if not is_running.any():
            break
        again = is_running & (not is_slow)
        q = s + torch.where(again, size / before, 0)[:, None, None] * q
    pulled = here.ridge * direction
    linear, quadratic = _dot(pulled, here.w), _dot(pulled, direction)
    return _Ray(direction, dz, _dot(here.gradient, direction), linear, quadratic), used, blocks


def _search(x: Tensor, labels: ClassIds, here: _Point, ray: _Ray) -> tuple[_Point, Tensor]:
    """Move along the rays until the absolute slope is at most 0.9 times the initial one.

    The criterion is the slope, because losses differ by less than rounding near the minimum. The
    loss must not increase.
    """
    t = torch.ones_like(ray.slope)
    low, high = torch.zeros_like(t), torch.full_like(t, torch.inf)
    slope_low, slope_high = ray.slope, ray.slope
    rounding = 100 * torch.finfo(t.dtype).eps  # allows for rounding of logits near 20
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
    there = _Point(w, here.ridge, z, residual, loss, _weight_gradient(x, residual, here.ridge * w))
    return (there if good.all() else _merge(good, there, here)), ~good


def _merge(good: Tensor, there: _Point, here: _Point) -> _Point:
    """Take `there` for good problems and `here` for the others."""
    last, mid, only = good[:, None, None], good[:, None], good
    masks = (last, last, mid, mid, only, last)
    return _Point(*(torch.where(m, a, b) for m, a, b in zip(masks, there, here, strict=True)))
