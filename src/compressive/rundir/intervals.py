"""Confidence intervals and p values; NumPy only, because `compressive report` imports no torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Part = tuple[float, float]  # the variance of a mean and its degrees of freedom


class TInterval(NamedTuple):
    """A 95 % confidence interval and the two-sided p value of 0."""

    low: float
    high: float
    p: float


def t_interval(estimate: float, *parts: Part) -> TInterval | None:
    """Return the Welch-Satterthwaite t interval for a sum of independent variances.

    Return None if the variance is zero: equal values do not prove that there is no variance.
    """
    variance = sum(part for part, _ in parts)
    if not 0 < variance < math.inf:
        return None
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    error = math.sqrt(variance)
    reach = t_quantile(0.975, freedom) * error
    p = 2 * max(0.0, 1 - t_cdf(abs(estimate) / error, freedom))
    return TInterval(estimate - reach, estimate + reach, p)


def mean_part(values: Float[np.ndarray, " n"] | Sequence[float]) -> Part:
    """Return the variance of the mean of independent values, and its degrees of freedom."""
    return float(np.var(values, ddof=1)) / len(values), len(values) - 1


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a proportion (1927)."""
    z = 1.959963984540054
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z * z / n)
    return max(0.0, min(share, middle - reach)), min(1.0, max(share, middle + reach))


def adjusted_p(p: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number by Benjamini and Hochberg (1995), in this order."""
    order = np.argsort(p)[::-1]  # from the largest
    scaled = np.asarray(p)[order] * len(p) / np.arange(len(p), 0, -1)
    found = np.empty(len(p))
    found[order] = np.minimum.accumulate(np.minimum(scaled, 1.0))
    return found.tolist()


def t_cdf(t: float, freedom: float) -> float:
    """Return the distribution function of Student's t at t >= 0, accurate to 1e-9.

    With t = sqrt(freedom) tan(angle) the density in the angle is cos^(freedom - 1). Integrate it
    with Simpson's rule. Below three degrees of freedom it is accurate to 1e-5 for t > 20.
    """
    angle = min(math.atan(t / math.sqrt(freedom)), 40 / math.sqrt(freedom))
    height = np.cos(np.linspace(0, angle, 401)) ** (freedom - 1)
    area = height[0] + height[-1] + 4 * height[1::2].sum() + 2 * height[2:-1:2].sum()
    return 0.5 + _t_density(0, freedom) * math.sqrt(freedom) * float(area) * angle / 1200


def t_quantile(p: float, freedom: float) -> float:
    """Return the quantile of Student's t for p > 1/2; Newton's method approaches it from below."""
    t, step = 0.0, 1.0
    while step > 1e-9 * (1 + t):
        step = (p - t_cdf(t, freedom)) / _t_density(t, freedom)
        t += step
    return t


def _t_density(t: float, freedom: float) -> float:
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    log -= (freedom + 1) / 2 * math.log1p(t * t / freedom)
    return math.exp(log) / math.sqrt(math.pi * freedom)
