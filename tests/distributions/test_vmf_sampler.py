"""The transport from chi to the vMF angle preserves probability, by an independent integral."""

import math

import numpy as np
import pytest
import torch
from exact import CosineLaw
from scipy import stats

from compressive.distributions import special, vmf_sampler

DIMENSIONS = [2, 3, 4, 5, 8, 16, 64, 128, 256, 2048, 65536]
KAPPAS = [0.0, 1e-8, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1024.0, 16384.0, 1e6, 1e8]
QUANTILES = np.concatenate(
    [10.0 ** np.arange(-12, -1), np.linspace(0.02, 0.98, 97), 1 - 10.0 ** np.arange(-2.0, -13, -1)]
)


def solved(r: torch.Tensor, n: int, kappa: float) -> torch.Tensor:
    k = torch.full_like(r, kappa)
    log_height = special.log_mode_density(k, n) + special.log_area(n - 1)
    return vmf_sampler.angle(r, n, k, log_height, special.mean_resultant_length(k, n))


def chi_quantiles(n: int) -> torch.Tensor:
    return torch.from_numpy(stats.chi(n - 1).ppf(QUANTILES))


@pytest.mark.parametrize("n", [2, 3, 5, 16, 256, 2048])
@pytest.mark.parametrize("kappa", [0.0, 0.1, 10.0, 1024.0, 16384.0, 1e6])
def test_transport_preserves_probability(n: int, kappa: float) -> None:
    """|F(theta(r)) - F_chi(r)| <= 1e-10, where both F come from scipy and numpy.

    This bounds the error of the sampler's radial distribution in the sup norm: a Kolmogorov-Smirnov
    test would need 10^19 draws to detect it. (chi.ppf itself is accurate to about 1e-11.)
    """
    theta = solved(chi_quantiles(n), n, kappa)
    error = CosineLaw(n, kappa).cdf_theta(theta.numpy()) - QUANTILES
    assert np.abs(error).max() <= 1e-10


@pytest.mark.parametrize("n", DIMENSIONS)
def test_solver_converges_for_all_kappa(n: int) -> None:
    """Check the solver's own residual in each tail, where the external integral is not accurate.

    It is 1e-10 relative in every tail down to 1e-12, except next to theta = pi, where a float64
    angle cannot represent pi - theta to better than 4e-16 absolute.
    """
    r = chi_quantiles(n)
    for kappa in KAPPAS:
        k = torch.full_like(r, kappa)
        log_height = special.log_mode_density(k, n) + special.log_area(n - 1)
        side = vmf_sampler._Side.of(r, n, k, log_height)
        theta = side.solve(r)
        assert theta.isfinite().all()
        assert (theta.diff() >= 0).all()
        allowed = 1e-10 * side.mass + 4.5e-16 * torch.exp(side.log_density(theta))
        assert ((side.integral(theta) - side.mass).abs() <= allowed).all(), kappa


@pytest.mark.slow
def test_steps_and_nodes_have_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Halley step and sixteen nodes fewer suffice for all but one angle in 5,000, to 1e-9."""
    usual = slice(8, -8)  # quantiles 1e-4 to 1 - 1e-4
    corners = [(n, kappa) for n in (2, 3, 8, 64, 2048) for kappa in KAPPAS]
    full = [solved(chi_quantiles(n), n, kappa) for n, kappa in corners]
    monkeypatch.setattr(vmf_sampler, "_HALLEY_STEPS", vmf_sampler._HALLEY_STEPS - 1)
    monkeypatch.setattr(vmf_sampler, "_NODES", vmf_sampler._NODES - 16)
    for (n, kappa), theta in zip(corners, full, strict=True):
        fewer = solved(chi_quantiles(n), n, kappa)
        torch.testing.assert_close(fewer[usual], theta[usual], rtol=1e-9, atol=1e-15)


def test_three_dimensions_match_the_closed_form() -> None:
    """n = 3: 1 - w = -log(1 - p (1 - exp(-2 kappa))) / kappa, p the probability of the angle."""
    r = chi_quantiles(3)
    for kappa in (0.5, 10.0, 1e4):
        sag = 2 * torch.sin(solved(r, 3, kappa) / 2) ** 2
        p = -torch.expm1(-r * r / 2)
        exact = -torch.log1p(p * math.expm1(-2 * kappa)) / kappa
        # near p = 1 the closed form itself loses digits to 1 - p
        torch.testing.assert_close(sag, exact, rtol=2e-3 * 2**-10, atol=1e-10 / kappa)


@pytest.mark.parametrize("n", [2, 3, 8, 256, 2048])
@pytest.mark.parametrize("kappa", [0.1, 10.0, 1024.0, 16384.0])
def test_derivative_in_kappa_matches_finite_differences(n: int, kappa: float) -> None:
    """Compare implicit d theta / d kappa to central differences of the solver.

    The step 1e-3 kappa leaves an error of 1e-6 relative from the third derivative.
    """
    r = torch.from_numpy(stats.chi(n - 1).ppf(np.linspace(0.01, 0.99, 33)))
    k = torch.full_like(r, kappa, requires_grad=True)
    with torch.no_grad():
        log_height = special.log_mode_density(k, n) + special.log_area(n - 1)
        a = special.mean_resultant_length(k, n)
    (slope,) = torch.autograd.grad(vmf_sampler.angle(r, n, k, log_height, a).sum(), k)
    h = 1e-3 * kappa
    difference = (solved(r, n, kappa + h) - solved(r, n, kappa - h)) / (2 * h)
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-12)


def test_gradient_sums_over_a_shared_kappa() -> None:
    r = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    k = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    log_height = (special.log_mode_density(k, 4) + special.log_area(3)).detach()
    a = special.mean_resultant_length(k, 4).detach()
    args = (log_height.expand(2, 1), a.expand(2, 1))
    (shared,) = torch.autograd.grad(vmf_sampler.angle(r, 4, k.expand(2, 1), *args).sum(), k)
    each = [
        torch.autograd.grad(
            vmf_sampler.angle(r[i : i + 1], 4, k.view(1, 1), *(x[:1] for x in args)), k
        )
        for i in range(2)
    ]
    torch.testing.assert_close(shared, each[0][0].squeeze() + each[1][0].squeeze())


def fit(n: int, kappa: float) -> vmf_sampler.Transport | None:
    log_height = special.constants(kappa, n).log_mode_density + special.log_area(n - 1)
    return vmf_sampler.transport(n, kappa, log_height)


@pytest.mark.slow
@pytest.mark.parametrize("n", DIMENSIONS)
def test_polynomials_match_the_solver(n: int) -> None:
    """1 - cos(theta) is accurate to 1.2e-10 relative between the points of the fit.

    At the points, 1e-10 is guaranteed. In float32 it is accurate to 3e-7, five units in the last
    place.
    """
    for kappa in KAPPAS:
        if (transport := fit(n, kappa)) is None:
            assert n < 40, "large dimensions always have a short polynomial"
            continue
        low = max(transport.center - transport.width, 1e-3)
        r = torch.linspace(low, transport.center + transport.width, 997, dtype=torch.float64)
        exact = 2 * (torch.sin(solved(r, n, kappa) / 2) / r) ** 2
        torch.testing.assert_close(vmf_sampler.carry(transport, r), exact, rtol=1.2e-10, atol=0)
        narrow = vmf_sampler.carry(transport, r.float()).double()
        torch.testing.assert_close(narrow, exact, rtol=3e-7, atol=0)


def test_papers_concentrations_have_low_degree_polynomials() -> None:
    degrees = {kappa: len(fit(256, kappa).coefficients) - 1 for kappa in (1024.0, 16384.0)}  # type: ignore[union-attr]
    assert degrees == {1024.0: 6, 16384.0: 3}


def test_radii_outside_the_fit_stay_finite() -> None:
    transport = fit(256, 1024.0)
    assert transport is not None
    r = torch.tensor([0.0, 1e-30, 1e3])
    assert ((q := vmf_sampler.carry(transport, r)) > 0).all()
    assert q.isfinite().all()
