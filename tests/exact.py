"""The exact distribution of w = mu.z, computed without the package, for tests of samples."""

import numpy as np
from scipy import special, stats


class CosineLaw:
    """f(w) ~ (1 - w^2)^((n-3)/2) exp(kappa w), with its distribution function to about 1e-12.

    In theta = arccos(w) the density is smooth for all n. A fine composite Gauss-Legendre rule gives
    F at the edges of 4,000 panels, and F inside a panel by the same rule.
    """

    def __init__(self, n: int, kappa: float) -> None:
        self.n, self.kappa = n, kappa
        grid = np.linspace(0, np.pi, 200_001)[1:-1]
        log_f = self._log_f(grid)
        alive = grid[log_f > log_f.max() - 45]
        self.edges = np.linspace(max(alive[0] - 2e-5, 0), min(alive[-1] + 2e-5, np.pi), 4_001)
        self.nodes, self.weights = np.polynomial.legendre.leggauss(10)
        self.peak = log_f.max()
        panels = self._integral(self.edges[:-1], self.edges[1:])
        self.total = panels.sum()
        self.below = np.concatenate([[0], np.cumsum(panels)])

    def _log_f(self, theta):
        return (self.n - 2) * np.log(np.sin(theta) + 1e-300) - 2 * self.kappa * np.sin(
            theta / 2
        ) ** 2

    def _integral(self, a, b):
        half = (b - a) / 2
        theta = (a + half)[:, None] + half[:, None] * self.nodes
        return half * (np.exp(self._log_f(theta) - self.peak) @ self.weights)

    def cdf_theta(self, theta):
        """Return P(angle <= theta)."""
        theta = np.clip(np.asarray(theta, dtype=np.float64), self.edges[0], self.edges[-1])
        panel = np.clip(np.searchsorted(self.edges, theta, "right") - 1, 0, len(self.edges) - 2)
        inside = self._integral(self.edges[panel], theta)
        return (self.below[panel] + inside) / self.total

    def ks(self, theta) -> float:
        """Return the p value of the Kolmogorov-Smirnov test that angles have this distribution."""
        return stats.kstest(self.cdf_theta(theta), "uniform").pvalue

    def mean_and_variance(self) -> tuple[float, float]:
        """Return A and A' by integration."""
        theta = (self.edges[1:] + self.edges[:-1]) / 2
        half = np.diff(self.edges) / 2
        at = theta[:, None] + half[:, None] * self.nodes
        f = np.exp(self._log_f(at) - self.peak) * self.weights * half[:, None] / self.total
        mean = (f * np.cos(at)).sum()
        return mean, (f * (np.cos(at) - mean) ** 2).sum()


def ratio(n: int, kappa: float) -> float:
    """Return A_n(kappa) by scipy's scaled Bessel functions."""
    return special.ive(n / 2, kappa) / special.ive(n / 2 - 1, kappa)
