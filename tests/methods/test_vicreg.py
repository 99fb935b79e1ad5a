"""VICReg against the paper's equations, written with NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from compressive.config import Config, override
from compressive.methods import build
from compressive.methods.vicreg import COVARIANCE, INVARIANCE, VARIANCE, VICReg, vicreg_loss


def pair(batch: int = 9, dim: int = 5, scale: float = 0.7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = scale * torch.randn(2, batch, dim, dtype=torch.float64, generator=generator)
    return x, x + 0.3 * y


def by_hand(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Compute eqs. 1 to 5 of Bardes et al. (2022): s(Z, Z'), v(Z) and c(Z).

    The official code averages v over the two views, sums c, and averages s over dimensions too.
    """
    variance = covariance = 0.0
    for z in (x, y):
        variance += np.maximum(0, 1 - np.sqrt(z.var(0, ddof=1) + 1e-4)).mean() / 2
        matrix = np.cov(z, rowvar=False)
        covariance += (np.square(matrix).sum() - np.square(np.diag(matrix)).sum()) / z.shape[1]
    return float(np.square(x - y).mean()), float(variance), float(covariance)


@pytest.mark.parametrize("scale", [0.2, 0.7, 3.0])
def test_terms_match_the_equations(scale: float) -> None:
    x, y = pair(scale=scale)
    found = vicreg_loss(x, y)
    invariance, variance, covariance = by_hand(x.numpy(), y.numpy())
    assert found.invariance.mean().item() == pytest.approx(invariance, rel=1e-12)
    assert found.variance.item() == pytest.approx(variance, rel=1e-12, abs=1e-15)
    assert found.covariance.item() == pytest.approx(covariance, rel=1e-12)
    total = 25 * invariance + 25 * variance + covariance
    assert found.loss.item() == pytest.approx(total, rel=1e-12)


def test_default_coefficients_are_the_published_ones() -> None:
    assert (INVARIANCE, VARIANCE, COVARIANCE) == (25.0, 25.0, 1.0)


def test_gradients_match_finite_differences() -> None:
    x, y = (each.requires_grad_() for each in pair(batch=4, dim=3))
    assert torch.autograd.gradcheck(lambda a, b: vicreg_loss(a, b).loss, (x, y))


def test_identical_uncorrelated_views_have_zero_loss() -> None:
    """Hadamard columns times 2 are uncorrelated, with a standard deviation above 1."""
    z = 2 * torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    assert vicreg_loss(z, z).loss.item() == 0.0


@pytest.mark.parametrize("name", ["invariance", "variance", "covariance"])
def test_invalid_coefficients_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*-1"):
        vicreg_loss(*pair(), **{name: -1.0})


def test_collapse_is_penalized() -> None:
    """For constant embeddings, invariance and covariance are 0 and the hinge is 1 - sqrt(1e-4)."""
    z = torch.ones(4, 3, dtype=torch.float64)
    assert vicreg_loss(z, z).loss.item() == pytest.approx(25 * (1 - 1e-2), rel=1e-12)


def test_config_builds_vicreg() -> None:
    method = build(override(Config(), "network.name=test_resnet", "method=vicreg"))
    assert isinstance(method, VICReg)
