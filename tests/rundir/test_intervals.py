"""Confidence intervals and p values match scipy and have their nominal coverage."""

import numpy as np
import pytest
from scipy import stats

from compressive.rundir.intervals import (
    adjusted_p,
    mean_part,
    t_cdf,
    t_interval,
    t_quantile,
    wilson_interval,
)


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 7.3, 200, 9999, 1e6])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.995])
def test_t_quantile_matches_scipy(p: float, freedom: float) -> None:
    # Accuracies have at most four digits; Simpson's rule gives nine.
    assert t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-7)


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 7.3, 200, 9999, 1e6])
@pytest.mark.parametrize("t", [0.0, 0.3, 2.0, 4.5, 20.0, 1e3, 1e9])
def test_t_cdf_matches_scipy(t: float, freedom: float) -> None:
    error = 1e-5 if freedom < 3 and t > 20 else 2e-9
    assert t_cdf(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=error)


@pytest.mark.parametrize(
    ("right", "n"), [(30, 30), (0, 7), (1, 1), (198, 200), (5_000, 10_000), (9_999, 10_000)]
)
def test_wilson_interval_matches_scipy(right: int, n: int) -> None:
    interval = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert wilson_interval(right / n, n) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_wilson_interval_covers_where_a_bootstrap_does_not() -> None:
    """Sum the exact coverage for 200 images with probability 0.99; the bootstrap covered 88 %."""
    n, p = 200, 0.99
    intervals = [wilson_interval(k / n, n) for k in range(n + 1)]
    covered = sum(
        stats.binom.pmf(k, n, p) for k, (low, high) in enumerate(intervals) if low <= p <= high
    )
    assert covered > 0.94
    assert wilson_interval(1.0, 30)[0] < 0.9


def test_welch_interval_and_p_match_scipy() -> None:
    first, second = [0.7, 0.72, 0.74], [0.78, 0.8]
    welch = stats.ttest_ind(second, first, equal_var=False)
    found = t_interval(0.79 - 0.72, mean_part(first), mean_part(second))
    assert found is not None
    low, high = welch.confidence_interval()
    assert tuple(found) == pytest.approx((low, high, welch[1]), rel=1e-6)
    assert t_interval(0.1, (0.0, 2), (0.0, 1)) is None
    assert t_interval(0.1, (float("nan"), 2)) is None


@pytest.mark.parametrize("count", [1, 2, 75])
def test_adjusted_p_values_match_scipy(count: int) -> None:
    p = np.random.default_rng(count).uniform(size=count) ** 3
    p[: count // 3] = p[0]  # ties
    expected = stats.false_discovery_control(p)
    assert adjusted_p(p.tolist()) == pytest.approx(expected.tolist(), rel=1e-12)


def test_adjusting_an_empty_list_returns_an_empty_list() -> None:
    assert adjusted_p([]) == []


def test_interval_over_images_and_draws_has_nominal_coverage() -> None:
    """Average over 400 images and three draws, which have different standard deviations."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        image, draw = random.normal(0, 0.4, 400), random.normal(0, 0.02, 3)
        found = t_interval(image.mean() + draw.mean(), mean_part(image), mean_part(draw))
        assert found is not None
        covered += found.low <= 0 <= found.high
    assert covered / 400 > 0.92  # three standard errors of 400 trials below 0.95
